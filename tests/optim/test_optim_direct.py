"""Fused kernels that are called without torch's preparations: the same bits, any memory layout, nothing bypassed."""

import pytest
import torch
from test_optim_optimizers import FUSED, parameters, run
from torch import nn

from etude.optim import SGD, Adagrad, Adam, AdamW, ScheduleFreeAdamW
from forked_python import run_python

STATEFUL = [(SGD, {"momentum": 0.9}), (Adam, {}), (Adagrad, {}), (ScheduleFreeAdamW, {"weight_decay": 0.1})]
LAYOUTS = {
    "channels_last": lambda one: one.to(memory_format=torch.channels_last),
    "contiguous": lambda one: one,
    "transposed": lambda one: one.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda one: one[:1].clone().expand_as(one),
}


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_weight", ["channels_last", "contiguous", "transposed"])
@pytest.mark.parametrize("optimizer_class", [*FUSED, ScheduleFreeAdamW])
def test_gradients_set_by_hand_may_have_another_layout_than_the_weights(optimizer_class, of_weight, of_gradient):
    """Torch's fused CPU kernels would take their elements in the order of the memory."""
    torch.manual_seed(0)
    values, grads = torch.randn(4, 3, 2, 2), torch.randn(3, 4, 3, 2, 2)
    weights = [nn.Parameter(LAYOUTS[of_weight](values.clone())), nn.Parameter(values.clone())]
    optimizers = [optimizer_class([weights[0]]), optimizer_class([weights[1]], kernel="loop")]
    for grad in grads:
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = LAYOUTS[of_gradient](grad.clone())
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1].detach(), check_stride=False)
    assert not torch.equal(weights[1], values)


@pytest.mark.parametrize("way", ["loaded", "converted", "converted back"])
@pytest.mark.parametrize(("optimizer_class", "arguments"), STATEFUL)
def test_states_follow_weights_that_change_their_layout(optimizer_class, arguments, way):
    """Fused kernels take the elements of weights and states in the order of the memory."""
    torch.manual_seed(0)
    values, grads = torch.randn(4, 3, 2, 2), torch.randn(6, 4, 3, 2, 2)
    first = torch.channels_last if way == "converted back" else torch.contiguous_format
    then = torch.contiguous_format if way == "converted back" else torch.channels_last
    weight, plain = nn.Parameter(values.clone(memory_format=first)), nn.Parameter(values.clone())
    optimizer, reference = (optimizer_class([one], **arguments) for one in (weight, plain))
    reference.param_groups[0] |= {"fused": False, "foreach": False}
    for step, grad in enumerate(grads):
        if step == 3 and way == "loaded":
            saved, weight = optimizer.state_dict(), nn.Parameter(weight.detach().clone(memory_format=then))
            optimizer = optimizer_class([weight], **arguments)
            optimizer.load_state_dict(saved)
        elif step == 3:
            weight.data = weight.data.contiguous(memory_format=then)
        weight.grad, plain.grad = torch.empty_like(weight).copy_(grad), grad.clone()
        optimizer.step()
        reference.step()
    assert weight.is_contiguous(memory_format=then)
    torch.testing.assert_close(weight, plain.detach(), check_stride=False)


class Centred(AdamW):
    """Changes what a step gets, as subclasses of torch's optimizers may."""

    def _init_group(self, group, params, grads, *states):
        found = super()._init_group(group, params, grads, *states)
        grads[:] = [grad - grad.mean() for grad in grads]
        return found


@pytest.mark.parametrize("change", ["subclass", "betas", "amsgrad", "rate"])
def test_whatever_is_unusual_goes_through_torchs_step(change):
    results = []
    for kernel in ("fused", "loop"):
        params = parameters(torch.float32)
        optimizer = (Centred if change == "subclass" else AdamW)(params, kernel=kernel, amsgrad=change == "amsgrad")
        for group in optimizer.param_groups:
            if change == "betas" and kernel == "fused":
                group["betas"] = torch.tensor([0.9]), torch.tensor([0.999])
            if change == "rate" and kernel == "fused":
                group["lr"] = torch.tensor(group["lr"])
        run(optimizer, params, range(4))
        results.append(params)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_counts_advance_whatever_the_default_device_was_when_the_library_was_imported():
    script = """
import torch
with torch.device("meta"):
    from etude.optim import AdamW, Lookahead
weight = torch.nn.Parameter(torch.ones(3))
optimizer = Lookahead(AdamW([weight], lr=0.1))
for _ in range(3):
    weight.grad = torch.ones(3)
    optimizer.step()
print(optimizer.state[weight]["step"].item(), optimizer.state["lookahead"]["step"].item())
"""
    assert run_python("-c", script).stdout == "3.0 3\n"


@pytest.mark.parametrize(
    ("ours", "arguments"),
    [(SGD, {}), (SGD, {"momentum": 0.9, "nesterov": True}), (Adam, {}), (AdamW, {"maximize": True}), (Adagrad, {})],
)
def test_on_the_cpu_a_fused_kernel_is_called_directly_with_the_bits_of_torchs_step(ours, arguments, monkeypatch):
    theirs = getattr(torch.optim, ours.__name__)
    left, right = parameters(torch.float32), parameters(torch.float32)
    both = []
    for params, cls, own in ((left, ours, {}), (right, theirs, {"fused": True})):
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.1, "weight_decay": 0.0}]
        both.append(cls(groups, lr=0.01, weight_decay=0.1, **arguments, **own))
        run(both[-1], params, range(6))
        both[-1].grad_scale = torch.tensor(4.0)
        both[-1].param_groups[0]["lr"] = 0.02
    run(both[1], right, range(6, 12), first_of=1)
    monkeypatch.setattr(theirs, "_init_group", None)  # what torch prepares is no longer used
    run(both[0], left, range(6, 12), first_of=1)
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
    for mine, other in zip(left, right, strict=True):
        found, wanted = both[0].state.get(mine, {}), both[1].state.get(other, {})
        assert all(torch.equal(found[key], value) for key, value in wanted.items() if value is not None)


@pytest.mark.parametrize("ours", [SGD, Adam, AdamW, Adagrad])
def test_a_step_that_finds_infinities_changes_nothing_not_even_the_count(ours):
    params = parameters(torch.float32)
    optimizer = ours(params, lr=0.01)
    run(optimizer, params, range(3))
    optimizer.found_inf = torch.ones(())
    before = [param.detach().clone() for param in params]
    counts = [
        optimizer.state[param].get("step", torch.zeros(())).clone() for param in params if param.grad is not None
    ]
    run(optimizer, params, range(3, 5))
    assert all(torch.equal(one, other) for one, other in zip(params, before, strict=True))
    after = [optimizer.state[param].get("step", torch.zeros(())) for param in params if param.grad is not None]
    assert counts == after
    optimizer.found_inf = torch.zeros(())
    run(optimizer, params, range(5, 6))
    assert not any(torch.equal(one, other) for one, other in zip(params, before, strict=True) if one.grad is not None)
