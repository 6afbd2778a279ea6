"""Positions that are drawn for the expected-value loss: which, how often, how many, and from which random numbers."""

import pytest
import torch
from scipy import stats

from etude.core import HeadOutput
from etude.multimodal import Modality, build_vocab_spec
from etude.multimodal.loss import MeaningfulLoss, combined_loss, make_reconstruction, meaningful_terms
from etude.multimodal.loss.terms import choose_positions, count_positions

SCALAR = Modality("scalar", 5, 3)
TARGETS = torch.tensor([[5, 1, 6, 0, 7], [-100, 8, 5, 4, 6], [3, 7, 2, 5, 9]])
OWN = [0, 2, 4, 7, 9, 11, 13]
"""Where the tokens 5 … 7 are."""


class Elsewhere(torch.Tensor):
    """A tensor that says it is not on the CPU, so that code for other devices runs on it."""

    is_cpu = False


WAYS = {"cpu": lambda tensor: tensor, "device": lambda tensor: tensor.as_subclass(Elsewhere)}


def plain(tensor):
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, torch.Tensor) else torch.tensor(tensor)


def drawn(way, targets, modality, most, generator=None):
    """Rows that count, their targets and weights, and the count; rows in increasing order."""
    found = choose_positions(WAYS[way](targets), modality, most, generator)
    rows = torch.arange(targets.numel()) if found.rows is None else plain(found.rows)
    weights, codes = plain(found.row_weights), plain(found.targets)
    assert rows.shape == weights.shape == codes.shape
    counted = weights != 0
    assert not bool(codes[~counted].any())  # any token of the modality will do, and 0 is one
    order = rows[counted].argsort()
    return rows[counted][order], codes[counted][order], weights[counted][order], int(found.count)


# ------------------------------------------------------------------------------------------ which positions


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [None, 7, 8, 15, 16, 4096])
def test_all_positions_where_there_is_nothing_to_choose(way, most):
    rows, codes, weights, count = drawn(way, TARGETS, SCALAR, most)
    assert rows.tolist() == OWN
    assert codes.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert weights.tolist() == [1.0] * 7
    assert count == 7
    assert int(count_positions(TARGETS, SCALAR)) == 7


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", range(1, 7))
def test_up_to_k_positions_none_of_them_twice(way, most):
    g = torch.Generator().manual_seed(most)
    for _ in range(30):
        rows, codes, weights, count = drawn(way, TARGETS, SCALAR, most, g)
        assert len(rows) == len(set(rows.tolist())) == most
        assert set(rows.tolist()) <= set(OWN)  # never PAD, MISS, what is ignored, or another modality
        assert codes.tolist() == (TARGETS.flatten()[rows] - 5).tolist()
        assert weights.tolist() == pytest.approx([7 / most] * most)
        assert count == 7


@pytest.mark.parametrize("most", [None, 1, 3, 100])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "targets", [torch.zeros(6), torch.ones(6), torch.full((6,), -100), torch.full((6,), 8), torch.zeros(0)]
)
def test_nothing_of_the_modality(way, targets, most):
    rows, _, _, count = drawn(way, targets.long(), SCALAR, most)
    assert (len(rows), count) == (0, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [None, 4, 5, 6])
def test_everything_of_the_modality(way, most):
    rows, codes, weights, count = drawn(way, torch.tensor([[5, 6, 7, 5, 6]]), SCALAR, most)
    assert count == 5
    if most == 4:
        assert len(rows) == 4
        assert weights.tolist() == [1.25] * 4
    else:
        assert rows.tolist() == [0, 1, 2, 3, 4]
        assert codes.tolist() == [0, 1, 2, 0, 1]
        assert weights.tolist() == [1.0] * 5


def test_places_are_in_increasing_order_on_the_cpu():
    """Reading rows of a large matrix in order is faster, and the sum is added up in one order."""
    g = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 10, (500,), generator=g)
    for most in (None, 20):
        rows = choose_positions(targets, SCALAR, most, g).rows
        assert torch.equal(rows, rows.sort().values)


def test_the_number_of_rows_on_a_device_is_known_beforehand():
    for most, expected in ((None, 15), (4, 4), (14, 14), (15, 15), (99, 15)):
        found = choose_positions(WAYS["device"](TARGETS), SCALAR, most)
        assert len(found.targets) == expected
        assert isinstance(found.count, torch.Tensor)


# ------------------------------------------------------------------------------------------ how often


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [1, 3, 6])
def test_every_position_is_equally_likely(way, most):
    """Chi-square over 7 positions; a fair draw fails this once in 10,000 seeds, and the seed is fixed."""
    g, draws = torch.Generator().manual_seed(0), 600
    hits = torch.zeros(15)
    for _ in range(draws):
        hits[drawn(way, TARGETS, SCALAR, most, g)[0]] += 1
    own = hits[OWN]
    assert int(own.sum()) == draws * most == int(hits.sum())
    share = most / 7
    # Positions drawn together without repetition vary less than independent ones: (1 - share) · 7/6 of it.
    statistic = float(((own - draws * share) ** 2 / (draws * share)).sum()) / ((1 - share) * 7 / 6)
    assert 1e-4 < stats.chi2.sf(statistic, 6) <= 1


@pytest.mark.parametrize("way", WAYS)
def test_every_pair_is_equally_likely(way):
    g, draws = torch.Generator().manual_seed(1), 840
    pairs = {}
    for _ in range(draws):
        pair = tuple(drawn(way, TARGETS, SCALAR, 2, g)[0].tolist())
        pairs[pair] = pairs.get(pair, 0) + 1
    assert len(pairs) == 21
    assert stats.chisquare(list(pairs.values())).pvalue > 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("as_head", [True, False])
@pytest.mark.parametrize("most", [1, 5])
def test_sums_and_gradients_are_right_on_average(way, as_head, most):
    """The mean of many draws lies within 5 standard errors of the sum over all positions, in every component."""
    g = torch.Generator().manual_seed(3)
    vocab = build_vocab_spec(v_scalar=4, modalities={"other": 3})
    hidden = torch.randn(24, 3, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab.vocab_size, 3, generator=g, dtype=torch.float64).requires_grad_()
    targets = torch.randint(vocab.vocab_size, (24,), generator=g)
    recon = {"scalar": make_reconstruction("mse", torch.tensor([0.0, 1.0, 2.0, 7.0]))}

    def once(targets, sample_k):
        head = HeadOutput(hidden, weight)
        terms = meaningful_terms(
            head if as_head else head.logits,
            targets,
            vocab,
            recon,
            {"scalar": 1.0},
            sample_k=sample_k,
            metrics=True,
            generator=g,
        )
        grad = torch.autograd.grad(terms["loss_sca"].sum, weight)[0]
        numbers = [terms["loss_sca"].sum.detach(), terms.get("mse_sca", terms["loss_sca"]).sum.detach()]
        return torch.cat([plain(torch.stack(numbers)), plain(grad).flatten()]), float(terms["loss_sca"].count)

    exact, count = once(targets, None)
    assert count > 6
    found = [once(WAYS[way](targets), most) for _ in range(150)]
    assert {one[1] for one in found} == {count}
    samples = torch.stack([one[0] for one in found])
    errors = samples.std(0) / 150**0.5
    moving = errors > 1e-9
    assert int(moving.sum()) == 2 + 4 * 3  # the values, and the gradients of the modality's own rows
    assert float(((samples.mean(0) - exact)[moving] / errors[moving]).abs().max()) < 5
    torch.testing.assert_close(samples.mean(0)[~moving], exact[~moving])


# ------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize("way", WAYS)
def test_the_same_seed_draws_the_same(way):
    def draw(seed):
        return drawn(way, TARGETS, SCALAR, 3, torch.Generator().manual_seed(seed))[0].tolist()

    assert draw(5) == draw(5)
    assert len({str(draw(seed)) for seed in range(20)}) > 5
    torch.manual_seed(11)
    first = [drawn(way, TARGETS, SCALAR, 3)[0].tolist() for _ in range(4)]
    torch.manual_seed(11)
    assert [drawn(way, TARGETS, SCALAR, 3)[0].tolist() for _ in range(4)] == first
    assert len({str(one) for one in first}) > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [None, 15, 99])
def test_no_random_number_is_used_where_nothing_is_to_choose(way, most):
    before, g = torch.get_rng_state(), torch.Generator().manual_seed(0)
    own = g.get_state()
    drawn(way, TARGETS, SCALAR, most)
    drawn(way, TARGETS, SCALAR, most, g)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(g.get_state(), own)


def test_on_the_cpu_as_many_as_there_are_is_nothing_to_choose():
    before = torch.get_rng_state()
    drawn("cpu", TARGETS, SCALAR, 7)
    assert torch.equal(torch.get_rng_state(), before)
    drawn("cpu", TARGETS, SCALAR, 6)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("way", WAYS)
def test_a_generator_leaves_the_global_numbers_alone(way):
    before, g = torch.get_rng_state(), torch.Generator().manual_seed(0)
    own = g.get_state()
    drawn(way, TARGETS, SCALAR, 3, g)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(g.get_state(), own)


def test_through_combined_loss_and_the_strategy():
    """Both look at sample_k positions, and both follow the seed."""
    vocab = build_vocab_spec(v_scalar=3)
    centers = torch.tensor([0.0, 1.0, 9.0])
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 40, 9, generator=g)
    targets = torch.randint(9, (2, 40), generator=g)

    def combined(k, **options):
        config = {"sample_k": k}
        return float(combined_loss(logits, targets, vocab, scalar_centers=centers, config=config, **options)[0])

    def strategy(k):
        loss = MeaningfulLoss(vocab, {"scalar": centers}, sample_k=k, shift=False)
        return float(loss.compute_loss(logits, (targets, targets)))

    for function in (combined, strategy):
        exact = function(None)
        assert function(10**6) == pytest.approx(exact)
        torch.manual_seed(1)
        several = [function(2) for _ in range(8)]
        torch.manual_seed(1)
        assert [function(2) for _ in range(8)] == several
        assert len(set(several)) > 4
    same = {combined(2, generator=torch.Generator().manual_seed(4)) for _ in range(3)}
    assert len(same) == 1
    named = combined_loss(logits, targets, vocab, scalar_centers=centers, config={"sample_k_per_modality": 2})
    torch.manual_seed(1)
    expected = [combined(2) for _ in range(2)]
    torch.manual_seed(1)
    found = [
        float(combined_loss(logits, targets, vocab, scalar_centers=centers, config={"sample_k_per_modality": 2})[0])
        for _ in range(2)
    ]
    assert found == expected
    assert set(named[1]) == {"loss_total", "loss_ce", "loss_img", "loss_sca", "loss_spec"}
