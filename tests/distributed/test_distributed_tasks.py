"""Several tasks give the same on one and on several processes, for every weighting and every way to draw batches."""

import pytest

pytestmark = pytest.mark.distributed

WEIGHTINGS = ["none", "uncertainty", "dwa", "gradnorm", "pcgrad", "famo"]


def check(runs, size, *case):
    log, env = runs.root / "logs", {"TASKS_CASE": ",".join(map(str, case))}
    ended = runs.server.run(size, ["call", "many_tasks"], log, env=env)
    assert set(ended.codes) == {0}, ended
    # Torch says once that it found no unused parameters: with other tasks in other batches it will.
    # And some cases are made of tasks that do not meet, which is warned of.
    said = ("find_unused_parameters=True", "compares tasks")
    assert all(any(one in line for one in said) for text in ended.err for line in text.splitlines()), ended


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("kind", ["labels", "alternate", "together"])
def test_two_processes_equal_one(runs, kind, name):
    check(runs, 2, kind, name, 1, "")


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("kind", ["labels", "alternate"])
def test_two_processes_equal_one_with_accumulation(runs, kind, name):
    """With streams that alternate, the last micro-batch of a step is of one task, and ranks meet for all of them."""
    check(runs, 2, kind, name, 3, "")


@pytest.mark.parametrize("name", ["none", "pcgrad", "famo"])
def test_three_processes_equal_one(runs, name):
    check(runs, 3, "labels", name, 1, "")


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("rest", ["rest", "watch"])
def test_heads_of_tasks_that_rest_do_not_move_on_any_process(runs, name, rest):
    """Nor does a task of weight 0, which is only watched, make ranks disagree about the terms there are."""
    check(runs, 2, "labels", name, 1, rest)


@pytest.mark.parametrize("name", ["none", "gradnorm", "pcgrad"])
def test_a_last_micro_batch_without_anything_to_learn_does_not_part_the_ranks(runs, name):
    check(runs, 2, "alternate", name, 3, "watch")


@pytest.mark.parametrize("name", ["none", "famo", "pcgrad"])
def test_a_step_of_tasks_that_are_only_watched_does_not_part_the_ranks(runs, name):
    check(runs, 2, "alternate", name, 1, "watch")
