"""Linear layer and cross entropy by the plain formula in float64, and how results are compared with it."""

import pytest
import torch

from etude.losses import linear_cross_entropy_terms

TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative to the largest value: sums of products in float16 and bfloat16 are rounded once per chunk."""
MASKS = ["none", "ignored", "all ignored", "bool", "float", "ignored and float"]


def make(shape, num_classes, width=6, dtype=torch.float32, bias=True, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(*shape, width, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(num_classes, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(num_classes, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(num_classes, shape, generator=g), g


def masked(kind, targets, g):
    """Return labels, mask and the weight of every element."""
    element, mask = torch.ones(targets.shape, dtype=torch.float64), None
    if "ignored" in kind:
        ignored = torch.rand(targets.shape, generator=g) < (2.0 if kind == "all ignored" else 0.5)
        targets, element = targets.masked_fill(ignored, -100), element * ~ignored
    if kind == "bool":
        mask = torch.rand(targets.shape, generator=g) < 0.6
        element = element * mask
    elif "float" in kind:
        mask = torch.rand(targets.shape, generator=g) * (torch.rand(targets.shape, generator=g) < 0.7)
        element = element * mask
    return targets, mask, element


def formula(hidden, weight, bias, targets, element, smoothing=0.0, softcap=None):
    """Σ, Σ without smoothing, Σ of correct predictions, in float64."""
    logits = hidden @ weight.T + (0.0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = logits - torch.logsumexp(logits, -1, keepdim=True)
    nll = -log_probs.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    loss = (1 - smoothing) * nll - smoothing * log_probs.mean(-1)
    return (loss * element).sum(), (nll * element).sum(), (element * (logits.argmax(-1) == targets)).sum()


def doubled(*tensors):
    return [None if one is None else one.detach().double().requires_grad_() for one in tensors]


def assert_near(found, expected, tolerance):
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * max(scale, 0.1))


def compare(hidden, weight, bias, targets, mask, element, tolerance, smoothing=0.0, softcap=None, chunk="auto"):
    options = {"mask": mask, "label_smoothing": smoothing, "softcap": softcap, "chunk_tokens": chunk}
    terms = linear_cross_entropy_terms(hidden, weight, targets, bias, metrics=True, **options)
    exact = doubled(hidden, weight, bias)
    loss, nll, correct = formula(*exact, targets, element, smoothing, softcap)
    assert_near(terms["loss"].sum, loss, tolerance)
    assert float(terms["loss"].count) == pytest.approx(float(element.sum()), rel=1e-6)
    assert terms["accuracy"].weight == 0
    if hidden.dtype in (torch.float64, torch.float32):
        assert float(terms["accuracy"].sum) == pytest.approx(float(correct), rel=1e-5, abs=1e-9)
    assert ("nll" in terms) == (smoothing > 0)
    if smoothing:
        assert_near(terms["nll"].sum, nll, tolerance)
        assert not terms["nll"].sum.requires_grad
    inputs = [one for one in (hidden, weight, bias) if one is not None]
    found = torch.autograd.grad(0.25 * terms["loss"].sum, inputs)
    expected = torch.autograd.grad(0.25 * loss, [one for one in exact if one is not None])
    for mine, theirs, given_ in zip(found, expected, inputs, strict=True):
        assert mine.dtype == given_.dtype
        assert_near(mine, theirs, tolerance)
