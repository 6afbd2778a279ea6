"""The text of a progress display: compact numbers, and one line per event."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from etude.core.monitor import DEFAULT_MONITOR, Best, Mode

Numbers = dict[str, float | None]
"""Metrics by name; None for a non-finite value."""

MAX_ROWS = 10
"""Number of finished epochs shown: the last ones, and the best one if it is earlier."""
MAX_POINTS = 1000
"""Points of a curve in a notebook."""

Judges = Sequence[tuple[str, Mode]]
"""Metrics that tell which epoch is the best; the first one that is known counts."""
USUAL_JUDGES: Judges = ((DEFAULT_MONITOR, "min"), ("val_accuracy", "max"))

_LABELS = {"accuracy": "acc", "perplexity": "ppl"}
_NOT_METRICS = frozenset(
    "step epoch samples tokens lr skipped data_wait mfu memory_bytes grad_norm grad_conflicts phase".split()  # noqa: SIM905
)
_NO_GROUPS = frozenset({"", "grad_norm", "grad_cosine", "lr"})
"""Prefixes before a `/` that are not groups: norms of layers, and cosines of pairs."""
_LEAST_WAIT = 0.01
"""Share of the time waiting for data that is worth showing."""


# --- what is shown


@dataclass(slots=True)
class EpochRow:
    """A finished epoch."""

    epoch: int
    seconds: float
    numbers: Numbers
    """Metrics of the whole run, none of a group."""
    phase: str = ""
    """Number and name of its phase, if the run has phases."""


@dataclass(slots=True)
class Groups:
    """Metrics with names such as `quality/loss` and `val_quality/f1`, mostly of tasks; empty if there are none."""

    when: str = ""
    """When `numbers` were measured, such as `epoch 3`."""
    numbers: Numbers = field(default_factory=dict)
    """Metrics of the last epoch or validation."""
    latest: Numbers = field(default_factory=dict)
    """Metrics of log points: for every group the last ones reported."""

    def update(self, record: Numbers) -> None:
        """Take the metrics of a log point; a group that is missing keeps its last ones."""
        self.latest |= _grouped(record)

    def close(self, when: str, logs: Numbers) -> None:
        """Take the metrics of an epoch or a validation."""
        if found := _grouped(logs):
            self.when, self.numbers = when, found

    def keep(self, names: Collection[str]) -> None:
        """Drop the log points of all other groups."""
        self.latest = {name: value for name, value in self.latest.items() if split_name(name)[0] in names}


def _grouped(record: Numbers) -> Numbers:
    return {name: value for name, value in record.items() if split_name(name)[0]}


@dataclass(slots=True)
class View:
    """Everything that is shown."""

    title: str = ""
    subtitle: str = ""
    total_epochs: int | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    elapsed_s: float = 0.0
    left_s: float | None = None
    """Seconds to the end of the run; None if unknown."""
    record: Numbers = field(default_factory=dict)
    """The metrics of the last log point."""
    rows: list[EpochRow] = field(default_factory=list)
    validating: bool = False
    note: str = ""
    outcome: str = ""
    """How the run ended; empty while it runs."""
    notices: list[str] = field(default_factory=list)
    """The latest notices of callbacks."""
    groups: Groups = field(default_factory=Groups)
    phase: str = ""
    """Number and name of the current phase, such as `2/4 ontology`, if the run has phases."""
    best: Best | None = None
    """The metric by which the run is judged."""
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Losses by step, which a notebook shows at the end."""

    def add_losses(self, record: Mapping[str, float | None], *names: str) -> None:
        """Add values to the curves; a long curve keeps every second point.

        >>> view = View()
        >>> for view.step in range(4000):
        ...     view.add_losses({"loss": 1.0}, "loss")
        >>> MAX_POINTS / 2 <= len(view.curves["loss"]) <= MAX_POINTS, view.curves["loss"][-1]
        (True, (3999, 1.0))
        """
        for name in names:
            if (value := record.get(name)) is not None:
                points = self.curves.setdefault(name, [])
                points.append((self.step, value))
                if len(points) > MAX_POINTS:
                    del points[1:-1:2]

    @property
    def judges(self) -> Judges:
        """The metrics that tell which epoch is the best."""
        is_usual = self.best is None or self.best.name == DEFAULT_MONITOR
        return USUAL_JUDGES if self.best is None or is_usual else ((self.best.name, self.best.mode),)


def best_row(rows: list[EpochRow], judges: Judges = USUAL_JUDGES) -> EpochRow | None:
    """Return the row with the lowest validation loss (or else the highest accuracy), the first of equal ones.

    `judges` are other metrics. Only rows of the last phase count: losses of different phases are not comparable.
    """
    rows = [row for row in rows if row.phase == rows[-1].phase]
    for name, mode in judges:
        sign = 1.0 if mode == "min" else -1.0
        if known := [(sign * value, row) for row in rows if (value := row.numbers.get(name)) is not None]:
            return min(known, key=lambda pair: pair[0])[1]
    return None


def keep_rows(rows: list[EpochRow], count: int = MAX_ROWS, judges: Judges = USUAL_JUDGES) -> list[EpochRow]:
    """Return the last rows, and before them the best one."""
    best, last = best_row(rows, judges), rows[-count:]
    return last if best is None or best in last else [best, *last]


# --- lines


def log_line(view: View) -> str:
    """Return the last log point as one line."""
    place = [f"epoch {of_total(view.epoch + 1, view.total_epochs)}", *_phase(view.phase), _step(view)]
    return "  ".join(place + [f"{name} {value}".strip() for name, value in log_numbers(view.record)])


def validation_line(view: View, metrics: Numbers) -> str:
    """Return the metrics of a validation inside an epoch as one line; those of groups are in their table."""
    return "  ".join([_step(view), *_labelled(metrics)])


def epoch_line(view: View, row: EpochRow) -> str:
    """Return a finished epoch as one line."""
    place = f"epoch {of_total(row.epoch + 1, view.total_epochs)} done in {duration(row.seconds)}"
    rates = [f"{name} {value}".strip() for name, value in speed(row.numbers) if name != "mfu"]
    mark = ["(best)"] if best_row(view.rows, view.judges) is row else []
    return "  ".join([place, *_phase(row.phase), *_labelled(row.numbers), *rates, *mark])


def outcome_line(view: View) -> str:
    """Return how the run ended, and the best and the last value of the metric by which it is judged."""
    line = f"{view.outcome} {'in' if view.outcome == 'finished' else 'after'} {duration(view.elapsed_s)}"
    if view.best is not None and view.best.best is not None:
        return "  ".join([f"{line}, {judged(view.best)}", *_phase(view.phase)])
    if (best := best_row(view.rows, view.judges)) is None:
        return line
    name = next(name for name, _ in view.judges if best.numbers.get(name) is not None)
    return "  ".join(
        [f"{line}, best {label(name)} {number(best.numbers[name])} in epoch {best.epoch + 1}", *_phase(best.phase)]
    )


def judged(best: Best) -> str:
    """Return the best and the last value of a metric with their epochs and steps.

    >>> found = Best("val_f1", "max")
    >>> found.add(0.5, 100, 1), found.add(0.4, 200, 2)
    (True, False)
    >>> judged(found)
    'best val f1 0.5000 in epoch 1 (step 100), last 0.4000 in epoch 2 (step 200)'
    """
    if best.best is None or best.last is None:
        return ""
    text = f"best {label(best.name)} {number(best.best.value)}"
    perplexity = best.best.metrics.get("val_perplexity")
    if perplexity is not None and best.name == DEFAULT_MONITOR:
        text += f" (perplexity {metric('perplexity', perplexity)})"
    text += f" in epoch {best.best.epoch} (step {best.best.step:,})"
    if best.last.step != best.best.step:
        text += f", last {number(best.last.value)} in epoch {best.last.epoch} (step {best.last.step:,})"
    return text + ", best weights restored" * best.restored


def log_numbers(record: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return label and value of the main metrics of a log point, most important first."""
    found = [(label(name), metric(name, value)) for name, value in worth_showing(record).items()]
    if (lr := record.get("lr")) is not None:
        found.append(("lr", f"{lr:.1e}"))
    found += speed(record)
    if "grad_norm" in record:
        found.append(("grad norm", number(record["grad_norm"])))
    if skipped := record.get("skipped"):
        found.append(("skipped steps", f"{skipped:.0f}"))
    return found


def speed(record: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return label and value of the throughput, MFU and the time waiting for data, if known.

    >>> speed({"tokens_per_s": 15230.0, "samples_per_s": 15.0, "mfu": 0.412, "data_wait": 0.034})
    [('', '15.2k tokens/s'), ('mfu', '41.2%'), ('data wait', '3.4%')]
    """
    spans = []
    if unit := next((one for one in ("tokens", "samples", "batches") if record.get(f"{one}_per_s")), None):
        spans.append(("", f"{rate(record[f'{unit}_per_s'] or 0.0)} {unit}/s"))
    for name, least in (("mfu", 0.0), ("data_wait", _LEAST_WAIT)):
        if (share := record.get(name)) is not None and share >= least:
            spans.append((label(name), f"{share:.1%}"))
    return spans


def worth_showing(record: Mapping[str, float | None]) -> Numbers:
    """Return the metrics of the whole run without redundant ones; losses come first.

    A language model's accuracy and nll are omitted beside its perplexity. Losses of expected values are omitted
    beside the root mean squared error, which is in the units of the values.

    >>> list(worth_showing({"loss_total": 1.0, "loss_ce": 1.0, "loss": 1.0, "loss_x": 1.0, "rmse_x": 1.0, "lr": 1.0}))
    ['loss', 'loss_ce', 'rmse_x']
    """
    metrics = {name: value for name, value in record.items() if is_metric(name)}
    is_language = not {"perplexity", "val_perplexity"}.isdisjoint(metrics)
    second = "perplexity" if is_language else "accuracy"
    little = {"loss_total", "accuracy", "nll"} if is_language else {"loss_total"}

    def says_little(name: str) -> bool:
        bare, squared = name.removeprefix("val_"), name.replace("loss_", "rmse_", 1)
        return bare in little or bare.startswith("mse_") or (squared != name and squared in metrics)

    first = [name for name in ("loss", second, "val_loss", f"val_{second}") if name in metrics]
    return {name: metrics[name] for name in [*first, *(name for name in metrics if not says_little(name))]}


def _labelled(numbers: Numbers) -> list[str]:
    return [f"{label(name)} {metric(name, value)}" for name, value in worth_showing(numbers).items()]


def _phase(phase: str) -> list[str]:
    return [f"phase {phase}"] if phase else []


def _step(view: View) -> str:
    return f"step {of_total(view.step, view.total_steps, '')}"


# --- names and numbers


def split_name(name: str) -> tuple[str, str]:
    """Return the group of a metric ("" if none) and its name within the group.

    >>> split_name("val_quality/f1"), split_name("val_loss"), split_name("lr/backbone")
    (('quality', 'val_f1'), ('', 'val_loss'), ('', 'lr/backbone'))
    """
    bare = name.removeprefix("val_")
    group, slash, own = bare.partition("/")
    is_grouped = slash and group not in _NO_GROUPS
    return (group, name[: len(name) - len(bare)] + own) if is_grouped else ("", name)


def is_metric(name: str) -> bool:
    """True for losses and metrics of the whole run; False for those of a group, and for rates, counters and settings.

    >>> [name for name in ("loss", "val_accuracy", "lr", "samples_per_s", "quality/loss") if is_metric(name)]
    ['loss', 'val_accuracy']
    """
    return not (name in _NOT_METRICS or "/" in name or name.endswith("_s") or name.startswith("grad_norm_"))


def finite(numbers: Mapping[str, float]) -> Numbers:
    """Return the metrics with None for non-finite values."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def label(name: str) -> str:
    """Return the short name of a metric.

    >>> label("val_accuracy")
    'val acc'
    """
    bare = name.removeprefix("val_")
    return "val " * (bare != name) + _LABELS.get(bare, bare.replace("_", " "))


def number(value: float | None) -> str:
    """Return a number in at most nine characters.

    >>> number(0.041234), number(4.1e-6), number(1234.5), number(float("nan")), number(7)
    ('0.0412', '4.10e-06', '1234.50', 'nan', '7')
    """
    if value is None or not math.isfinite(value):
        return "nan" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.2f}"


def metric(name: str, value: float | None) -> str:
    """Return a metric formatted for its kind: a perplexity with four digits, others with four decimals.

    >>> metric("loss", 3.21), metric("val_perplexity", 24.7791), metric("perplexity", 50257.0)
    ('3.2100', '24.78', '50,257')
    """
    if value is None or not name.endswith("perplexity") or not 0.1 <= value < 1e7:
        return number(value)
    return f"{value:.{max(0, 3 - int(math.log10(max(value, 1))))}f}" if value < 9999.5 else f"{value:,.0f}"


def rate(value: float) -> str:
    """Return a number per second in three or four digits.

    >>> rate(0.42), rate(152.3), rate(22_000), rate(152_300), rate(1.52e6)
    ('0.42', '152', '22.0k', '152k', '1.52M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + unit if value < 999.5 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}" if value >= 9.5 else f"{value:.2f}"


def parameters_line(size: int, trained: int) -> str:
    """Return the number of parameters in words, and how many of them are trained unless all are.

    >>> parameters_line(1234, 1234), parameters_line(1234, 34)
    ('1,234 parameters', '1,234 parameters, 34 of them trained')
    """
    return f"{size:,} parameters" + (f", {trained:,} of them trained" if trained != size else "")


def duration(seconds: float) -> str:
    """Return a duration as h:mm:ss, short ones with tenths of a second.

    >>> duration(4.13), duration(42), duration(63), duration(3723)
    ('4.1 s', '42 s', '1:03', '1:02:03')
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def of_total(count: int, total: int | None, separator: str = ",") -> str:
    """Return `3/10`, or `3` if the total is unknown."""
    return "/".join(f"{value:{separator}}" for value in (count, total) if value is not None)
