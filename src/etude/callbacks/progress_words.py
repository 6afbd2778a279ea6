"""Numbers, names and times in few characters, for people."""

import math
from collections.abc import Collection, Mapping

Numbers = dict[str, float | None]
"""Numbers by name; None stands for one that was not finite."""
Spans = list[tuple[str, str]]
"""Label and value of each number, in their order."""

_LABELS = {"accuracy": "acc", "perplexity": "ppl", "grad_norm": "grad norm"}
_NOT_METRICS = frozenset(
    (
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
    )
)
_NO_GROUPS = frozenset({"", "grad_norm", "grad_cosine"})
"""What stands before a `/` and is no group: norms of layers, and cosines of pairs."""
_LEAST_WAIT = 0.001
"""Share of the time waiting for data that is worth a word."""
_LEAST_WAIT_OF_SAMPLES = 0.25
"""The same, beside samples per second: small models are done with a batch before the next one is there."""


def split_name(name: str) -> tuple[str, str]:
    """Return the group of a number, "" if it has none, and its own name.

    >>> split_name("val_quality/f1"), split_name("val_loss"), split_name("grad_norm/layers.0")
    (('quality', 'val_f1'), ('', 'val_loss'), ('', 'grad_norm/layers.0'))
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
    """Return the numbers with None for those that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def label(name: str) -> str:
    """Return the short name of a number.

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


def of_total(count: int, total: int | None, separator: str = ",") -> str:
    """Return `3/10`, or `3` if the total is not known."""
    return "/".join(f"{value:{separator}}" for value in (count, total) if value is not None)


def to_ascii(text: str) -> str:
    """Return a text for a terminal or file that knows no other characters."""
    return text.encode("ascii", "replace").decode()


def worth_showing(metrics: Mapping[str, float | None], *, ordered: bool = False) -> Numbers:
    """Return the metrics without those that say little beside others; `ordered` puts the loss and the like first.

    Left out are a language model's accuracy and nll beside its perplexity, and of losses of expected values what the
    root of the mean squared error says in the units of the values.

    >>> list(worth_showing({"loss_total": 1.0, "loss_ce": 1.0, "loss": 1.0, "loss_x": 1.0, "rmse_x": 1.0}))
    ['loss_ce', 'loss', 'rmse_x']
    """
    second = "perplexity" if "perplexity" in metrics else "accuracy"
    first = [name for name in ("loss", second, "val_loss", f"val_{second}") if name in metrics and ordered]
    little = {"loss_total"} | ({"accuracy", "nll"} if {"perplexity", "val_perplexity"} & metrics.keys() else set())

    def says_little(name: str) -> bool:
        bare, squared = name.removeprefix("val_"), name.replace("loss_", "rmse_", 1)
        return bare in little or bare.startswith("mse_") or (squared != name and squared in metrics)

    return {name: metrics[name] for name in [*first, *(name for name in metrics if not says_little(name))]}


def labelled(metrics: Mapping[str, float | None]) -> list[str]:
    """Return metrics as words, each with its label."""
    return [f"{label(name)} {metric(name, value)}" for name, value in metrics.items()]


def log_spans(record: Mapping[str, float | None], room: int, gap: int) -> Spans:
    """Return label and value of each number of a log point worth a glance, most important first.

    Where `room` is short, with `gap` columns between two numbers, speed says more than the gradient norm.
    """
    metrics = worth_showing({name: value for name, value in record.items() if is_metric(name)}, ordered=True)
    spans = [(label(name), metric(name, value)) for name, value in metrics.items()]
    if (lr := record.get("lr")) is not None:
        spans.append(("lr", f"{lr:.1e}"))
    if "grad_norm" in record:
        spans.append(("grad norm", number(record["grad_norm"])))
    if record.get("tokens_per_s"):
        spans += speed(record)
    elif name := next((name for name in ("samples_per_s", "batches_per_s") if record.get(name)), None):
        per_s = record[name] or 0.0
        spans.append(("", f"{per_s:,.{0 if per_s >= 10 else 2}f} {name.replace('_per_', '/')}"))
        if (wait := record.get("data_wait")) and wait >= _LEAST_WAIT_OF_SAMPLES:
            spans.append(("waiting for data", f"{wait:.0%}"))
    if skipped := record.get("skipped"):
        spans.append(("skipped steps", f"{skipped:.0f}"))
    if record.get("tokens_per_s") and sum(len(text) + gap for text in join(spans)) > room:
        spans = [span for span in spans if span[0] != "grad norm"]
    return spans


def speed(record: Mapping[str, float | None]) -> Spans:
    """Return label and value of tokens per second, MFU and the time waiting for data, as far as they are known.

    >>> speed({"tokens_per_s": 15230.0, "mfu": 0.412, "data_wait": 0.003})
    [('', '15.2k tok/s'), ('mfu', '41%'), ('data wait', '0.3%')]
    """
    spans = []
    if tokens := record.get("tokens_per_s"):
        spans.append(("", f"{rate(tokens)} tok/s"))
    for name, least in (("mfu", -math.inf), ("data_wait", _LEAST_WAIT)):
        if (share := record.get(name)) is not None and share >= least:
            spans.append((label(name), f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"))
    return spans


def join(spans: Collection[tuple[str, str]]) -> list[str]:
    """Return label and value of each number as one text."""
    return [f"{name} {value}".strip() for name, value in spans]
