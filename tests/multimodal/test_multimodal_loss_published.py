"""The kinds of the expected-value loss against the papers they come from: their formulas and their own small examples.

HL-Gauss: Imani & White 2018 (arXiv 1806.04613) and Farebrother et al. 2024 (arXiv 2403.03950). Number token loss:
Zausinger et al. 2025 (arXiv 2411.02083). The inputs are those of its authors' figures and unit tests. They print the
Wasserstein distances of the first figure; all other numbers follow from their inputs by their formulas.

The references here are plain numpy in float64, in another form than the code where the papers have one: Wasserstein
distances are areas between cumulative distributions, gradients are differences.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from scipy import optimize, stats

from etude.multimodal import build_vocab_spec
from etude.multimodal.loss import MeaningfulLoss, combined_loss
from etude.multimodal.loss.kinds import HLGauss, make_reconstruction

DIGITS = np.arange(10.0)
KINDS = ["mse", "huber", "hl_gauss", "wasserstein"]

# ------------------------------------------------------------------------------------------ references


def softmax(logits):
    powers = np.exp(logits - np.max(logits))
    return powers / powers.sum()


def ntl_mse(logits, values, target):
    """(Σ p_i v_i - y)², in vectors the mean over their numbers."""
    return float(np.mean((softmax(logits) @ values - values[target]) ** 2))


def ntl_huber(logits, values, target, delta=1.0):
    errors = np.abs(softmax(logits) @ values - values[target])
    return float(np.mean(np.where(errors <= delta, errors**2 / 2, delta * (errors - delta / 2))))


def ntl_was(logits, values, target):
    """The area between the cumulative distributions of the prediction and of the true value."""
    order = np.argsort(values)
    wanted = np.zeros(len(values))
    wanted[target] = 1.0
    gaps = np.abs(np.cumsum(softmax(logits)[order]) - np.cumsum(wanted[order]))
    return float(np.sum(gaps[:-1] * np.diff(values[order])))


def hl_targets(edges, value, deviation):
    """The mass that a normal distribution, cut off at the outer edges, has between neighbouring edges."""
    below = np.array([NormalDist(value, deviation).cdf(edge) for edge in edges])
    return np.diff(below) / (below[-1] - below[0])


def even_edges(values):
    half = (values[1] - values[0]) / 2
    return np.append(values - half, values[-1] + half)


def hl_gauss(logits, values, target, sigma=0.75):
    """Cross entropy with the cut-off normal distribution, for even bins."""
    wanted = hl_targets(even_edges(values), values[target], sigma * (values[1] - values[0]))
    return float(-np.sum(wanted * (logits - np.log(np.sum(np.exp(logits))))))


REFERENCES = {"mse": ntl_mse, "huber": ntl_huber, "hl_gauss": hl_gauss, "wasserstein": ntl_was}


def differences(function, point, step=1e-6):
    """The gradient by central differences."""
    return np.array(
        [(function(point + step * e) - function(point - step * e)) / (2 * step) for e in np.eye(len(point))]
    )


# ------------------------------------------------------------------------------------------ what is tested


def losses(kind, logits, values, targets, **options):
    """The losses of rows of logits by the plain formula, after checking that the form in place agrees."""
    loss = make_reconstruction(kind, torch.tensor(values, dtype=torch.float64), **options)
    rows, true = torch.tensor(np.asarray(logits), dtype=torch.float64), torch.tensor(targets)
    plain = loss.row_losses(rows, true).numpy()
    found = loss.chunk_loss(rows.clone(), rows.softmax(-1), true, None)
    np.testing.assert_allclose(found.losses.numpy(), plain, rtol=1e-10, atol=1e-12)
    return plain


def gradients(kind, logits, values, target):
    """The gradient of one row of logits: by autograd from the formula, and as the form in place writes it."""
    loss = make_reconstruction(kind, torch.tensor(values, dtype=torch.float64))
    row = torch.tensor(logits, dtype=torch.float64)[None].requires_grad_()
    true = torch.tensor([target])
    (plain,) = torch.autograd.grad(loss.row_losses(row, true).sum(), row)
    written = row.detach().clone()
    loss.chunk_loss(written, row.detach().softmax(-1), true, torch.ones(len(true), dtype=written.dtype))
    return plain[0].numpy(), written[0].numpy()


def spikes(height=5.0, rest=0.01):
    """Ten predictions over the digits, each sure of another one, as in the number token loss's first figure."""
    return np.where(np.eye(10, dtype=bool), height, rest)


# ------------------------------------------------------------------------------------------ number token loss


def test_the_figure_that_compares_losses_has_the_printed_wasserstein_numbers():
    printed = [
        3.9038069,
        2.9679356,
        2.0320644,
        1.0961933,
        0.1603221,
        1.0961933,
        2.0320644,
        2.9679356,
        3.9038069,
        4.8396783,
    ]
    found = losses("wasserstein", spikes(), DIGITS, [4] * 10)
    np.testing.assert_allclose(found, printed, atol=1e-6)  # printed from float32
    np.testing.assert_allclose(found, [ntl_was(row, DIGITS, 4) for row in spikes()], rtol=1e-12)


def test_the_figure_that_compares_losses_grows_with_the_squared_distance_for_mse():
    found = losses("mse", spikes(), DIGITS, [4] * 10)
    shown = [13.775, 7.7037, 3.3844, 0.81687, 0.0010281, 0.93690, 3.6245, 8.0638, 14.255, 22.197]
    np.testing.assert_allclose(found, shown, rtol=5e-5)
    assert list(np.argsort(found)[:3]) == [4, 3, 5]


def test_the_figure_of_minima_that_are_not_unique():
    """Truth 4 among 3, 4, 5: the mean is right in all three predictions, and only wasserstein tells them apart."""
    logits = [[0.2, 0.6, 0.2], [0.333, 0.333, 0.333], [0.45, 0.1, 0.45]]
    values, targets = [3.0, 4.0, 5.0], [1, 1, 1]
    for kind in ("mse", "huber"):
        np.testing.assert_allclose(losses(kind, logits, values, targets), 0, atol=1e-25)
        for row in logits:
            np.testing.assert_allclose(gradients(kind, row, values, 1), 0, atol=1e-12)
    np.testing.assert_allclose(losses("wasserstein", logits, values, targets), [0.5728, 0.6667, 0.7395], atol=5e-5)
    near, even, far = losses("hl_gauss", logits, values, targets)
    assert near < even < far


@pytest.mark.parametrize(
    ("values", "rows", "targets", "mean"),
    [
        ([0, 1, 2, 3], [[0.5, 1.0, 1.0, 1.5]], [1], 0.7523445838),
        ([0, 1, 2, 3], [[0.5, -1.0, 1.0, -1.5]], [2], 0.4820086890),
        ([5, 3, 2, 1], [[2.0, 1.0, 0.5, 1.5]], [1], 0.0658248061),
        ([1, 2, 3], [[6.0, 5.0, 3.0], [5.0, 7.0, 3.0], [5.0, 3.0, 7.5]], [0, 1, 2], 0.0482405218),
    ],
)
def test_the_authors_unit_tests_of_the_squared_error(values, rows, targets, mean):
    values = np.array(values, dtype=np.float64)
    assert losses("mse", rows, values, targets).mean() == pytest.approx(mean, abs=1e-9)
    assert np.mean(
        [ntl_mse(np.array(row), values, t) for row, t in zip(rows, targets, strict=True)]
    ) == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize(
    ("rows", "targets", "mean"),
    [
        ([[0.5, 1.0, 1.2, 1.5], [0.5, 1.5, 1.2, 1.5]], [1, 1], 1.0724560320),
        ([[-4.0, 2.0, -1.0], [1.5, 0.5, 1.2], [-2.0, 1.0, -2.5]], [2, 1, 0], 0.9208148314),
    ],
)
def test_the_authors_unit_tests_of_the_wasserstein_form(rows, targets, mean):
    assert losses("wasserstein", rows, np.arange(len(rows[0]), dtype=float), targets).mean() == pytest.approx(
        mean, abs=1e-9
    )


def test_the_authors_order_of_four_predictions():
    rows = [[1, 2, 1, 1.5], [1.5, 1, 1.5, 1], [1, 1, 1.5, 1.5], [1, 1, 1, 2]]
    found = losses("wasserstein", rows, DIGITS[:4], [1] * 4)
    np.testing.assert_allclose(found, [0.8320150719, 1.0, 1.1224593312, 1.3004891819], atol=1e-9)
    assert list(np.argsort(found)) == [0, 1, 2, 3]


def test_mass_at_0_and_8_is_as_good_as_4_for_the_mean_and_4_away_for_wasserstein():
    logits = np.full((1, 10), -1e9)
    logits[0, [0, 8]] = 0.0
    assert losses("mse", logits, DIGITS, [4]) == losses("huber", logits, DIGITS, [4]) == 0.0
    assert losses("wasserstein", logits, DIGITS, [4])[0] == 4.0
    assert losses("hl_gauss", logits, DIGITS, [4])[0] > 1e8


@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_wasserstein_is_scipys_distance_for_any_order_of_values(seed, size):
    rng = np.random.default_rng(seed)
    values, logits, target = rng.normal(size=size) * 10, rng.normal(size=size) * 3, int(rng.integers(size))
    wanted = stats.wasserstein_distance(values, [values[target]], softmax(logits))
    assert losses("wasserstein", [logits], values, [target])[0] == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert ntl_was(logits, values, target) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_wasserstein_of_vectors_is_the_cheapest_transport(seed, size, width):
    """Solved as a linear programme: mass moved from i to j costs the root mean square of c_i - c_j."""
    rng = np.random.default_rng(seed)
    values, logits, target = rng.normal(size=(size, width)), rng.normal(size=size), int(rng.integers(size))
    costs = np.sqrt(np.mean((values[:, None] - values[None]) ** 2, axis=-1))
    leave = np.kron(np.eye(size), np.ones(size))
    arrive = np.kron(np.ones(size), np.eye(size))
    solved = optimize.linprog(
        costs.ravel(), A_eq=np.vstack([leave, arrive]), b_eq=np.concatenate([softmax(logits), np.eye(size)[target]])
    )
    assert losses("wasserstein", [logits], values, [target])[0] == pytest.approx(solved.fun, abs=1e-7)


# ------------------------------------------------------------------------------------------ HL-Gauss


def soft_targets(values, target, **options):
    if "edges" in options:
        options["edges"] = torch.tensor(options["edges"], dtype=torch.float64)
    loss = HLGauss(torch.tensor(values, dtype=torch.float64), **options)
    return loss.soft_targets(torch.tensor([target]))[0].numpy()


def test_the_target_histogram_of_a_digit():
    side = [0.2297424058, 0.0223210716, 0.0004275297, 0.0000015296]
    found = soft_targets(DIGITS, 4)
    np.testing.assert_allclose(found[4:9], [0.4950149254, *side], atol=1e-10)
    np.testing.assert_allclose(found[:5], [*side[::-1], 0.4950149254], atol=1e-10)
    assert found @ DIGITS == pytest.approx(4.0, abs=1e-8)


def test_a_target_at_the_end_is_cut_off_and_leans_inwards():
    found = soft_targets(DIGITS, 0)
    np.testing.assert_allclose(found[:4], [0.6622207132, 0.3073446315, 0.0298606673, 0.0005719404], atol=1e-10)
    assert found.sum() == pytest.approx(1.0, abs=1e-14)
    assert found @ DIGITS == pytest.approx(0.3687899791, abs=1e-9)
    np.testing.assert_allclose(soft_targets(DIGITS, 9), found[::-1], atol=1e-14)


def test_the_default_width_spreads_a_target_over_about_six_bins():
    """51 bins from -10 to 10, the support that the value functions of Atari games are learned on."""
    edges = np.linspace(-10, 10, 52)
    values = (edges[:-1] + edges[1:]) / 2
    for target in range(3, 48):
        found = soft_targets(values, target, edges=edges)
        assert 5 <= np.sum(found > 1e-3) <= 6
        assert found @ values == pytest.approx(values[target], abs=1e-5)
        np.testing.assert_allclose(found, hl_targets(edges, values[target], 0.75 * 20 / 51), atol=1e-13)


def test_losses_over_digits():
    """Uniform predictions cost log 10 whatever is true; sure ones cost less the nearer they are, and never nothing."""
    np.testing.assert_allclose(losses("hl_gauss", np.zeros((10, 10)), DIGITS, list(range(10))), math.log(10))
    found = losses("hl_gauss", spikes(), DIGITS, [4] * 10)
    np.testing.assert_allclose(found[[4, 3, 9]], [2.5793239048, 3.9030337774, 5.0494483776], atol=1e-9)
    target = soft_targets(DIGITS, 4)
    least = losses("hl_gauss", [np.log(target)], DIGITS, [4])[0]
    assert least == pytest.approx(1.2003005587, abs=1e-9)  # the entropy of the target
    assert least == pytest.approx(stats.entropy(target), rel=1e-12)
    np.testing.assert_allclose(gradients("hl_gauss", np.log(target), DIGITS, 4), 0, atol=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.floats(0.1, 5.0))
@settings(max_examples=60, deadline=None)
@example(seed=0, size=32, sigma=3.2)  # 32 bins from 0 to 5 and a deviation of 0.5
def test_targets_are_the_papers_for_even_bins_of_any_number_and_width(seed, size, sigma):
    rng = np.random.default_rng(seed)
    width = float(np.exp(rng.normal()))
    values = rng.normal() * 10 + width * np.arange(size)
    target = int(rng.integers(size))
    found = soft_targets(values, target, sigma=sigma)
    np.testing.assert_allclose(found, hl_targets(even_edges(values), values[target], sigma * width), atol=1e-12)
    assert found.argmax() == target
    assert found.sum() == pytest.approx(1.0, abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_uneven_bins_take_the_width_of_the_true_one(seed, size):
    rng = np.random.default_rng(seed)
    edges = np.cumsum(np.exp(rng.normal(size=size + 1)))
    values = (edges[:-1] + edges[1:]) / 2
    target = int(rng.integers(size))
    wanted = hl_targets(edges, values[target], 0.75 * (edges[target + 1] - edges[target]))
    np.testing.assert_allclose(soft_targets(values, target, edges=edges), wanted, atol=1e-12)


# ------------------------------------------------------------------------------------------ all kinds


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 2**32 - 1), st.integers(2, 15))
@settings(max_examples=40, deadline=None)
def test_losses_and_gradients_are_those_of_the_formulas(kind, seed, size):
    rng = np.random.default_rng(seed)
    values = rng.normal() * 5 + float(np.exp(rng.normal() / 2)) * np.arange(size)
    logits, target = rng.normal(size=size) * 2, int(rng.integers(size))

    def reference(point):
        return REFERENCES[kind](point, values, target)

    assert losses(kind, [logits], values, [target])[0] == pytest.approx(reference(logits), rel=1e-10, abs=1e-13)
    wanted = differences(reference, logits)
    scale = max(1.0, np.abs(wanted).max())
    for found in gradients(kind, logits, values, target):
        np.testing.assert_allclose(found, wanted, atol=1e-7 * scale)


@pytest.mark.parametrize("kind", ["mse", "huber", "wasserstein"])
@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(2, 5))
@settings(max_examples=25, deadline=None)
def test_gradients_for_vectors_are_those_of_the_formulas(kind, seed, size, width):
    rng = np.random.default_rng(seed)
    values, logits, target = rng.normal(size=(size, width)) * 2, rng.normal(size=size), int(rng.integers(size))

    def reference(point):
        if kind == "wasserstein":
            return float(softmax(point) @ np.sqrt(np.mean((values - values[target]) ** 2, axis=1)))
        return REFERENCES[kind](point, values, target)

    assert losses(kind, [logits], values, [target])[0] == pytest.approx(reference(logits), rel=1e-8, abs=1e-12)
    for found in gradients(kind, logits, values, target):
        np.testing.assert_allclose(found, differences(reference, logits), atol=1e-7)


@given(st.integers(0, 2**32 - 1), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_only_the_mean_counts_for_mse_and_huber_and_only_mass_at_the_truth_for_wasserstein(seed, reach):
    """Any distribution that is even on both sides of the truth is a minimum of the first two, and of them alone."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=reach) * 2
    logits = np.concatenate([half, [-30.0], half[::-1]])  # next to nothing at the truth
    values = np.arange(2.0 * reach + 1)
    for kind in ("mse", "huber"):
        assert losses(kind, [logits], values, [reach])[0] == pytest.approx(0, abs=1e-20)
        np.testing.assert_allclose(gradients(kind, logits, values, reach), 0, atol=1e-9)
    assert losses("wasserstein", [logits], values, [reach])[0] >= 1 - 1e-9
    floor = stats.entropy(soft_targets(values, reach))
    assert losses("hl_gauss", [logits], values, [reach])[0] > floor + 5
    assert np.abs(gradients("hl_gauss", logits, values, reach)).max() > 0.3


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_what_each_kind_is_least_at_if_the_truth_is_uncertain(seed):
    """With values drawn from a law: the mean for mse, the median for wasserstein, the blurred law for hl_gauss."""
    rng = np.random.default_rng(seed)
    law = rng.dirichlet(np.ones(7))
    values = np.arange(7.0)

    def expected(kind, logits):
        return law @ losses(kind, [logits] * 7, values, list(range(7)))

    sure = [np.where(np.arange(7) == place, 0.0, -1e3) for place in range(7)]
    median = int(np.argmin([expected("wasserstein", row) for row in sure]))
    assert law[: median + 1].sum() >= 0.5 - 1e-12
    assert law[median:].sum() >= 0.5 - 1e-12
    anything = rng.normal(size=7)
    assert expected("wasserstein", sure[median]) <= expected("wasserstein", anything) + 1e-12
    blurred = law @ np.stack([soft_targets(values, place) for place in range(7)])
    assert expected("hl_gauss", np.log(blurred)) <= expected("hl_gauss", anything) + 1e-12
    tilt = optimize.brentq(lambda slope: softmax(slope * values) @ values - law @ values, -1e3, 1e3)
    least = law @ (values - law @ values) ** 2
    assert expected("mse", tilt * values) == pytest.approx(least, rel=1e-9)
    assert expected("mse", anything) >= least - 1e-12


# ------------------------------------------------------------------------------------------ through a whole vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_of_digits_gives_the_numbers_of_the_figure(kind):
    """Digits amid other tokens: only their own slice counts, and positions of PAD and MISS do not."""
    vocab = build_vocab_spec(v_image=3, v_scalar=10)
    logits = torch.randn(1, 12, vocab.vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[0, :10, vocab.range_of("scalar").slice] = torch.tensor(spikes())
    targets = vocab.encode("scalar", torch.tensor([[4] * 10 + [-1, -1]]))
    targets[0, -1] = vocab.pad_id
    config = {"enabled": True, "weight_scalar": 1.0, "kind": kind}
    loss, found = combined_loss(
        logits, targets, vocab, scalar_centers=torch.tensor(DIGITS), config=config, use_ce=False
    )
    wanted = np.mean([REFERENCES[kind](row, DIGITS, 4) for row in spikes()])
    assert float(found["loss_sca"]) == pytest.approx(wanted, rel=1e-6)
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    strategy = MeaningfulLoss(
        vocab, {"scalar": torch.tensor(DIGITS)}, weight=1.0, kind=kind, use_ce=False, shift=False
    )
    terms = strategy.terms(logits, {"input_ids": targets, "labels": targets}, metrics=False)
    term = terms["loss_sca"]
    assert float(term.sum) / float(term.count) == pytest.approx(wanted, rel=1e-6)
