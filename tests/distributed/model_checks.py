"""Checks of models, losses and tasks of every kind: several processes train them like one, or refuse them."""

import os
import tempfile

import pytest
import torch
import torch.nn.functional as F
from parallel_checks import compare_one, make_mlp, points, tokens, trained
from torch import nn

from etude import CausalTransformerLM, deferred_weights
from etude.core import ConfigError, DataError, LossTerm, TrainingError
from etude.core.deferred import weights_of
from etude.core.model import whole
from etude.data import TensorData
from etude.distributed import World, join_world, leave_world
from etude.engine.alternating import AlternatingTask
from etude.losses import LanguageModelingLoss, LossStrategy
from etude.multitask import LanguageModelHead, LinearHead, MultiTask, MultiTaskModel, TaskSpec


class Full(nn.Module):
    """Has no memory for training."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        if self.training:
            raise torch.OutOfMemoryError("out of memory")
        return self.layer(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Gated(nn.Module):
    """Blocks with a few weights of another dtype."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        for layer in self.layers:
            layer.gate = nn.Linear(8, 1).double()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * layer.gate(x.double()).float()
        return self.head(x)


class Tied(nn.Module):
    """Blocks of which two share a weight."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 3)
        self.layers[2].down.weight = self.layers[0].down.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Views(nn.Module):
    """Two weights that are parts of one tensor."""

    def __init__(self):
        super().__init__()
        both = torch.empty(2, 8, 8)
        nn.init.normal_(both, std=0.3)
        self.first, self.second, self.head = nn.Parameter(both[0]), nn.Parameter(both[1]), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(x @ self.first) @ self.second)


class Buffers(nn.Module):
    """Buffers of types and layouts that gloo does not know, and a parameter that is a number."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 3), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("short", torch.arange(6).to(torch.int16))
        self.register_buffer("places", torch.arange(5).expand(2, 5))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())

    def forward(self, x):
        return self.layer(x) * self.angles.real.sum() * self.scale


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(24, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(8, 3), nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    def forward(self, x):
        return self.layer(x) + self.shift.real


class Branch(nn.Module):
    """Its first layer is for some samples only."""

    def __init__(self):
        super().__init__()
        self.some, self.all, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden, chosen = self.all(x), x[:, :1] > 0.3
        if chosen.any():
            hidden = hidden + self.some(x) * chosen
        return self.head(hidden)


class Turns(AlternatingTask):
    """Layers that are trained in turns."""

    turns = {"first": "0", "others": ["2", "4"]}  # noqa: RUF012

    def __call__(self, model, batch, *, metrics):
        x, y = batch
        return {"loss": LossTerm(F.cross_entropy(model(x), y, reduction="sum"), float(len(y)))}


class NotFinite(LossStrategy):
    """Has a NaN for a few samples."""

    def terms(self, output, batch, *, metrics):
        x, y = batch
        factor = torch.where((x[:, 0] > 1.2) & (x[:, 1] > 0), float("nan"), 1.0)
        return {"loss": LossTerm((F.cross_entropy(output, y, reduction="none") * factor).sum(), float(len(y)))}


class TwoTerms(LossStrategy):
    """Their order is not that of the alphabet."""

    def terms(self, output, batch, *, metrics):
        y = batch[1]
        return {
            "size": LossTerm(output[y == 1].square().sum(), (y == 1).sum(), 0.3),
            "classes": LossTerm(F.cross_entropy(output, y, reduction="sum"), float(len(y)), 0.7),
        }

    def counts(self, batch):
        return {"size": (batch[1] == 1).sum(), "classes": float(len(batch[1]))}


HALVES = {"batch_size": 9, "micro_batch_size": 8}
"""One of two processes has 4 samples of a batch, the other 5: two micro-batches."""


def sharded_like_alone() -> None:
    for make, arguments in (
        (make_mlp, {"config": HALVES}),
        (Tied, {}),
        (Buffers, {}),
        (Gated, {"config": {"gradient_clip_norm": 0.05}}),
        (make_mlp, {"task": Turns()}),
        (make_mlp, {"config": {"freeze": "2", "unfreeze": {1: "2"}}}),  # after a validation, without any save
        (make_mlp, {"loss": NotFinite()}),  # also of batches that a process without samples runs
    ):
        compare_one(make, points(), "fsdp", **arguments)
    leave_world()


def replicated_like_alone() -> None:
    compare_one(make_mlp, points(), "ddp", config=HALVES, loss=TwoTerms())
    compare_one(Buffers, points(), "ddp")
    compare_one(Branch, points(), "ddp", config={"batch_size": 4, "find_unused_parameters": True})
    words = tokens()
    section = {"name": "torch.optim.SGD", "lr": 0.1}
    compare_one(Sparse, (words, words[:, 0] // 9), "ddp", optimizer=section, config={"learning_rate": None})
    leave_world()


class Labelled(LossStrategy):
    """Counts the samples of one class only, which a process may have none of."""

    def terms(self, output, batch, *, metrics):
        chosen = batch[1] == 1
        losses = F.cross_entropy(output.float(), batch[1], reduction="none")
        return {"loss": LossTerm((losses * chosen).sum(), chosen.sum())}


class Precise(nn.Module):
    """Its last layer is in float64."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 3).double()

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).double())


def counts_with_gradients() -> None:
    """The count by which a step is divided goes with the gradients: it is right, and leaves no trace in the model."""
    x, labels = points()
    labels[4:16] = 0  # whole batches have nothing to learn from on some process
    few = {"config": {"batch_size": 6}, "loss": Labelled()}
    compare_one(make_mlp, (x, labels), "ddp", **few)
    compare_one(Precise, (x, labels), "ddp", **few)
    names = {name for name, _ in make_mlp().named_parameters()}
    model, losses, _ = trained(lambda: make_mlp().bfloat16(), (x.bfloat16(), labels), parallel="ddp", **few)
    assert {name for name, _ in model.named_parameters()} == names == set(model.state_dict())
    _, alone, _ = trained(lambda: make_mlp().bfloat16(), (x.bfloat16(), labels), World(), **few)
    assert losses == pytest.approx(alone, rel=0.02, nan_ok=True)  # of a batch without labels there is no loss
    leave_world()


class Judge(nn.Module):
    """A model with another one inside, which has a tensor plan."""

    def __init__(self):
        super().__init__()
        self.trunk = CausalTransformerLM(vocab_size=24, d_model=16, n_layers=2, n_heads=2, max_len=8, dropout=0.0)
        self.label = nn.Linear(16, 3)

    def forward(self, words):
        return self.label(self.trunk.features(words).mean(1)) + self.trunk(words).mean(1)[:, :3]


def make_reader() -> nn.Module:
    """Two tasks, one of which has the output layer of the trunk."""
    trunk = CausalTransformerLM(vocab_size=24, d_model=16, n_layers=2, n_heads=2, max_len=8, dropout=0.0)
    return MultiTaskModel(trunk, {"text": LanguageModelHead(), "kind": LinearHead(3, in_features=16)})


def plan_inside() -> None:
    """The plan of an inner model is used, also if a task's loss applies its output layer."""
    compare_one(Judge, (tokens(), tokens()[:, 0] % 3), {"tensor": 2})
    data = TensorData({"input_ids": tokens(), "kinds": tokens() % 3})
    for parallel in ({"tensor": 2}, "fsdp"):
        text, kind = TaskSpec("text", LanguageModelingLoss()), TaskSpec("kind", labels="kinds", weight=0.5)
        compare_one(make_reader, data, parallel, task=MultiTask({"text": text, "kind": kind}))
    leave_world()


class Beside(nn.Module):
    """Has weights and buffers that are made in other ways than torch's layers make theirs."""

    def __init__(self):
        super().__init__()
        self.first, self.shift = nn.Linear(8, 12), nn.Parameter(torch.randn(12) * 0.02)
        self.register_buffer("scale", torch.empty(12).fill_(0.5))
        self.register_buffer("noise", torch.randn(12))
        self.last = nn.Linear(12, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * self.scale + self.shift + self.noise))


def deferred() -> None:
    """Weights are drawn like those of a plain model: views of other memory, and what is not made by torch's layers.

    Tied weights stay tied, also where they are not divided.
    """
    plan = {"layers.1.up": "colwise", "layers.1.down": "rowwise"}
    for kind, parallel in ((Views, "fsdp"), (Beside, "fsdp"), (Tied, {"tensor": 2, "tensor_plan": plan})):
        alone, expected, _ = trained(kind, points(), World())

        def make(kind=kind):
            with deferred_weights():
                return kind()

        model, found, _ = trained(make, points(), parallel=parallel)
        assert len([*model.parameters()]) == len([*alone.parameters()])
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(weights_of(model).values(), weights_of(alone).values(), strict=True):
            torch.testing.assert_close(whole(mine), theirs, rtol=1e-5, atol=1e-5)
    leave_world()


def embedding_by_rows() -> None:
    """An embedding that is divided by rows, and shares its weight with no other layer."""

    def make():
        return CausalTransformerLM(
            24, d_model=16, n_layers=1, n_heads=2, dropout=0.0, max_len=8, tie_embeddings=False
        )

    compare_one(make, TensorData({"input_ids": tokens(), "labels": tokens()}), {"tensor": 2})
    leave_world()


def first_rank_without_samples() -> None:
    """A run folder is made where the process that writes it has nothing of the first batch."""
    x, labels = points()
    with tempfile.TemporaryDirectory() as made:
        folder = join_world("cpu").share_text(made)
        for parallel in ("ddp", "fsdp"):
            compare_one(make_mlp, (x[:1], labels[:1]), parallel)
            trained(make_mlp, (x[:1], labels[:1]), parallel=parallel, output_dir=f"{folder}/{parallel}")
    leave_world()


def make_odd() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 15), nn.Linear(15, 3))


def what_is_not_divided() -> None:
    """What would be trained wrongly is refused."""
    bias = nn.Parameter(torch.zeros(3))

    def outside(params):
        return torch.optim.SGD([*params, bias], lr=0.1)

    with pytest.raises(ConfigError, match="parameters outside the model"):
        trained(make_mlp, points(), parallel="fsdp", optimizer=outside, config={"learning_rate": None})
    with pytest.raises(ConfigError, match=r"layers\.0 shares a parameter"):
        trained(Tied, points(), parallel={"shard": 2, "blocks": "layers.*"})
    for parallel in ("ddp", "fsdp"):
        with pytest.raises(ConfigError, match=r"0\.weight has no shape yet"):
            trained(lambda: nn.Sequential(nn.LazyLinear(3)), points(), parallel=parallel)
    with pytest.raises(ConfigError, match="embedding has sparse gradients"):
        trained(Sparse, (tokens(), tokens()[:, 0] // 9), parallel="fsdp")
    with pytest.raises(ConfigError, match="shift is complex"):
        trained(Complex, points(), parallel="fsdp")
    with pytest.raises(TrainingError, match="different losses for the same samples"):
        trained(make_even, points(), parallel={"tensor": 2, "tensor_plan": {"0": "colwise"}})
    with pytest.raises(ConfigError, match="15 inputs of the layer '1'"):
        trained(make_odd, points(), parallel={"tensor": 2, "tensor_plan": {"1": "rowwise"}})
    with pytest.raises(ConfigError, match="15 outputs of the layer '0'"):
        trained(make_odd, points(), parallel={"tensor": 2, "tensor_plan": {"0": "colwise"}})
    with pytest.raises(ConfigError, match="no module matches 'layers'"):
        trained(Tied, points(), parallel={"shard": 2, "blocks": "layers"})
    with pytest.raises(DataError, match=r"layer '2'.*parallel\.tensor_plan divides it"):
        trained(make_mlp, points(), parallel={"tensor": 2, "tensor_plan": {"[02]": "colwise"}})

    with pytest.raises(TrainingError, match="out of memory") as caught:
        trained(Full, points(), parallel="fsdp")
    assert "on_out_of_memory" not in str(caught.value)  # it is refused

    def changed_later():
        with deferred_weights():
            model = make_mlp()
        nn.init.zeros_(model[4].weight)
        return model

    with pytest.raises(ConfigError, match=r"what initialises 4\.weight"):
        trained(changed_later, points(), parallel="fsdp")
    leave_world()


class OneRank(LossStrategy):
    """Only one process has something to learn."""

    def terms(self, output, batch, *, metrics):
        loss = F.cross_entropy(output, batch[1], reduction="sum")
        return {"loss": LossTerm(loss, float(len(output)), float(os.environ["RANK"] == "1"))}


def weight_on_one_rank() -> None:
    """The process without a weight says so; the other one loses it, and is not killed by mismatched collectives."""
    expected = RuntimeError if os.environ["RANK"] == "1" else TrainingError
    with pytest.raises(expected, match=r"Connection|no term with a weight"):
        trained(make_mlp, points(), parallel="ddp", loss=OneRank())


def make_even() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4))
