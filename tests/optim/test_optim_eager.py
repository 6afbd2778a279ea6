"""Steps and methods of torch's optimizers without the compiler: the same numbers, hooks and warnings as torch's own."""

import functools
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from etude import optim
from etude.optim.eager import take_step, without_compiler
from forked_python import run_python

CLASSES = sorted(
    (
        one
        for one in vars(torch.optim).values()
        if isinstance(one, type) and issubclass(one, Optimizer) and one not in (Optimizer, torch.optim.LBFGS)
    ),
    key=lambda one: one.__name__,
)
VARIANTS = [
    {},
    *({name: True} for name in ("foreach", "fused", "maximize", "amsgrad", "centered")),
    *({"kernel": name} for name in ("fused", "foreach", "loop")),
    {"foreach": False},
    {"weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
]
CASES = [
    pytest.param(cls, variant, id="-".join([f"{cls.__module__.split('.')[0]}.{cls.__name__}", *map(str, variant)]))
    for cls in (*CLASSES, optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop)
    for variant in VARIANTS
    if set(variant) <= set(inspect.signature(cls).parameters)
    if (cls, variant) != (optim.RMSprop, {"kernel": "fused"})  # there is no such kernel
]


def parameters(sparse: bool = False) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3)] if sparse else [(5, 3), (2, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int, sparse: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator)
        param.grad = grad.to_sparse(1) if sparse else grad


def train(optimizer: Optimizer, step) -> list[torch.Tensor]:
    """Take some steps; return the parameters and everything the optimizer keeps."""
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number in range(4):
        give_gradients(params, number, sparse)
        step(optimizer)
    kept = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return [*params, *kept]


@pytest.mark.parametrize(("cls", "variant"), CASES)
def test_a_step_is_that_of_torch_to_the_last_bit(cls, variant):
    sparse = cls is torch.optim.SparseAdam
    expected = train(cls(parameters(sparse), lr=0.01, **variant), lambda optimizer: optimizer.step())
    found = train(cls(parameters(sparse), lr=0.01, **variant), take_step)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_optimizers_of_torch_are_stepped_without_what_is_around_them(monkeypatch):
    """Else everything here would pass, and nothing would be gained."""

    def refuse(*_arguments):
        raise AssertionError("a label for profilers, without a profiler")

    optimizers = [cls(parameters()) for cls in CLASSES if cls.__name__ not in ("SparseAdam", "Adafactor", "Muon")]
    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    for optimizer in optimizers:
        train(optimizer, take_step)


def test_gradient_mode_is_put_back():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    take_step(optimizer)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        take_step(optimizer)
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("scope", ["own", "global"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_are_run_also_those_that_come_later(scope, when):
    optimizer, calls = torch.optim.SGD(parameters(), lr=0.1), []
    take_step(optimizer)
    register = {
        ("own", "before"): optimizer.register_step_pre_hook,
        ("own", "after"): optimizer.register_step_post_hook,
        ("global", "before"): register_optimizer_step_pre_hook,
        ("global", "after"): register_optimizer_step_post_hook,
    }[scope, when]
    handle = register(lambda one, *_rest: calls.append(one))
    take_step(optimizer)
    assert calls == [optimizer]
    handle.remove()
    take_step(optimizer)
    assert calls == [optimizer]


class Unhashable:
    hooked = True  # so that torch leaves it as it is
    __hash__ = None

    def __init__(self, calls):
        self.calls = calls

    def __call__(self):
        self.calls.append("object")


def test_a_step_of_the_instance_the_class_or_a_subclass_is_used(monkeypatch):
    calls: list[str] = []

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            calls.append("subclass")
            return super().step(closure)

    take_step(Own(parameters(), lr=0.1))
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.step = lambda: calls.append("instance")
    take_step(optimizer)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda _self: calls.append("class"))
    take_step(torch.optim.SGD(parameters(), lr=0.1))
    monkeypatch.setattr(torch.optim.SGD, "step", Unhashable(calls))
    take_step(torch.optim.SGD(parameters(), lr=0.1))
    assert calls == ["subclass", "instance", "class", "object"]


def test_a_wrapper_that_names_what_it_wraps_is_not_skipped(monkeypatch):
    calls, step = [], torch.optim.SGD.step

    @functools.wraps(step)
    def counted(self, closure=None):
        calls.append(self)
        return step(self, closure)

    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    take_step(optimizer)
    assert calls == [optimizer]


def test_a_scheduler_of_torch_sees_the_steps():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it missed them
        take_step(optimizer)
        scheduler.step()


def test_a_differentiable_step_is_differentiated():
    weight, gradient = torch.ones(3, requires_grad=True).clone(), torch.ones(3, requires_grad=True)
    weight.grad = gradient
    take_step(torch.optim.SGD([weight], lr=0.5, differentiable=True))
    weight.sum().backward(inputs=[gradient])
    assert gradient.grad is not None
    assert gradient.grad.tolist() == [-0.5] * 3


def test_a_profiler_sees_the_label_of_torch():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        take_step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()}


def test_a_torch_that_lacks_what_is_asked_takes_its_own_step(monkeypatch):
    optimizer, labels = torch.optim.SGD(parameters(), lr=0.1), []
    record = torch.autograd.profiler.record_function
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: labels.append(name) or record(name))
    take_step(optimizer)
    assert not labels
    monkeypatch.delattr(torch.autograd, "_profiler_enabled")
    take_step(optimizer)
    assert labels == ["Optimizer.step#SGD.step"]


IN_A_NEW_PROCESS = """
import sys, warnings, torch
from torch.optim import Optimizer
from etude import optim
from etude.optim.eager import take_step, without_compiler

METHODS = [getattr(Optimizer, name) for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad")]

def torch_is_untouched():
    return not any("__dynamo_disable" in vars(one.__wrapped__) for one in METHODS)

def make(cls=torch.optim.SGD):
    return cls([torch.nn.Parameter(torch.ones(2))], lr=0.1)

def check(expected):
    assert ("torch._dynamo" in sys.modules) == expected
    assert torch_is_untouched() != expected

with without_compiler():
    optimizer = make()
    with without_compiler():
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
take_step(optimizer)
check(False)
take_step(make(optim.AdamW))  # the library's own are made so without the context
check(False)
try:
    with without_compiler():
        make(lambda params, lr: torch.optim.SGD(params, lr=-1))
except ValueError:
    check(False)

def warnings_of(context):
    weight = torch.nn.Parameter(torch.ones(2))
    with warnings.catch_warnings(record=True) as caught, context:
        warnings.simplefilter("always")
        torch.optim.SGD([weight, weight], lr=0.1)
    return [(str(one.message), one.category, one.filename) for one in caught]

ours = warnings_of(without_compiler())
check(False)
import contextlib
theirs = warnings_of(contextlib.nullcontext())
check(True)  # as ever, where torch is used without the context
assert ours and ours == theirs, (ours, theirs)

def update(weight, optimizer, x):
    optimizer.zero_grad()
    (weight * x).sum().backward()
    optimizer.step()

def trained(run):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for step in range(3):
        run(weight, optimizer, torch.arange(3.0) + step)
    take_step(optimizer)
    return weight

torch.testing.assert_close(trained(torch.compile(update, backend="eager")), trained(update))
print("fine")
"""


def test_the_compiler_is_not_imported_and_torch_is_left_as_it_was():
    done = run_python("-c", IN_A_NEW_PROCESS)
    assert done.stdout == "fine\n", done.stderr


def test_where_the_compiler_is_imported_nothing_is_changed():
    import torch._dynamo  # noqa: F401

    functions = [Optimizer.add_param_group.__wrapped__, Optimizer.state_dict.__wrapped__]
    before = [dict(vars(function)) for function in functions]
    with without_compiler():
        assert [dict(vars(function)) for function in functions] == before


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_hooks_of_our_optimizers_run_once_in_every_step(cls):
    """The first step is torch's, the others call the kernel themselves."""
    getattr(torch.optim, cls.__name__)(parameters())  # torch's own class has the wrappers too, once it was used
    params, calls = parameters(), []
    optimizer = cls(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        give_gradients(params, step)
        assert optimizer.step((lambda: 7.0) if step == 2 else None) == (7.0 if step == 2 else None)
        assert calls == ["before", "after"] * (step + 1)
