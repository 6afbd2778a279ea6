"""Numbers, names and times in few characters, for people."""

import math
from collections.abc import Mapping
from unicodedata import east_asian_width

_LABELS = {"accuracy": "acc", "perplexity": "ppl", "grad_norm": "grad norm"}
_NOT_METRICS = frozenset({"step", "epoch", "samples", "lr", "skipped", "data_wait", "grad_norm"})


def is_metric(name: str) -> bool:
    """True for losses and metrics; False for rates, counters and settings.

    >>> [name for name in ("loss", "val_accuracy", "lr", "samples_per_s", "grad_norm_max") if is_metric(name)]
    ['loss', 'val_accuracy']
    """
    return name not in _NOT_METRICS and not name.endswith("_s") and not name.startswith("grad_norm_")


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
    names: list[str] = [name for name in ("loss", "accuracy") if name in metrics]
    names += [name for name in metrics if name not in names]
    spans = [(label(name), number(metrics[name])) for name in names]
    if (lr := record.get("lr")) is not None:
        spans.append(("lr", f"{lr:.1e}"))
    if "grad_norm" in record:
        spans.append(("grad norm", number(record["grad_norm"])))
    if rate := record.get("samples_per_s"):
        spans.append(("", f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2f} samples/s"))
    if (wait := record.get("data_wait")) and wait >= 0.25:
        spans.append(("waiting for data", f"{wait:.0%}"))
    if skipped := record.get("skipped"):
        spans.append(("skipped steps", f"{skipped:.0f}"))
    return spans


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
