"""The study of loss kinds in a small form: its problems, its measures, and what it says of each kind."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

EXPERIMENT = Path(__file__).parents[1]
sys.path.insert(0, str(EXPERIMENT))
try:
    import noisy_bins
    import picture
    import study
finally:
    sys.path.remove(str(EXPERIMENT))

PROBLEMS = {problem.name: problem for problem in noisy_bins.PROBLEMS}


@pytest.mark.parametrize("problem", noisy_bins.PROBLEMS, ids=lambda problem: problem.name)
def test_values_are_drawn_from_the_law_that_is_called_the_truth(problem):
    tokens = problem.draw(6000 // (problem.length - 1), seed=3)
    truth = problem.truth(tokens[:, :-1]).reshape(-1, noisy_bins.BINS).numpy()
    bins = noisy_bins.VOCAB.decode("scalar", tokens[:, 1:]).flatten().numpy()
    np.testing.assert_allclose(truth.sum(axis=1), 1.0, atol=1e-12)
    # A value's place in its own cumulative distribution, drawn evenly within its bin, is uniform if the law is right.
    below = np.concatenate([np.zeros((len(truth), 1)), truth.cumsum(axis=1)], axis=1)
    rows = np.arange(len(bins))
    placed = below[rows, bins] + np.random.default_rng(0).random(len(bins)) * truth[rows, bins]
    assert stats.kstest(placed, "uniform").pvalue > 1e-3


def test_the_mean_of_the_fork_lies_where_no_value_does():
    place = noisy_bins.VOCAB.range_of("place").base + torch.arange(noisy_bins.PLACES)
    truth = PROBLEMS["fork"].truth(place)
    means = (truth @ noisy_bins.CENTRES / noisy_bins.WIDTH).round().long() + noisy_bins.BINS // 2
    assert truth.gather(1, means[:, None]).max() < 0.01
    near = torch.stack([truth[row, mean - 2 : mean + 3].sum() for row, mean in enumerate(means)])
    assert near.max() < 0.05


def test_measures_are_those_of_plain_loops():
    generator = torch.Generator().manual_seed(0)
    laws = torch.randn(5, noisy_bins.BINS, generator=generator, dtype=torch.float64).softmax(-1)
    bins = torch.tensor([0, 7, 20, 33, 40])
    found = study.measure(laws, bins, noisy_bins.CENTRES)
    squares, medians, modes, masses, logs = [], [], [], [], []
    for law, true in zip(laws.tolist(), bins.tolist(), strict=True):
        squares.append((sum(p * place for place, p in enumerate(law)) - true) ** 2)
        medians.append(abs(next(place for place in range(41) if sum(law[: place + 1]) >= 0.5) - true))
        modes.append(abs(law.index(max(law)) - true))
        masses.append(sum(p for place, p in enumerate(law) if abs(place - true) <= 2))
        logs.append(-np.log(law[true]))
    wanted = {
        "mean": np.sqrt(np.mean(squares)),
        "median": np.mean(medians),
        "mode": np.mean(modes),
        "near": np.mean(masses),
        "nll": np.mean(logs),
    }
    assert found == pytest.approx(wanted, rel=1e-9)


def test_where_descent_on_one_loss_alone_ends():
    """The mean is right for all; the mass is at the truth only for those that look at more than the mean."""
    target = 28
    ends = {kind: study.descend(kind, target, starts=8, steps=250) for kind in (None, *study.KINDS)}
    for kind, laws in ends.items():
        means = laws @ torch.arange(noisy_bins.BINS, dtype=torch.float64)
        torch.testing.assert_close(means, torch.full_like(means, target), atol=0.3, rtol=0)
        near = laws[:, target - 2 : target + 3].sum(dim=1)
        if kind in ("mse", "huber"):
            assert near.mean() < 0.6
        else:
            assert near.min() > 0.97
    assert (ends["mse"].argmax(dim=1) != target).any()
    np.testing.assert_allclose(ends["hl_gauss"][:, target].numpy(), 0.495, atol=0.02)  # the Gaussian's own share
    assert ends["wasserstein"][:, target].min() > 0.95


def test_a_short_study_of_a_problem(monkeypatch):
    monkeypatch.setattr(study, "CASES", (study.Case(None), study.Case("mse", False), study.Case("wasserstein")))
    monkeypatch.setattr(study, "TEST", 256)
    token = torch.tensor(noisy_bins.VOCAB.range_of("place").base + 24)
    text, shown = study.study_problem(PROBLEMS["fork"], seeds=2, steps=40, show=token)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert [line[0] for line in lines] == ["loss", "---", "`truth`", "`ce`", "`mse`", "`ce + wasserstein`"]
    assert all(re.fullmatch(r"[\d.]+ ± [\d.]+", cell) for line in lines[3:] for cell in line[1:])
    nll = {line[0]: float(line[5].split()[0]) for line in lines[2:]}
    assert nll["`truth`"] < nll["`ce`"] < nll["`mse`"]
    assert float(lines[4][4].split()[0]) < 0.2 < float(lines[3][4].split()[0])  # mass near the truth
    assert shown.keys() == {"truth", "ce", "mse", "ce + wasserstein"}
    assert all(float(law.sum()) == pytest.approx(1) for law in shown.values())


def test_the_same_seed_trains_the_same_model():
    case = study.Case("huber")
    first, second, other = (study.train(case, PROBLEMS["jumps"], seed, steps=3).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_the_picture_has_a_curve_for_every_law():
    law = torch.full((noisy_bins.BINS,), 1 / noisy_bins.BINS)
    sure = torch.eye(noisy_bins.BINS)[5]
    rows = {"one value": {"ce": sure, "mse": law}, "fork": {"truth": law, "ce": law, "mse": sure, "ce + mse": law}}
    root = ET.fromstring(picture.draw(rows, ["mse"]))
    curves = [element for element in root if element.tag.endswith("path")]
    assert len(curves) == 2 + 2 + 3  # in a row the truth is drawn in every panel
    words = [element.text for element in root if element.tag.endswith("text")]
    assert words[1:] == ["ce", "mse", "one value", "fork"]
    heights = [[float(y) for y in re.findall(r"V([\d.]+)", curve.get("d"))] for curve in curves]
    for row, ys in zip([0, 0, 1, 1, 1, 1, 1], heights, strict=True):
        top = picture.TOP + row * (picture.HEIGHT + picture.GAP)
        assert top <= min(ys) <= max(ys) == top + picture.HEIGHT


def test_the_readme_shows_the_tables_and_the_picture_of_the_study():
    text = (EXPERIMENT / "README.md").read_text(encoding="utf-8")
    ET.parse(EXPERIMENT / "kinds.svg")
    assert "kinds.svg" in text
    for problem in noisy_bins.PROBLEMS:
        assert f"{problem.name}: {problem.what}" in text
    for case in study.CASES:
        assert text.count(f"| `{case.name}` |") >= len(noisy_bins.PROBLEMS)
