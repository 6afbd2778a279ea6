"""Which checkpoints are kept, as properties over any history of saves."""

import math

from hypothesis import given, strategies as st

from etude.checkpoint.folder import Entry, Mode, best_first, to_delete

VALUES = st.none() | st.floats() | st.sampled_from([0.0, 1.0, math.nan, math.inf])
ENTRIES = st.dictionaries(st.integers(0, 50), VALUES, max_size=12).map(
    lambda values: [Entry(step, value) for step, value in values.items()]
)
MODES = st.sampled_from(["min", "max"])


def has_value(entry: Entry) -> bool:
    return entry.value is not None and not math.isnan(entry.value)


@given(ENTRIES, st.integers(0, 6), MODES, st.sets(st.integers(0, 50), max_size=3))
def test_newest_protected_and_best_are_kept_and_nothing_else(
    entries: list[Entry], keep_best: int, mode: Mode, protect: set[int]
) -> None:
    deleted = to_delete(entries, keep_best, mode, protect)
    steps = {entry.step for entry in entries}
    kept = [entry for entry in entries if entry.step not in deleted]
    assert set(deleted) <= steps
    assert deleted == sorted(set(deleted))
    if steps:
        assert max(steps) not in deleted
    assert not protect & set(deleted)
    assert len(kept) <= keep_best + 1 + len(protect)
    # No deleted checkpoint is better than one that holds a place by its value.
    better = (lambda a, b: a < b) if mode == "min" else (lambda a, b: a > b)
    holders = [e for e in kept if has_value(e) and e.step not in protect and e.step != max(steps)]
    for gone in (e for e in entries if e.step in deleted and has_value(e)):
        assert not any(better(gone.value, kept_entry.value) for kept_entry in holders)
        assert sum(has_value(e) for e in kept) >= keep_best


@given(ENTRIES, st.integers(0, 6), MODES)
def test_the_best_k_are_kept(entries: list[Entry], keep_best: int, mode: Mode) -> None:
    sign = 1 if mode == "min" else -1
    expected = sorted((e for e in entries if has_value(e)), key=lambda e: (sign * e.value, e.step))[:keep_best]
    assert not {e.step for e in expected} & set(to_delete(entries, keep_best, mode))


@given(ENTRIES, st.integers(0, 6), MODES)
def test_deleting_twice_deletes_nothing_more(entries: list[Entry], keep_best: int, mode: Mode) -> None:
    deleted = set(to_delete(entries, keep_best, mode))
    assert to_delete([e for e in entries if e.step not in deleted], keep_best, mode) == []


def test_ties_go_to_the_earlier_step_and_nan_is_never_best() -> None:
    entries = [Entry(3, 1.0), Entry(2, 1.0), Entry(1, math.nan), Entry(4)]
    assert [e.step for e in best_first(entries, "min")] == [2, 3]
    assert [e.step for e in best_first(entries, "max")] == [2, 3]


def test_without_a_value_the_newest_fill_the_places() -> None:
    unmeasured = [Entry(step) for step in range(1, 7)]
    assert to_delete(unmeasured, 2, "min") == [1, 2, 3]
    assert to_delete([Entry(0, 5.0), *unmeasured], 2, "min") == [1, 2, 3, 4]


def test_zero_keeps_only_the_last() -> None:
    assert to_delete([Entry(1, 0.1), Entry(2, 0.2), Entry(3, 0.3)], 0, "min") == [1, 2]


@given(st.lists(st.tuples(st.integers(1, 3), VALUES), max_size=12), st.integers(0, 6), MODES)
def test_values_compare_only_within_a_phase(history: list[tuple[int, float | None]], keep: int, mode: Mode) -> None:
    entries = [Entry(step, value, phase=float(phase)) for step, (phase, value) in enumerate(history)]
    ranked = best_first(entries, mode)
    assert [e.phase for e in ranked] == sorted((e.phase for e in entries if has_value(e)), reverse=True)
    for phase in {e.phase for e in ranked}:
        alone = [Entry(e.step, e.value) for e in entries if e.phase == phase]
        assert [e.step for e in ranked if e.phase == phase] == [e.step for e in best_first(alone, mode)]
    kept = [e for e in entries if e.step not in to_delete(entries, keep, mode)]
    assert set(ranked[:keep]) <= set(kept)
