"""Several tasks give the same on one and on several processes, for every weighting and every way to draw batches."""

import pytest

pytestmark = pytest.mark.distributed

WEIGHTINGS = ["none", "uncertainty", "dwa", "gradnorm", "pcgrad", "famo"]


def check(runs, size, kind, names, accumulate=1, rest="", **env):
    cases = ";".join(f"{kind},{name},{accumulate},{rest}" for name in names)
    ended = runs.server.run(size, ["call", "many_tasks"], runs.root / "logs", env={"TASKS_CASES": cases, **env})
    assert set(ended.codes) == {0}, ended
    # Torch says once that it found no unused parameters: with other tasks in other batches it will.
    # And some cases are made of tasks that do not meet, which is warned of.
    said = ("find_unused_parameters=True", "compares tasks", "out of memory with")
    assert all(any(one in line for one in said) for text in ended.err for line in text.splitlines()), ended


@pytest.mark.parametrize("kind", ["labels", "alternate", "together"])
def test_two_processes_equal_one(runs, kind):
    check(runs, 2, kind, WEIGHTINGS)


@pytest.mark.parametrize("kind", ["labels", "alternate"])
def test_two_processes_equal_one_with_accumulation(runs, kind):
    """With streams that alternate, the last micro-batch of a step is of one task, and ranks meet for all of them."""
    check(runs, 2, kind, WEIGHTINGS, accumulate=3)


@pytest.mark.parametrize(("kind", "accumulate"), [("labels", 1), ("alternate", 1), ("together", 1), ("alternate", 3)])
def test_steps_that_run_out_of_memory_are_done_again(runs, kind, accumulate):
    check(runs, 2, kind, ["none", "uncertainty", "dwa"], accumulate, TASKS_SPLIT="1")


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


@pytest.mark.parametrize(("kind", "accumulate"), [("labels", 1), ("alternate", 1), ("together", 1), ("labels", 3)])
def test_a_model_that_processes_divide_equals_a_whole_one(runs, kind, accumulate):
    check(runs, 2, kind, ["none", "uncertainty", "dwa"], accumulate, TASKS_PARALLEL="fsdp")


@pytest.mark.parametrize("kind", ["labels", "together"])
@pytest.mark.parametrize("rest", ["rest", "watch"])
def test_tasks_that_rest_do_not_part_the_processes_that_divide_a_model(runs, kind, rest):
    """A process without samples has gradients of the same parameters as the others: torch sums them as one tensor."""
    check(runs, 2, kind, ["none"], rest=rest, TASKS_PARALLEL="fsdp")


@pytest.mark.parametrize("name", ["gradnorm", "pcgrad", "famo"])
def test_weightings_that_need_gradients_of_tasks_are_refused(runs, name):
    env = {"TASKS_CASES": f"labels,{name},1,", "TASKS_PARALLEL": "fsdp"}
    ended = runs.server.run(2, ["call", "many_tasks"], runs.root / "logs", env=env)
    assert set(ended.codes) == {1}
    assert all("processes that divide the model do not have" in text for text in ended.err)
