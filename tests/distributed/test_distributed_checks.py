"""What several processes say to each other, and the doors for Python users under torchrun."""

import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", ["words", "forks", "attempts", "buffers", "interrupted_validation"])
def test_world(runs, check, size):
    runs.call(size, check).ok()


@pytest.mark.parametrize(
    "check", ["collectives_of_a_step", "loaders", "micro_batches_without_weight", "predictions", "nan_on_one_rank"]
)
def test_trainer(runs, check):
    runs.call(2, check).ok()


@pytest.mark.parametrize(("check", "size"), [("different_versions", 3), ("differences", 3), ("different_configs", 2)])
def test_ranks_that_differ_are_refused(runs, check, size):
    runs.call(size, check).ok()


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_evaluation_counts_each_sample_once(runs, size):
    runs.call(size, "evaluations").ok()


def test_warnings_of_other_ranks(runs):
    ended = runs.call(3, "warnings_of_ranks")
    assert ended.codes == [0, 0, 0], ended


def test_norm_clipping_and_update_of_sharded_parameters(runs):
    runs.call(2, "sharded_parameters").ok()


def test_weights_that_become_zero(runs):
    runs.call(2, "weights_that_become_zero").ok()


def test_terms_without_numbers(runs):
    runs.call(2, "terms_without_numbers").ok()


@pytest.mark.parametrize("check", ["metrics_of_an_empty_share", "lists_of_different_lengths"])
def test_metrics_where_a_rank_has_no_samples(runs, check):
    runs.call(2, check).ok()


@pytest.mark.parametrize(
    "check", ["out_of_memory_on_one_rank", "out_of_memory_with_several_terms", "automatic_size_of_two_ranks"]
)
def test_out_of_memory(runs, check):
    runs.call(2, check).ok()
