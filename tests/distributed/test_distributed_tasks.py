"""Several tasks give the same on one and on several processes, for every weighting and every way to draw batches."""

import pytest

pytestmark = pytest.mark.distributed

WEIGHTINGS = ["none", "uncertainty", "dwa", "gradnorm", "pcgrad", "famo"]


def check(runs, size, kind, names, accumulate=1, rest=""):
    cases = ";".join(f"{kind},{name},{accumulate},{rest}" for name in names)
    ended = runs.server.run(size, ["call", "many_tasks"], runs.root / "logs", env={"TASKS_CASES": cases})
    assert set(ended.codes) == {0}, ended
    # Torch says once that it found no unused parameters: with other tasks in other batches it will.
    # And some cases are made of tasks that do not meet, which is warned of.
    said = ("find_unused_parameters=True", "compares tasks")
    assert all(any(one in line for one in said) for text in ended.err for line in text.splitlines()), ended


@pytest.mark.parametrize("kind", ["labels", "alternate", "together"])
def test_two_processes_equal_one(runs, kind):
    check(runs, 2, kind, WEIGHTINGS)


@pytest.mark.parametrize("kind", ["labels", "alternate"])
def test_two_processes_equal_one_with_accumulation(runs, kind):
    """With streams that alternate, the last micro-batch of a step is of one task, and ranks meet for all of them."""
    check(runs, 2, kind, WEIGHTINGS, accumulate=3)


def test_three_processes_equal_one(runs):
    check(runs, 3, "labels", ["none", "pcgrad", "famo"])


@pytest.mark.parametrize("rest", ["rest", "watch"])
def test_heads_of_tasks_that_rest_do_not_move_on_any_process(runs, rest):
    """Nor does a task of weight 0, which is only watched, make ranks disagree about the terms there are."""
    check(runs, 2, "labels", WEIGHTINGS, rest=rest)


def test_a_last_micro_batch_without_anything_to_learn_does_not_part_the_ranks(runs):
    check(runs, 2, "alternate", ["none", "gradnorm", "pcgrad"], accumulate=3, rest="watch")


def test_a_step_of_tasks_that_are_only_watched_does_not_part_the_ranks(runs):
    check(runs, 2, "alternate", ["none", "famo", "pcgrad"], rest="watch")
