"""Lion, Muon, schedule-free AdamW and Adafactor against the plain formula, torch and the package schedulefree."""

import copy
import math

import pytest
import torch
from torch import nn

from etude.checkpoint.optimizer import load_optimizer_state, optimizer_state
from etude.core import CheckpointError, ConfigError, TrainingError
from etude.optim import Adafactor, AdamW, Lion, Muon, ScheduleFreeAdamW
from etude.optim.muon import MatrixMuon, orthogonalize

SHAPES = [(6, 4), (4,), (4, 6), (6, 4), (), (2, 3, 2)]


def parameters(shapes=SHAPES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = (
            torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype) + param.detach()
        )


def run(optimizer, params, steps=10, rates=None):
    for step in range(steps):
        if rates:
            for group in optimizer.param_groups:
                group["lr"] = rates[step]
        set_gradients(params, step)
        optimizer.step()
    return params


def assert_same(ours, theirs, rtol=1e-11):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol / 10)


# ------------------------------------------------------------------------------------------------ Lion


@pytest.mark.parametrize("kernel", ["auto", "foreach", "loop"])
def test_lion_is_the_formula_of_its_paper(kernel):
    ours, plain = parameters(), parameters()
    run(Lion(ours, lr=0.03, betas=(0.8, 0.95), weight_decay=0.1, kernel=kernel), ours)
    momenta = [torch.zeros_like(one) for one in plain]
    for step in range(10):
        set_gradients(plain, step)
        with torch.no_grad():
            for param, momentum in zip(plain, momenta, strict=True):
                update = (0.8 * momentum + 0.2 * param.grad).sign()
                param -= 0.03 * (update + 0.1 * param)
                momentum.mul_(0.95).add_(0.05 * param.grad)
    assert_same(ours, plain)


@pytest.mark.parametrize("make", [Lion, ScheduleFreeAdamW, Adafactor])
def test_a_rate_in_a_tensor_is_the_same_rate(make):
    ours, other = parameters(), parameters()
    run(make(ours, lr=0.25), ours)
    optimizer = make(other, lr=1.0)
    run(optimizer, other, rates=[torch.tensor(0.25)] * 10)
    assert_same(ours, other)


# ------------------------------------------------------------------------------------------------ schedule-free


@pytest.mark.parametrize("kernel", ["auto", "fused", "foreach", "loop"])
@pytest.mark.parametrize(
    ("arguments", "rates"),
    [
        ({"lr": 0.1}, None),
        ({"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3, "warmup_steps": 4}, None),
        ({"lr": 0.1, "r": 1.0, "weight_lr_power": 1.0}, [0.0, 0.05, 0.1, 0.2, 0.1, 0.1, 0.05, 0.05, 0.02, 0.01]),
    ],
)
def test_schedule_free_takes_the_steps_of_the_package(arguments, rates, kernel):
    package = pytest.importorskip("schedulefree")
    ours, theirs = parameters(), parameters()
    mine = ScheduleFreeAdamW(ours, **arguments, kernel=kernel)
    reference = package.AdamWScheduleFree(theirs, **arguments, foreach=False)
    reference.train()
    run(mine, ours, rates=rates)
    run(reference, theirs, rates=rates)
    assert_same(ours, theirs)
    mine.eval(), reference.eval()
    assert_same(ours, theirs)
    mine.train(), reference.train()
    run(mine, ours, rates=rates), run(reference, theirs, rates=rates)
    assert_same(ours, theirs)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_schedule_free_does_the_same_with_numbers_of_a_device(kernel, weight_decay):
    """On CUDA the rate, the share and the count are tensors; the fused kernels read them in float32."""
    ends = []
    for wrap in (float, lambda value: torch.tensor(value, dtype=torch.float64)):
        params = parameters()
        optimizer = ScheduleFreeAdamW(params, lr=0.125, weight_decay=weight_decay, kernel=kernel)
        for step in range(5):
            set_gradients(params, step)
            grads = [param.grad for param in params]
            with torch.no_grad():
                optimizer.update(
                    optimizer.param_groups[0], params, grads, tuple(map(wrap, (0.125, 2.0**-step, step + 1)))
                )
        ends.append(params)
    assert_same(*ends, rtol=1e-6)


def test_schedule_free_is_the_formula_of_its_paper():
    ours, plain = parameters(), parameters()
    optimizer = ScheduleFreeAdamW(ours, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    run(optimizer, ours)
    x, z, v = ([one.detach().clone() for one in plain] for _ in range(3))
    for moment in v:
        moment.zero_()
    for step in range(10):
        with torch.no_grad():
            for place, param in enumerate(plain):
                param.copy_(0.1 * z[place] + 0.9 * x[place])
        set_gradients(plain, step)
        with torch.no_grad():
            for place, param in enumerate(plain):
                v[place].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                size = (v[place] / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8
                z[place] -= 0.1 * (param.grad / size + 0.1 * param)
                x[place] += (z[place] - x[place]) / (step + 1)
    optimizer.eval()
    assert_same(ours, x, rtol=1e-10)


def test_schedule_free_refuses_a_step_with_the_averaged_weights():
    params = parameters()
    optimizer = ScheduleFreeAdamW(params)
    optimizer.eval()
    set_gradients(params, 0)
    with pytest.raises(TrainingError, match="train"):
        optimizer.step()


# ------------------------------------------------------------------------------------------------ Muon

MATRICES = [(6, 4), (4, 6), (6, 4), (5, 5), (3, 8)]


def muon(params, **arguments):
    return MatrixMuon(params, **{"lr": 0.02, "weight_decay": 0.1, **arguments})


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kernel", ["foreach", "loop"])
def test_muon_takes_the_steps_of_torch(adjust, nesterov, kernel):
    """Torch orthogonalizes in bfloat16: the same rounding happens at other places, so the bounds are those of it."""
    ours, theirs = parameters(MATRICES, torch.float32), parameters(MATRICES, torch.float32)
    start = [one.detach().clone() for one in ours]
    run(muon(ours, nesterov=nesterov, adjust_lr=adjust, precision="bfloat16", kernel=kernel), ours)
    reference = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust, "momentum": 0.95}
    run(torch.optim.Muon(theirs, **reference), theirs)
    for one, other, old in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() < 0.03 * (other - old).norm()


def plain_orthogonal(matrix):
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("normuon", [False, True])
def test_muon_and_its_options_are_their_formulas(cautious, normuon):
    ours, plain = parameters(MATRICES), parameters(MATRICES)
    run(muon(ours, cautious=cautious, normuon=normuon), ours)
    momenta, squares = [torch.zeros_like(one) for one in plain], [torch.zeros(len(one), 1).double() for one in plain]
    for step in range(10):
        set_gradients(plain, step)
        for param, momentum, square in zip(plain, momenta, squares, strict=True):
            momentum.mul_(0.95).add_(0.05 * param.grad)
            update = plain_orthogonal(0.05 * param.grad + 0.95 * momentum)
            if normuon:
                norm = update.norm()
                square.mul_(0.95).add_(0.05 * update.square().mean(1, keepdim=True))
                update = update / square.sqrt()
                update = update * norm / update.norm()
            decay = param.detach() * (update * param.detach() > 0) if cautious else param.detach()
            param.data -= 0.02 * (0.1 * decay + 0.2 * math.sqrt(max(param.shape)) * update)
    assert_same(ours, plain, rtol=1e-9)


@pytest.mark.parametrize("shape", [(3, 8, 5), (3, 5, 8), (1, 4, 4)])
def test_matrices_of_a_stack_are_orthogonalized_alone(shape):
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = orthogonalize(stack)
    for matrix, one in zip(stack, found, strict=True):
        torch.testing.assert_close(one, plain_orthogonal(matrix), rtol=1e-9, atol=1e-11)
        assert (torch.linalg.svdvals(one) - 1).abs().max() < 0.5
    assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))


class Language(nn.Module):
    """Embeddings, two blocks, a convolution and an output layer, which may be tied."""

    def __init__(self, *, tied):
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.positions_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.conv = nn.Conv1d(4, 4, 3)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(4)
        if not tied:
            self.decide = nn.Linear(4, 11, bias=False)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_hidden_matrices_and_adamw_the_rest(tied):
    model = Language(tied=tied)
    optimizer = Muon(model, lr=0.01, adamw_lr=0.003)
    names = {id(param): name for name, param in model.named_parameters()}
    hidden, others = ([names[id(p)] for g in one.param_groups for p in g["params"]] for one in optimizer.optimizers)
    weights = [f"blocks.{place}.{layer}.weight" for place in range(2) for layer in ("up", "down")]
    assert hidden == ["conv.weight", *weights]
    assert set(hidden) | set(others) == set(names.values())
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.003]
    assert "conv.weight" in optimizer.announcement() == copy.deepcopy(optimizer).announcement()


def test_more_parameters_can_be_given_to_adamw():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = Muon(model, adamw="0", decay_only_matrices=True)
    assert [len(group["params"]) for group in optimizer.optimizers[0].param_groups] == [1]
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.optimizers[1].param_groups] == [
        (2, 0.1),
        (3, 0.0),
    ]


def test_muon_refuses_models_without_hidden_matrices_and_parameters_without_names():
    with pytest.raises(ConfigError, match="no hidden matrices"):
        Muon(nn.Linear(3, 2))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for params in (model.parameters(), model.named_parameters()):
        with pytest.raises(ConfigError, match="pass the model"):
            Muon(params)
    with pytest.raises(ConfigError, match="no parameter matches 'x'"):
        Muon(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), adamw="x")
    with pytest.raises(ConfigError, match="has no shape yet"):
        Muon(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))


# ------------------------------------------------------------------------------------------------ all of them

OWN = [Lion, Adafactor, ScheduleFreeAdamW, Muon]


@pytest.mark.parametrize("make", OWN)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": -1.0}, "lr is -1.0; it must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"lr": math.nan}, "lr is nan"),
        ({"layer_decay": 2.0}, "layer_decay is 2.0"),
        ({"groups": [{"params": "0", "momentun": 1.0}]}, "groups.0.momentun"),
        ({"groups": [5]}, "groups.0 needs"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(make, wrong, words):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=words) as found:
        make(model, **wrong)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(Lion, torch.float32), (Adafactor, torch.float32), (Muon, torch.float32), (ScheduleFreeAdamW, torch.bfloat16)],
)
def test_a_fused_kernel_that_does_not_exist_is_refused_in_one_line(make, dtype):
    with pytest.raises(ConfigError, match="kernel 'fused'"):
        make(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(dtype), kernel="fused")


@pytest.mark.parametrize("key", ["momentum", "betas", "wieght_decay"])
def test_groups_of_muon_set_what_muon_and_adamw_share(key):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    with pytest.raises(ConfigError, match=rf"groups\.0\.{key}: groups of muon can set only lr and weight_decay"):
        Muon(model, groups=[{"params": "0", key: 0.5}])
    groups = Muon(model, groups=[{"params": "0", "lr": 0.5, "weight_decay": 0.0}]).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups if group.get("name") == "0"] == [(0.5, 0.0)] * 2


@pytest.mark.parametrize("make", [Lion, Adafactor, ScheduleFreeAdamW])
def test_complex_and_sparse_gradients_are_refused(make):
    with pytest.raises(ConfigError, match="complex"):
        make([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = make(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("make", OWN)
def test_layers_may_have_rates_of_their_own_and_vectors_no_decay(make):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = make(model, lr=0.1, weight_decay=0.5, layer_decay=0.5, decay_only_matrices=True).param_groups
    found = {id(param): (group["lr"], group["weight_decay"]) for group in groups for param in group["params"]}
    assert [found[id(param)] for param in model.parameters()] == [(0.05, 0.5), (0.05, 0.0), (0.1, 0.5), (0.1, 0.0)]


@pytest.mark.parametrize("make", OWN)
def test_states_are_saved_and_loaded_exactly(make):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))

    one, other = model(), model()
    mine, later = make(one, lr=0.05), make(other, lr=0.01)
    run(mine, list(one.parameters()), 3)
    other.load_state_dict(one.state_dict())
    later.load_state_dict(copy.deepcopy(mine.state_dict()))  # torch shares the tensors
    run(mine, list(one.parameters()), 3), run(later, list(other.parameters()), 3)
    assert all(torch.equal(left, right) for left, right in zip(one.parameters(), other.parameters(), strict=True))


def test_lion_keeps_its_momentum_in_the_dtype_of_the_weight():
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Lion([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype is torch.bfloat16


def test_without_matrices_muon_of_a_layer_would_be_adamw():
    """The parameters that Muon leaves to AdamW take AdamW's steps."""
    one, other = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    other.load_state_dict(one.state_dict())
    run(Muon(one, lr=0.01), list(one.parameters()), 5)
    run(AdamW(other, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1), list(other.parameters()), 5)
    assert torch.equal(one[0].bias, other[0].bias)
    assert torch.equal(one[1].weight, other[1].weight)
    assert not torch.equal(one[0].weight, other[0].weight)


@pytest.mark.parametrize("make", OWN)
def test_a_state_of_another_shape_is_refused_before_a_kernel_reads_it(make):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = make(model)
    run(optimizer, list(model.parameters()), 1)
    tree = optimizer_state(optimizer, model)
    load_optimizer_state(optimizer, model, tree)
    name, value = next((key, one) for key, one in tree["state"]["0.weight"].items() if one.dim())
    damaged = {**tree["state"], "0.weight": {**tree["state"]["0.weight"], name: value[:1]}}
    with pytest.raises(CheckpointError, match=rf"0\.weight\.{name}"):
        load_optimizer_state(optimizer, model, {**tree, "state": damaged})


@pytest.mark.parametrize("kernel", ["auto", "foreach"])
def test_adafactor_takes_parameters_without_elements(kernel):
    shapes = [(0, 3), (3, 0), (0,)]
    ours, plain = parameters([*SHAPES, *shapes]), parameters()
    run(Adafactor(ours, lr=0.1, kernel=kernel), ours)
    run(Adafactor(plain, lr=0.1, kernel=kernel), plain)
    assert_same(ours[: len(plain)], plain)
