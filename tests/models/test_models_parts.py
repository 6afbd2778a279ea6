"""What models share: the short formula of GELU against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from etude.models.parts import ShortGelu, gelu

POINTS = torch.cat(
    [torch.linspace(-12, 12, 100_001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e18, -1e18, 3e38, -3e38])]
)


def value_and_slope(function: object, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def test_the_short_gelu_is_nearer_to_the_exact_one_than_torchs_erf_promises() -> None:
    exact, exact_slope = value_and_slope(F.gelu, POINTS.double())
    short, slope = value_and_slope(ShortGelu.apply, POINTS)
    torch.testing.assert_close(short.double(), exact, rtol=2e-7, atol=6e-7)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=0, atol=6e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_rounded_once(dtype: torch.dtype) -> None:
    x = POINTS[:-4].clamp(-12, 12).to(dtype)
    exact, exact_slope = value_and_slope(F.gelu, x.double())
    short, slope = value_and_slope(ShortGelu.apply, x)
    assert short.dtype == slope.dtype == dtype
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(short.double(), exact, rtol=0.51 * spacing, atol=6e-7)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=0.51 * spacing, atol=6e-7)


def test_an_infinite_or_missing_number_is_not_hidden() -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan")])
    short, slope = value_and_slope(ShortGelu.apply, x)
    assert not short.isfinite().any()
    assert not slope.isfinite().any()


def test_on_a_cpu_gelu_is_torchs() -> None:
    assert torch.equal(gelu(POINTS), F.gelu(POINTS))


@pytest.mark.parametrize(
    ("compiling", "device", "dtype", "short"),
    [
        (True, "cuda", torch.bfloat16, True),
        (True, "cuda", torch.float16, True),
        (True, "cuda", torch.float32, False),
        (True, "cpu", torch.bfloat16, False),
        (False, "cuda", torch.bfloat16, False),
    ],
)
def test_the_short_formula_is_for_half_precision_compiled_on_a_gpu(
    monkeypatch, compiling, device, dtype, short
) -> None:
    used = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(ShortGelu, "apply", lambda x: used.append("short") or x)
    monkeypatch.setattr(F, "gelu", lambda x: used.append("torch") or x)
    with FakeTensorMode():
        gelu(torch.empty(4, device=device, dtype=dtype))
    assert used == ["short" if short else "torch"]


@pytest.mark.gpu
def test_compiled_on_a_gpu_the_short_formula_is_used() -> None:
    x = torch.linspace(-8, 8, 4096, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(gelu, fullgraph=True)
    got, slope = value_and_slope(compiled, x)
    exact, exact_slope = value_and_slope(F.gelu, x.double())
    torch.testing.assert_close(got.double(), exact, rtol=0.51 / 128, atol=6e-7)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=0.51 / 128, atol=6e-7)
