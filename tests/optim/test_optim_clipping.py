"""Norms and clipping against torch.nn.utils and against a float64 sum of squares."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from etude.core import ConfigError
from etude.optim import clip_gradients, clip_gradients_by_value, global_norm
from etude.optim.clipping import clip_to_norm, tensor_norms

SMALL = [(64, 32), (64,), (10, 64), ()]
LARGE = [(300, 300), (7,), (50, 20, 5)]
MANY = [(3,)] * 200


def with_gradients(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, scale: float = 1.0):
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return params


def plain_norm(grads: list[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in grads))


@pytest.mark.parametrize("shapes", [SMALL, LARGE, MANY])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_those_of_torch(shapes, max_norm, dtype):
    ours, theirs = with_gradients(shapes, dtype), with_gradients(shapes, dtype)
    norm = clip_gradients(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    assert global_norm([param.grad for param in ours]) <= max_norm * (1 + 1e-5)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    exponent=st.integers(-12, 12),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), min_size=1, max_size=3),
)
def test_global_norm_is_the_root_of_the_sum_of_squares_in_any_mixture(sizes, exponent, dtypes):
    generator = torch.Generator().manual_seed(len(sizes))
    grads = [
        torch.randn(size, generator=generator).mul(10.0**exponent).to(dtypes[place % len(dtypes)])
        for place, size in enumerate(sizes)
    ]
    assert float(global_norm(grads)) == pytest.approx(plain_norm(grads), rel=1e-5)


def test_no_gradients_give_zero():
    assert global_norm([]) == 0.0
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0) == 0.0


def test_transposed_and_channels_last_gradients_count_every_element_once():
    grads = [torch.arange(6.0).view(2, 3).t(), torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    assert float(global_norm(grads)) == pytest.approx(math.sqrt(55 + 96))


@pytest.mark.parametrize("numel", [262_144, 300_001, 1_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_long_tensors_are_exact_to_float32(numel, dtype):
    """Torch's own, on the CPU, is off by 1e-5 at a million values, and by more if few of them are large."""
    generator = torch.Generator().manual_seed(numel)
    grads = [(torch.randn(numel, generator=generator) ** 5).to(dtype), torch.randn(3, generator=generator).to(dtype)]
    assert float(global_norm(grads)) == pytest.approx(plain_norm(grads), rel=6e-7)
    norms = [plain_norm([grad]) for grad in grads]
    assert tensor_norms(grads).tolist() == pytest.approx(norms, rel=6e-7)
    assert float(global_norm([grads[0].float(), grads[1].double()])) == pytest.approx(plain_norm(grads), rel=6e-7)


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "gaps", "expanded"])
def test_long_tensors_in_any_layout_count_every_element_once(layout):
    values = torch.randn(80, 100, 6, 7, generator=torch.Generator().manual_seed(0))
    grad = {
        "transposed": values.transpose(0, 3),
        "channels_last": values.to(memory_format=torch.channels_last),
        "gaps": values[:, :90],
        "expanded": values[:1].expand(80, 100, 6, 7),
    }[layout]
    assert float(global_norm([grad])) == pytest.approx(plain_norm([grad]), rel=6e-7)


@pytest.mark.parametrize("shapes", [SMALL, LARGE])
def test_half_precision_norms_neither_overflow_nor_lose_digits(shapes):
    params = with_gradients(shapes, torch.float16, scale=3000.0)
    grads = [param.grad for param in params]
    expected = plain_norm(grads)
    assert expected > 65504
    norm = global_norm(grads)
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx(expected, rel=1e-4)
    clip_gradients(params, 1.0)
    assert plain_norm(grads) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("shapes", [SMALL, LARGE])
def test_one_bad_element_makes_the_norm_not_finite(shapes, bad):
    params = with_gradients(shapes)
    params[1].grad.view(-1)[0] = bad
    assert not torch.isfinite(global_norm([param.grad for param in params]))


def test_clip_to_norm_uses_the_norm_it_is_given():
    grad = torch.full((4,), 10.0)
    clip_to_norm([grad], torch.tensor(100.0), 1.0)
    torch.testing.assert_close(grad, torch.full((4,), 0.1))


def test_a_single_parameter_or_a_generator_will_do():
    (param,) = with_gradients([(5,)])
    expected = plain_norm([param.grad])
    assert float(clip_gradients(param, 100.0)) == pytest.approx(expected)
    assert float(clip_gradients((p for p in [param]), 100.0)) == pytest.approx(expected)


def test_clipping_by_value_clamps_each_element():
    (param,) = with_gradients([(100,)])
    expected = param.grad.clamp(-0.5, 0.5)
    clip_gradients_by_value([param], 0.5)
    assert torch.equal(param.grad, expected)
    assert param.grad.abs().max() == 0.5


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(ConfigError, match="must be above 0"):
        clip_gradients(with_gradients([(2,)]), limit)
    with pytest.raises(ConfigError, match="must be above 0"):
        clip_gradients_by_value(with_gradients([(2,)]), limit)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_cuda_clipping_never_waits_and_mixed_devices_add_up():
    params = with_gradients(LARGE)
    expected = plain_norm([param.grad for param in params])
    moved = [nn.Parameter(param.detach().cuda()) for param in params]
    for mine, param in zip(moved, params, strict=True):
        mine.grad = param.grad.cuda()
    mixed = [moved[0].grad.clone(), params[1].grad, moved[2].grad.clone()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = clip_gradients(moved, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    assert plain_norm([param.grad.cpu() for param in moved]) == pytest.approx(1.0, rel=1e-4)
    assert float(global_norm(mixed)) == pytest.approx(expected, rel=1e-5)
