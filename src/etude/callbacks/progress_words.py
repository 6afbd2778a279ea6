"""Numbers, names and times in few characters, for people, and the numbers that belong to groups."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from unicodedata import east_asian_width

Span = tuple[str, str]
"""Text and its style, in rich's words ("dim", "bold", "cyan" …)."""
Line = list[Span]
Numbers = dict[str, float | None]
"""Numbers by name; None stands for one that was not finite."""
_LABELS = {"accuracy": "acc", "perplexity": "ppl", "grad_norm": "grad norm"}
_NOT_METRICS = frozenset(
    {
        "step",
        "epoch",
        "samples",
        "tokens",
        "lr",
        "skipped",
        "data_wait",
        "mfu",
        "grad_norm",
        "grad_conflicts",
        "phase",
    }
)
_NO_GROUPS = frozenset({"grad_norm", "grad_cosine"})
"""What stands before a `/` and is no group: norms of layers, and cosines of pairs."""
_LEAST_WAIT = 0.001
"""Share of the time waiting for data that is worth a word."""
_LEAST_WAIT_OF_SAMPLES = 0.25
"""The same, beside samples per second: small models are done with a batch before the next one is there."""


def is_metric(name: str) -> bool:
    """True for losses and metrics of the whole run; False for those of a group, and for rates, counters and settings.

    >>> [name for name in ("loss", "val_accuracy", "lr", "samples_per_s", "quality/loss") if is_metric(name)]
    ['loss', 'val_accuracy']
    """
    return (
        name not in _NOT_METRICS and "/" not in name and not name.endswith("_s") and not name.startswith("grad_norm_")
    )


def label(name: str) -> str:
    """Return the short name of a number.

    >>> label("val_accuracy")
    'val acc'
    """
    prefix, base = ("val ", name[4:]) if name.startswith("val_") else ("", name)
    return prefix + _LABELS.get(base, base.replace("_", " "))


def number(value: float | None) -> str:
    """Return a number in at most nine characters.

    >>> number(0.041234), number(4.1e-6), number(1234.5), number(float("nan")), number(7)
    ('0.0412', '4.10e-06', '1234.50', 'nan', '7')
    """
    if value is None or not math.isfinite(value):
        return "nan" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 100 else f"{value:.2f}"


def metric(name: str, value: float | None) -> str:
    """Return a metric in the form its kind asks for: a perplexity has four digits, other numbers have four decimals.

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


def duration(seconds: float, tenths: bool = True) -> str:
    """Return a time in words of the clock, short ones with tenths of a second.

    >>> duration(4.13), duration(4.13, tenths=False), duration(42), duration(63), duration(3723)
    ('4.1 s', '4 s', '42 s', '1:03', '1:02:03')
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s" if tenths and seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def numbers(record: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return label and value of each number of a log point worth a glance, most important first."""
    metrics = {name: value for name, value in record.items() if is_metric(name)}
    first = ("loss", "perplexity") if "perplexity" in metrics else ("loss", "accuracy")
    names: list[str] = [name for name in first if name in metrics]
    names += [name for name in metrics if name not in (*names, *left_out(metrics))]
    spans = [(label(name), metric(name, metrics[name])) for name in names]
    if (lr := record.get("lr")) is not None:
        spans.append(("lr", f"{lr:.1e}"))
    if "grad_norm" in record:
        spans.append(("grad norm", number(record["grad_norm"])))
    if record.get("tokens_per_s"):
        spans += speed(record)
    elif name := next((name for name in ("samples_per_s", "batches_per_s") if record.get(name)), None):
        per_s, unit = record[name] or 0.0, name.replace("_per_", "/")
        spans.append(("", f"{per_s:,.0f} {unit}" if per_s >= 10 else f"{per_s:.2f} {unit}"))
        if (wait := record.get("data_wait")) and wait >= _LEAST_WAIT_OF_SAMPLES:
            spans.append(("waiting for data", f"{wait:.0%}"))
    if skipped := record.get("skipped"):
        spans.append(("skipped steps", f"{skipped:.0f}"))
    return spans


def speed(record: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return label and value of tokens per second, MFU and the time waiting for data, as far as they are known.

    >>> speed({"tokens_per_s": 15230.0, "mfu": 0.412, "data_wait": 0.003})
    [('', '15.2k tok/s'), ('mfu', '41%'), ('data wait', '0.3%')]
    """
    spans = []
    if tokens := record.get("tokens_per_s"):
        spans.append(("", f"{rate(tokens)} tok/s"))
    if (mfu := record.get("mfu")) is not None:
        spans.append(("mfu", _percent(mfu)))
    if (wait := record.get("data_wait")) is not None and wait >= _LEAST_WAIT:
        spans.append(("data wait", _percent(wait)))
    return spans


def left_out(metrics: Collection[str]) -> tuple[str, ...]:
    """Return metrics that say little beside others.

    These are a language model's accuracy and nll beside its perplexity, and of losses of expected values what the root
    of the mean squared error says in the units of the values.

    >>> left_out(["loss", "loss_total", "loss_ce", "loss_period", "rmse_period"])
    ('loss_total', 'loss_period')
    """
    is_language = "perplexity" in metrics or "val_perplexity" in metrics
    return tuple(
        name
        for name in metrics
        if (is_language and name.removeprefix("val_") in ("accuracy", "nll"))
        or name.removeprefix("val_") == "loss_total"
        or (name.replace("loss_", "rmse_", 1) != name and name.replace("loss_", "rmse_", 1) in metrics)
        or name.removeprefix("val_").startswith("mse_")
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def of_total(count: int, total: int | None, separator: str = ",") -> str:
    """Return `3/10`, or `3` if the total is not known."""
    pattern = f"{{:{separator}}}"
    return pattern.format(count) + ("" if total is None else "/" + pattern.format(total))


def cells(text: str) -> int:
    """Return how many columns a text takes: characters of some scripts take two."""
    if text.isascii():
        return len(text)
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def fit(text: str, width: int) -> str:
    """Return the beginning of a text that fits into `width` columns."""
    text = text[: max(0, width)]
    while cells(text) > width:
        text = text[:-1]
    return text


def to_ascii(text: str) -> str:
    """Return a text for a terminal or file that knows no other characters."""
    return text.encode("ascii", "replace").decode()


@dataclass(slots=True)
class Groups:
    """Numbers with names such as `quality/loss` and `val_quality/f1`; empty if a run has no groups."""

    when: str = ""
    """The moment that `numbers` are of, such as `epoch 3`."""
    numbers: Numbers = field(default_factory=dict)
    """Those of the last epoch or validation."""
    latest: Numbers = field(default_factory=dict)
    """Those of log points: for every group the last that had them."""

    def update(self, record: Mapping[str, float | None]) -> None:
        """Take the numbers of a log point; a group that had no part in it keeps those it had."""
        self.latest |= grouped(record)

    def close(self, when: str, logs: Mapping[str, float | None]) -> None:
        """Take the numbers of an epoch or a validation."""
        if found := grouped(logs):
            self.when, self.numbers = when, found

    def keep(self, names: Collection[str]) -> None:
        """Forget the log points of all other groups."""
        self.latest = {name: value for name, value in self.latest.items() if split_name(name)[0] in names}


def grouped(record: Mapping[str, float | None]) -> Numbers:
    """Return the numbers that belong to a group."""
    return {name: value for name, value in record.items() if of_group(name) is not None}


def of_group(name: str) -> tuple[str, str] | None:
    """Return the group a number belongs to, and the number's own name; None if it has none.

    >>> of_group("val_quality/f1"), of_group("quality/loss"), of_group("val_loss"), of_group("grad_norm/layers.0")
    (('quality', 'val_f1'), ('quality', 'loss'), None, None)
    """
    prefix, bare = ("val_", name[4:]) if name.startswith("val_") else ("", name)
    group, slash, own = bare.partition("/")
    return (group, prefix + own) if slash and group not in _NO_GROUPS else None


def split_name(name: str) -> tuple[str, str]:
    """Return the group of a number, "" if it has none, and its own name."""
    found = of_group(name)
    return found if found is not None else ("", name)
