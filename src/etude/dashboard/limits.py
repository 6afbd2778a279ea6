"""What limits the speed of a run, in words."""

from statistics import median
from typing import Any

from etude.dashboard.catalogue import Run, ends_of
from etude.dashboard.parsing import parse
from etude.monitor.reading import ENVIRONMENT, METRICS, read_json

NAMES = ("samples_per_s", "tokens_per_s", "mfu", "data_wait", "memory_bytes")
_RECENT = 20
"""Log points over which rates are taken."""
_WAITS, _FAST, _SLOW = 0.15, 0.4, 0.15
_SLOWER = 0.75
_FULL, _HALF = 0.9, 0.5


def limits(run: Run) -> dict[str, Any]:
    """Return the rates of the last log points, and what limits the run."""
    records = [one for one in parse(ends_of(run.path / METRICS)) if one.get("split") == "train"]
    rates: dict[str, float | None] = {name: _middle(records[-_RECENT:], name) for name in NAMES}
    device = read_json(run.path / ENVIRONMENT).get("device")
    capacity = device.get("memory_bytes") if isinstance(device, dict) else None
    capacity = capacity if isinstance(capacity, int) and capacity > 0 else None
    if not records:
        return {**rates, "words": "There is no log point yet."}
    words = [_bound_by(rates), *_memory(rates, capacity), *_trend(records)]
    return {**rates, "words": " ".join(words)}


def _bound_by(rates: dict[str, float | None]) -> str:
    wait, mfu = rates["data_wait"], rates["mfu"]
    if wait is not None and wait >= _WAITS:
        return (
            f"The data: {wait:.0%} of the time is spent waiting for batches. More worker processes "
            f"(training.num_workers), prefetching (training.prefetch) or a faster disk would help."
        )
    not_data = "" if wait is None else f"Not the data (waiting takes {wait:.1%} of the time). "
    if mfu is None:
        return (
            f"{not_data}The step itself: model, batch size and device; the records hold no MFU that would say more."
        )
    if mfu >= _FAST:
        return f"{not_data}The device computes near what it can: MFU is {mfu:.0%}."
    if mfu >= _SLOW:
        return f"{not_data}The device computes at {mfu:.0%} of its peak (MFU); bf16 or training.compile may help."
    return (
        f"{not_data}The device is mostly idle or waits for memory: MFU is only {mfu:.1%}. Larger batches, "
        f"training.compile, training.capture or bf16 would help."
    )


def _memory(rates: dict[str, float | None], capacity: int | None) -> list[str]:
    used, mfu = rates["memory_bytes"], rates["mfu"]
    if used is None or capacity is None:
        return []
    share = used / capacity
    if share >= _FULL:
        return [f"Memory is almost full: {used / 2**30:.1f} of {capacity / 2**30:.1f} GiB."]
    if share <= _HALF and mfu is not None and mfu < _FAST:
        return [f"{1 - share:.0%} of the device's memory is free: a larger batch size fits."]
    return []


def _trend(records: list[dict[str, Any]]) -> list[str]:
    """Compare the speed of the first log points, without the very first, with that of the last ones."""
    name = "tokens_per_s" if any("tokens_per_s" in one for one in records) else "samples_per_s"
    if len(records) < 3 * _RECENT:
        return []
    before, now = _middle(records[2 : 2 + _RECENT], name), _middle(records[-_RECENT:], name)
    if not before or now is None or now > _SLOWER * before:
        return []
    return [f"It has become slower: {now:,.0f} {name.replace('_per_s', '')} per second, {before:,.0f} at its start."]


def _middle(records: list[dict[str, Any]], name: str) -> float | None:
    values = [one[name] for one in records if isinstance(one.get(name), (int, float))]
    return float(median(values)) if values else None
