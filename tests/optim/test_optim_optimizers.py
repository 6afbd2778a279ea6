"""Each optimizer against torch's plain loop in float64; the kernels chosen; arguments refused; state restored."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from etude.config import lookup
from etude.core import ConfigError
from etude.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop, decay_groups, get_lr, set_lr
from etude.optim.kernels import choose_kernel

CASES = [
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    (Adam, torch.optim.Adam, {"lr": 0.01}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "amsgrad": True}),
    (AdamW, torch.optim.AdamW, {"lr": 0.01}),
    (AdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.3, "maximize": True}),
    (RMSprop, torch.optim.RMSprop, {"lr": 0.01}),
    (
        RMSprop,
        torch.optim.RMSprop,
        {"lr": 0.01, "alpha": 0.9, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    ),
    (Adagrad, torch.optim.Adagrad, {"lr": 0.1}),
    (
        Adagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 1.0},
    ),
    (NAdam, torch.optim.NAdam, {"lr": 0.01}),
    (NAdam, torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    (RAdam, torch.optim.RAdam, {"lr": 0.01}),
    (
        RAdam,
        torch.optim.RAdam,
        {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    (Adafactor, torch.optim.Adafactor, {"lr": 0.01}),
    (
        Adafactor,
        torch.optim.Adafactor,
        {"lr": 0.1, "beta2_decay": -0.5, "d": 1.5, "weight_decay": 0.1, "maximize": True},
    ),
]
FUSED = (SGD, Adam, AdamW, Adagrad)
KERNELS = {cls: ("auto", "foreach", "loop") + (("fused",) if cls in FUSED else ()) for cls, *_ in CASES}
SHAPES = [(4, 3), (4,), (2, 2, 2), ()]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, *, first_of: int = 0) -> None:
    """Give parameters the gradients of a step; the first `first_of` of them have none."""
    generator = torch.Generator().manual_seed(100 + step)
    for place, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator, dtype=param.dtype) + param.detach()
        param.grad = None if place < first_of else grad


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range, first_of: int = 0) -> None:
    for step in steps:
        set_gradients(params, step, first_of=first_of if step < 5 else 0)
        optimizer.step()


def assert_same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments", "kernel"), [(*case, kernel) for case in CASES for kernel in KERNELS[case[0]]]
)
def test_twenty_steps_equal_torchs_plain_loop(ours, theirs, arguments, kernel):
    left, right = parameters(), parameters()
    run(ours(left, **arguments, kernel=kernel), left, range(20))
    run(theirs(right, **arguments, foreach=False), right, range(20))
    assert_same(left, right)
    assert not torch.equal(left[0], parameters()[0])


@pytest.mark.parametrize(("ours", "theirs", "arguments"), CASES)
def test_a_parameter_may_get_its_first_gradient_later(ours, theirs, arguments):
    left, right = parameters(), parameters()
    run(ours(left, **arguments), left, range(12), first_of=2)
    run(theirs(right, **arguments, foreach=False), right, range(12), first_of=2)
    assert_same(left, right)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_skipped_first_step_leaves_fused_sgd_as_if_it_had_not_been(momentum):
    left, right = parameters(torch.float32), parameters(torch.float32)
    optimizer = SGD(left, lr=0.1, momentum=momentum)
    assert optimizer._step_supports_amp_scaling
    before = [param.detach().clone() for param in left]
    for param in left:
        param.grad = torch.full_like(param, math.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.grad_scale = torch.ones(())
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    assert all(torch.equal(param, old) for param, old in zip(left, before, strict=True))
    run(optimizer, left, range(5))
    run(torch.optim.SGD(right, lr=0.1, momentum=momentum, foreach=False), right, range(5))
    for mine, reference in zip(left, right, strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize(
    ("optimizer_class", "dtype"),
    [
        *itertools.product([SGD, Adam, AdamW], [torch.float32, torch.float64]),
        *itertools.product([Adam, AdamW], [torch.bfloat16, torch.float16]),
    ],
)
def test_fused_is_chosen_wherever_torch_has_it_on_the_cpu(optimizer_class, dtype):
    params = parameters(dtype)
    optimizer = optimizer_class(params)
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [(True, False)]
    assert optimizer._step_supports_amp_scaling
    run(optimizer, params, range(2))
    assert all(torch.isfinite(param).all() for param in params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("optimizer_class", "arguments"),
    [
        (SGD, {}),
        (SGD, {"momentum": 0.9}),
        (SGD, {"momentum": 0.9, "nesterov": True}),
        (SGD, {"momentum": 0.9, "dampening": 0.5}),
        (Adam, {"eps": 1e-3}),
        (AdamW, {"eps": 1e-3}),
        (RMSprop, {"eps": 1e-3}),
    ],
)
@pytest.mark.parametrize("size", [5, 16, 48, 1000])
def test_weights_of_16_bits_go_where_those_of_64_bits_go(optimizer_class, arguments, dtype, size):
    start = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    ends = []
    for kind in (dtype, torch.float64):
        weight, generator = nn.Parameter(start.to(kind, copy=True)), torch.Generator().manual_seed(1)
        optimizer = optimizer_class([weight], lr=0.05, **arguments)
        for _ in range(8):
            weight.grad = (torch.randn(size, generator=generator) + 1).to(dtype).to(kind)
            optimizer.step()
        ends.append(weight.detach().double())
    moved = (ends[1] - start.double()).norm()
    assert (ends[0] - ends[1]).norm() < 0.05 * moved


def test_fused_sgd_of_16_bits_is_refused_on_the_cpu():
    """Torch's kernel is wrong there."""
    with pytest.raises(ConfigError, match="SGD: kernel 'fused'"):
        SGD(parameters(torch.bfloat16), kernel="fused")


@pytest.mark.parametrize("optimizer_class", [SGD, Adam, AdamW, Adagrad])
def test_a_slice_of_a_larger_tensor_is_updated_where_it_is(optimizer_class):
    """Torch's fused CPU kernels would write to the elements between its rows."""
    whole = torch.ones(4, 3)
    part, apart = nn.Parameter(whole[:, :2]), nn.Parameter(torch.ones(4, 2))
    for weight in (part, apart):
        optimizer = optimizer_class([weight], lr=0.1)
        (weight * torch.arange(8.0).view(4, 2)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(part, apart)
    assert whole[:, 2].tolist() == [1.0] * 4
    with pytest.raises(ConfigError, match="kernel 'fused'"):
        optimizer_class([part], kernel="fused")


def test_adafactor_of_an_empty_parameter():
    params = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(2))]
    for param in params:
        param.grad = torch.ones_like(param)
    Adafactor(params, lr=0.1).step()
    assert params[1].tolist() == pytest.approx([0.9, 0.9])


def test_rmsprop_takes_foreach_for_small_tensors_and_a_loop_for_large_ones():
    assert RMSprop(parameters()).param_groups[0]["foreach"] is True
    assert RMSprop([nn.Parameter(torch.zeros(50_000))]).param_groups[0]["foreach"] is False


def test_each_group_gets_its_own_kernel_and_groups_added_later_too():
    complex_weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = Adam([{"params": parameters()}, {"params": [complex_weight], "lr": 0.5}])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, False, True]
    assert not optimizer._step_supports_amp_scaling


def test_sgd_with_dampening_stays_off_the_fused_kernel():
    assert SGD(parameters(), momentum=0.9, dampening=0.5).param_groups[0]["fused"] is False
    assert SGD(parameters(), momentum=0.0, dampening=0.5).param_groups[0]["fused"] is True


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_parameter_that_comes_after_dampening_was_switched_on_starts_as_with_torch(maximize, scale):
    ours, theirs = parameters(), parameters()
    arguments = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "maximize": maximize}
    mine, plain = SGD(ours, **arguments), torch.optim.SGD(theirs, foreach=False, **arguments)
    if scale is not None:
        mine.grad_scale = torch.tensor(scale)
    for step in range(6):
        for params, optimizer in ((ours, mine), (theirs, plain)):
            set_gradients(params, step, first_of=2 if step < 3 else 0)
            optimizer.param_groups[0]["dampening"] = 0.3 if step >= 2 else 0.0
        for param in ours:
            if param.grad is not None and scale is not None:
                param.grad *= scale
        mine.step()
        plain.step()
    assert mine.param_groups[0]["fused"]
    for mine_, theirs_ in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine_, theirs_)


def test_a_skipped_first_step_with_dampening_leaves_no_nan_in_the_momentum():
    first, later = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = SGD([first, later], lr=0.1, momentum=0.9)
    first.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["dampening"] = 0.5
    later.grad = torch.full((3,), math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert optimizer.state[later]["momentum_buffer"].tolist() == [0.0] * 3
    assert later.tolist() == [1.0] * 3


def test_choose_kernel_refuses_a_mixture_of_tensor_types():
    class Quantised(Tensor):
        pass

    assert choose_kernel([torch.zeros(2), torch.zeros(2).as_subclass(Quantised)]) == "loop"


@pytest.mark.parametrize("kernel", ["fused", "foreach", "loop"])
def test_a_kernel_can_be_asked_for(kernel):
    group = AdamW(parameters(), kernel=kernel).param_groups[0]
    assert (group["fused"], group["foreach"]) == (kernel == "fused", kernel == "foreach")


def test_a_fused_kernel_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"RMSprop: kernel 'fused' does not exist.*use 'auto'"):
        RMSprop(parameters(), kernel="fused")
    with pytest.raises(ConfigError, match="Adam: kernel 'fused'"):
        Adam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], kernel="fused")


@pytest.mark.parametrize(
    ("optimizer_class", "arguments", "message"),
    [
        (AdamW, {"lr": 0.0}, "AdamW: lr is 0.0; it must be above 0"),
        (SGD, {"lr": -1}, "SGD: lr is -1; it must be above 0"),
        (Adam, {"lr": math.nan}, "Adam: lr is nan; it must be above 0"),
        (AdamW, {"lr": math.inf}, "AdamW: lr is inf; it must be finite"),
        (SGD, {"weight_decay": math.inf}, "SGD: weight_decay is inf"),
        (Adam, {"lr": "0.1"}, "Adam: lr is '0.1'; it must be a number above 0"),
        (SGD, {"momentum": 9}, "SGD: momentum is 9; it must be at least 0 and below 1"),
        (SGD, {"dampening": 1.5}, "SGD: dampening is 1.5; it must be at least 0 and at most 1"),
        (AdamW, {"betas": (0.9, 1.0)}, r"AdamW: betas\[1\] is 1.0; it must be at least 0 and below 1"),
        (RMSprop, {"alpha": -0.1}, "RMSprop: alpha is -0.1"),
        (AdamW, {"weight_decay": -0.1}, "AdamW: weight_decay is -0.1; it must be at least 0"),
        (SGD, {"nesterov": True}, "SGD: nesterov needs momentum above 0.*found momentum 0.0"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs .* dampening 0"),
    ],
)
def test_arguments_out_of_range_are_one_clear_line(optimizer_class, arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        optimizer_class(parameters(), **arguments)
    assert "\n" not in str(caught.value)


def test_a_group_may_not_take_nesterov_without_momentum():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="nesterov needs momentum above 0"):
        SGD(model, momentum=0.9, groups=[{"params": "0.bias", "momentum": 0.0, "nesterov": True}])


def test_a_missing_argument_is_reported_by_python():
    with pytest.raises(TypeError, match=r"SGD.__init__\(\) missing 1 required positional argument: 'params'"):
        SGD()


def test_defaults():
    group = AdamW(parameters()).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-4, (0.9, 0.999), 1e-8, 0.01)
    assert Adam(parameters()).get_lr() == 1e-3
    assert (SGD(parameters()).get_lr(), SGD(parameters()).param_groups[0]["momentum"]) == (0.01, 0.0)
    assert (RMSprop(parameters()).get_lr(), RMSprop(parameters()).param_groups[0]["alpha"]) == (0.01, 0.99)


def test_registered_by_name_with_the_spellings_people_use():
    for name, factory in {"sgd": SGD, "adam": Adam, "adamw": AdamW, "rmsprop": RMSprop}.items():
        component = lookup("optimizer", name)
        assert component.factory is factory
        assert component.aliases["learning_rate"] == "lr"


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(lr):
    with pytest.raises(ConfigError, match=f"lr is {lr}"):
        SGD(parameters()).set_lr(lr)


def test_set_lr_reaches_every_group_and_any_torch_optimizer():
    for optimizer_class in (SGD, torch.optim.SGD):
        weights = parameters()
        optimizer = optimizer_class([{"params": weights[:1], "lr": 1.0}, {"params": weights[1:]}], lr=2.0)
        assert get_lr(optimizer) == 1.0
        set_lr(optimizer, 0.25)
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("optimizer_class", [SGD, Adam, AdamW])
def test_set_lr_fills_a_tensor_in_place_and_the_step_uses_it(optimizer_class):
    left, right = parameters(), parameters()
    optimizer = optimizer_class(left, lr=1.0)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(1.0, dtype=torch.float64)
    optimizer.set_lr(0.125)
    assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.get_lr() == 0.125
    run(optimizer, left, range(3))
    run(optimizer_class(right, lr=0.125), right, range(3))
    assert_same(left, right)


def test_named_parameters_and_generators_are_accepted():
    model = nn.Linear(2, 2)
    for params in (model.named_parameters(), model.parameters(), [{"params": model.parameters()}]):
        optimizer = AdamW(params)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
        assert optimizer.param_groups[0]["fused"] is True


@pytest.mark.parametrize("source", ["fused", "loop"])
@pytest.mark.parametrize("target", ["fused", "loop"])
@pytest.mark.parametrize(("optimizer_class", "arguments"), [(SGD, {"momentum": 0.9}), (AdamW, {})])
def test_state_moves_between_kernels_and_the_kernel_stays(optimizer_class, arguments, source, target):
    left, right = parameters(), parameters()
    first = optimizer_class(left, lr=0.05, kernel=source, **arguments)
    run(first, left, range(4))
    moved = [nn.Parameter(param.detach().clone()) for param in left]
    second = optimizer_class(moved, lr=0.9, kernel=target, **arguments)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.get_lr() == 0.05
    assert second.param_groups[0]["fused"] is (target == "fused")
    run(second, moved, range(4, 9))
    run(optimizer_class(right, lr=0.05, kernel="loop", **arguments), right, range(9))
    assert_same(moved, right)


def test_loading_the_groups_of_another_optimizer_is_explained():
    with pytest.raises(ValueError, match="different number of parameter groups"):
        SGD(parameters()).load_state_dict(SGD([{"params": [p]} for p in parameters()]).state_dict())


def test_decay_groups_spare_norms_biases_and_frozen_parameters():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    decayed, spared = decay_groups(model, 0.1)
    assert {id(p) for p in decayed["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert {id(p) for p in spared["params"]} == {
        id(p) for p in (model[0].bias, model[1].weight, model[1].bias, model[2].bias)
    }
    optimizer = AdamW(decay_groups(model, 0.1), lr=1.0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("ours", "theirs", "arguments"), CASES)
def test_on_cuda_the_step_is_torchs_and_never_waits(ours, theirs, arguments):
    left = [nn.Parameter(param.detach().cuda()) for param in parameters()]
    right = parameters()
    optimizer = ours(left, **arguments)
    group = optimizer.param_groups[0]
    fused = ours is not RMSprop and not arguments.get("dampening")
    assert (group.get("fused", False), group["foreach"]) == (fused, not fused)
    reference = theirs(right, **arguments, foreach=False)
    for step in range(20):
        set_gradients(right, step)
        for mine, other in zip(left, right, strict=True):
            mine.grad = other.grad.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reference.step()
    assert_same([nn.Parameter(param.detach().cpu()) for param in left], right)


@pytest.mark.parametrize("kernel", ["fused", "loop"])
def test_a_copy_keeps_the_kernel_that_was_asked_for(kernel):
    optimizer = copy.deepcopy(AdamW(parameters(torch.float32), kernel=kernel))
    optimizer.add_param_group({"params": parameters(torch.float32)})
    assert [group["fused"] for group in optimizer.param_groups] == [kernel == "fused"] * 2
    assert optimizer._step_supports_amp_scaling == (kernel == "fused")  # read by torch's gradient scaler


@pytest.mark.parametrize("optimizer_class", [AdamW, SGD])
def test_an_unknown_argument_is_named_with_the_closest_one(optimizer_class):
    with pytest.raises(TypeError, match=rf"{optimizer_class.__name__}.*'weight_decy'.*'weight_decay'"):
        optimizer_class(parameters(torch.float32), weight_decy=0.1)
