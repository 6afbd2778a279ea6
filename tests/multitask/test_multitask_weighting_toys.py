"""Published toys: noise that uncertainty weighting has to find, and a valley that plain Adam does not leave."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etude.multitask.weighting import FAMO, StaticWeights, UncertaintyWeighting, Weighting

TASKS = ["first", "second"]
STARTS = [(-8.5, 7.5), (0.0, 0.0), (9.0, 9.0), (-7.5, -0.5), (9.0, -1.0)]
PARETO_HEIGHT = -8.3552
"""The Pareto set of the two losses is the line from (-7, here) to (7, here)."""


def two_losses(points: Tensor) -> Tensor:
    """Return the losses (n, 2) at points (n, 2): the toy of CAGrad, with the first loss scaled by 0.1 as in FAMO."""
    x, y = points.unbind(1)
    upper, lower = torch.tanh(y / 2).clamp_min(0), torch.tanh(-y / 2).clamp_min(0)
    log_first = ((x + 7) / 2 - torch.tanh(y)).abs().clamp_min(5e-6).log() + 6
    log_second = ((3 - x) / 2 - torch.tanh(y) + 2).abs().clamp_min(5e-6).log() + 6
    depth = 0.1 * (y + 8) ** 2
    first = log_first * upper + (((x - 7) ** 2 + depth) / 10 - 20) * lower
    second = log_second * upper + (((x + 7) ** 2 + depth) / 10 - 20) * lower
    return torch.stack([0.1 * first, second], dim=1)


def descend(weightings: list[Weighting], lr: float, steps: int) -> Tensor:
    """Return where Adam ends from each start, each with its own weighting and gradients clipped to norm 1."""
    points = torch.tensor(STARTS, requires_grad=True)
    adam = torch.optim.Adam([points], lr=lr)
    before: Tensor | None = None
    for _ in range(steps):
        losses = two_losses(points)
        seen = losses.detach()
        if before is not None:
            for weighting, old, new in zip(weightings, before, seen, strict=True):
                if weighting.needs == "updates":
                    weighting.after_update(old, new)
        coefficients = torch.stack([each.coefficients(row) for each, row in zip(weightings, seen, strict=True)])
        adam.zero_grad()
        (coefficients * losses).sum().backward()
        assert points.grad is not None
        points.grad /= points.grad.norm(dim=1, keepdim=True).clamp_min(1.0)
        adam.step()
        before = seen
    return points.detach()


def on_the_front(points: Tensor) -> Tensor:
    return (points[:, 0].abs() < 7) & ((points[:, 1] - PARETO_HEIGHT).abs() < 1.5)


def famo() -> FAMO:
    return FAMO(TASKS, decay=0.0, floor={"first": -2.1, "second": -21.0})


QUICK = (0.05, 1000)
AS_PUBLISHED = (1e-3, 50_000)


@pytest.mark.parametrize(("lr", "steps"), [QUICK, pytest.param(*AS_PUBLISHED, marks=pytest.mark.slow)])
def test_famo_reaches_the_pareto_front_from_every_start(lr: float, steps: int) -> None:
    ends = descend([famo() for _ in STARTS], lr, steps)
    assert on_the_front(ends).all(), ends
    # Losses are balanced: neither task is near its own optimum at x = 7 or x = -7.
    assert (ends[:, 0].abs() < 4).all(), ends


@pytest.mark.parametrize(("lr", "steps"), [QUICK, pytest.param(*AS_PUBLISHED, marks=pytest.mark.slow)])
def test_plain_adam_is_stuck_from_at_least_one_start(lr: float, steps: int) -> None:
    ends = descend([StaticWeights(TASKS) for _ in STARTS], lr, steps)
    stuck = ~on_the_front(ends)
    assert stuck.any(), ends
    assert not stuck.all(), ends


def noisy_lines(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 1, generator=generator)
    noise = torch.randn(number, 2, generator=generator) * torch.tensor([10.0, 1.0])
    return x, x * torch.tensor([2.0, 3.0]) + torch.tensor([8.0, 3.0]) + noise


def learned_sigma(model: nn.Module, x: Tensor, y: Tensor, lr: float, epochs: int, batch_size: int) -> Tensor:
    weighting = UncertaintyWeighting(TASKS, regression=TASKS)
    adam = torch.optim.Adam([*model.parameters(), *weighting.parameters()], lr=lr)
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch_size):
            adam.zero_grad()
            weighting((model(x[rows]) - y[rows]).square().mean(0)).backward()
            adam.step()
    return weighting.sigma


def test_uncertainty_finds_the_noise_of_two_lines() -> None:
    x, y = noisy_lines(4000)
    torch.manual_seed(0)
    sigma = learned_sigma(nn.Linear(1, 2), x, y, lr=0.1, epochs=1500, batch_size=len(x))
    # The optimum is the spread around the least squares fit, found here without any training.
    design = torch.cat([x, torch.ones_like(x)], 1)
    spread = (y - design @ torch.linalg.lstsq(design, y).solution).square().mean(0).sqrt()
    torch.testing.assert_close(sigma, spread, rtol=0.01, atol=0)
    assert sigma.tolist() == pytest.approx([10.0, 1.0], rel=0.05)


@pytest.mark.slow
def test_uncertainty_toy_of_the_authors() -> None:
    """Their 100 points, a hidden layer of 1024, 2000 epochs of Adam: they report 8.59 and 0.92 for 10 and 1."""
    random = np.random.RandomState(0)
    x, first, second = (random.randn(100, 1) for _ in range(3))
    y = np.concatenate([2 * x + 8 + 10 * first, 3 * x + 3 + second], axis=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1024), nn.ReLU(), nn.Linear(1024, 2))
    inputs, targets = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    sigma = learned_sigma(model, inputs, targets, lr=1e-3, epochs=2000, batch_size=20)
    assert sigma.tolist() == pytest.approx([8.59, 0.92], rel=0.05)
