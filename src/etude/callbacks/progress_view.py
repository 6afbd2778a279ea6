"""What there is to show of a run, and its lines for a file: no styles, no control characters, no terminal."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from etude.callbacks import progress_words as words
from etude.callbacks.progress_words import Numbers, label, of_total, split_name

MAX_ROWS = 10
"""Finished epochs in the table: the last ones, and the best one if it came earlier."""
MAX_LINE = 100
"""Columns of a log line in a file, as far as there is a choice."""


@dataclass(slots=True)
class Row:
    """A finished epoch."""

    epoch: int
    seconds: float
    numbers: dict[str, float | None]
    """Its metrics; None stands for a number that was not finite."""
    speed: dict[str, float] = field(default_factory=dict)
    """Tokens per second, MFU and the share of the time waiting for data."""
    phase: str = ""
    """The phase it was in, if the run has phases."""


@dataclass(slots=True)
class Phase:
    """A phase of the run.

    >>> Phase(2, "ontology", 4).text, Phase(2).text
    ('phase 2/4 ontology', 'phase 2')
    """

    number: int
    """Counted from 1."""
    name: str = ""
    total: int | None = None

    @property
    def short(self) -> str:
        """Its number."""
        return f"phase {of_total(self.number, self.total)}"

    @property
    def text(self) -> str:
        """Its number and name."""
        return f"{self.short} {self.name}".rstrip()


@dataclass(slots=True)
class Groups:
    """Numbers with names such as `quality/loss` and `val_quality/f1`, mostly of tasks; empty if a run has none."""

    when: str = ""
    """The moment that `numbers` are of, such as `epoch 3`."""
    numbers: Numbers = field(default_factory=dict)
    """Those of the last epoch or validation."""
    latest: Numbers = field(default_factory=dict)
    """Those of log points: for every group the last that had them."""

    def update(self, record: Mapping[str, float | None]) -> None:
        """Take the numbers of a log point; a group that had no part in it keeps those it had."""
        self.latest |= _grouped(record)

    def close(self, when: str, logs: Mapping[str, float | None]) -> None:
        """Take the numbers of an epoch or a validation."""
        if found := _grouped(logs):
            self.when, self.numbers = when, found

    def keep(self, names: Collection[str]) -> None:
        """Forget the log points of all other groups."""
        self.latest = {name: value for name, value in self.latest.items() if split_name(name)[0] in names}


def _grouped(record: Mapping[str, float | None]) -> Numbers:
    return {name: value for name, value in record.items() if split_name(name)[0]}


@dataclass(slots=True)
class View:
    """Everything there is to show."""

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
    """Seconds to the end of the run; None if that is not known."""
    record: dict[str, float] = field(default_factory=dict)
    """The numbers of the last log point."""
    rows: list[Row] = field(default_factory=list)
    validating: bool = False
    note: str = ""
    outcome: str = ""
    """How the run ended; empty while it runs."""
    notices: list[str] = field(default_factory=list)
    """The latest notices of callbacks."""
    groups: Groups = field(default_factory=Groups)
    phase: Phase | None = None
    """The phase under way, if the run has phases."""


def best_row(rows: list[Row]) -> Row | None:
    """Return the row with the least validation loss (or else the highest accuracy), the first if several are equal.

    Only rows of the last phase count: losses of different phases do not compare.
    """
    rows = [row for row in rows if row.phase == rows[-1].phase]
    for name, sign in (("val_loss", 1.0), ("val_accuracy", -1.0)):
        if known := [(sign * value, row) for row in rows if (value := row.numbers.get(name)) is not None]:
            return min(known, key=lambda pair: pair[0])[1]
    return None


def keep_rows(rows: list[Row]) -> list[Row]:
    """Return the last rows, and before them the best one."""
    best, last = best_row(rows), rows[-MAX_ROWS:]
    return last if best is None or best in last else [best, *last]


def log_line(view: View) -> str:
    """Return the last log point as one line; a long one leaves the gradient norm out, and the name of the phase."""
    line = ""
    for phase in (view.phase.text, view.phase.short) if view.phase is not None else ("",):
        place = [f"epoch {of_total(view.epoch + 1, view.total_epochs)}", *([phase] if phase else []), _step(view)]
        spans = words.log_spans(view.record, MAX_LINE - len("  ".join(place)), gap=2)
        line = "  ".join(place + words.join(spans))
        if len(line) <= MAX_LINE:
            break
    return line


def validation_line(view: View, metrics: Mapping[str, float]) -> str:
    """Return the numbers of a validation inside an epoch as one line; those of groups are for their table."""
    ours = {name: value for name, value in metrics.items() if "/" not in name and name != "phase"}
    return "  ".join([_step(view), *words.labelled(words.worth_showing(ours))])


def _step(view: View) -> str:
    return f"step {of_total(view.step, view.total_steps, '')}"


def epoch_line(view: View, row: Row) -> str:
    """Return a finished epoch as one line."""
    parts = [f"epoch {of_total(row.epoch + 1, view.total_epochs)} done in {words.duration(row.seconds)}"]
    parts += [f"phase {row.phase}"] if row.phase else []
    shown = words.worth_showing(row.numbers)
    if "val_perplexity" in shown:
        shown.pop("perplexity", None)
    parts += words.labelled(shown) + words.join([span for span in words.speed(row.speed) if span[0] != "mfu"])
    return "  ".join(parts + ["(best)"] * (best_row(view.rows) is row))


def outcome_line(view: View) -> str:
    """Return how the run ended, and its best epoch."""
    line = f"{view.outcome} {'in' if view.outcome == 'finished' else 'after'} {words.duration(view.elapsed_s)}"
    if (best := best_row(view.rows)) is None:
        return line
    name = "val_loss" if best.numbers.get("val_loss") is not None else "val_accuracy"
    line += f", best {label(name)} {words.number(best.numbers[name])}"
    if (perplexity := best.numbers.get("val_perplexity")) is not None:
        line += f" (perplexity {words.metric('perplexity', perplexity)})"
    return line + f" in epoch {best.epoch + 1}" + (f" of phase {best.phase}" if best.phase else "")
