"""Checks of models that processes divide, run in several processes by `distributed_server.py`."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from etude import Callback, LeNet5, Trainer, TrainingLoop, predict
from etude.checkpoint import read_checkpoint
from etude.core import ConfigError, LossTerm, Task, TrainingError
from etude.core.model import whole
from etude.distributed import World, join_world, leave_world
from etude.distributed.lockstep import Spare
from etude.distributed.sharding import Shards
from etude.distributed.shards import local_of, part_of
from etude.engine.objective import Objective
from etude.export import save_weights


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def on_log(self, record):
        self.found += [record[name] for name in ("loss", "size", "classes") if name in record]


def trained(make, data, world=None, parallel=None, **arguments):
    """Return the model and its losses after some steps."""
    torch.manual_seed(0)
    model, losses = make(), Losses()
    config = {"epochs": 3, "batch_size": 6, "log_interval": 1, "device": "cpu", "learning_rate": 1e-3}
    trainer = Trainer(
        model,
        data,
        data,
        config={**config, **arguments.pop("config", {})},
        callbacks=[losses],
        progress=False,
        world=world,
        parallel=parallel,
        **arguments,
    )
    trainer.train()
    predicted = trainer.predict(data)
    return model, losses.found, predicted


def compare(make, data, parallel, **arguments) -> None:
    """Training, weights and predictions do not depend on how processes divide the model."""
    compare_one(make, data, parallel, **arguments)
    leave_world()


def compare_one(make, data, parallel, **arguments) -> None:
    """Compare one of several trainings of these processes."""
    alone, expected, one = trained(make, data, World(), **arguments)
    model, found, other = trained(make, data, parallel=parallel, **arguments)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6, equal_nan=True)
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        # On CUDA each rank compares its own part: offloaded shards are in host memory.
        pair = (local_of(mine).cpu(), part_of(theirs, mine).cpu()) if theirs.is_cuda else (whole(mine), theirs)
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def tokens(rows: int = 25, vocabulary: int = 24) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, 8), generator=torch.Generator().manual_seed(1))


def make_llama(groups: int = 2, layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=24, num_key_value_heads=groups, max_position_embeddings=16, **sizes)
    return LlamaForCausalLM(config)


def llama_data():
    from etude.data import TensorData

    return TensorData({"input_ids": tokens(), "labels": tokens()})


def llama_tensor() -> None:
    """A model of Hugging Face by its own tensor plan, if its heads can be divided."""
    with pytest.raises(ConfigError, match="does not divide num_key_value_heads 1"):
        trained(lambda: make_llama(1), llama_data(), parallel={"tensor": 2})
    compare(make_llama, llama_data(), {"tensor": 2})


def llama_sharded() -> None:
    """A model of Hugging Face by FSDP2, with its blocks recomputed."""
    compare(make_llama, llama_data(), "fsdp", config={"activation_checkpointing": True})


def llama_compiled() -> None:
    """The layers of a model of Hugging Face, whose cache has a place for each, are compiled as the same code."""
    from torch._dynamo.utils import counters

    def make():
        return make_llama(layers=9)

    _, expected, _ = trained(make, llama_data(), World(), config={"epochs": 1})
    assert not counters["stats"]
    _, found, _ = trained(make, llama_data(), parallel="fsdp", config={"epochs": 1, "compile": "model"})
    assert 0 < counters["stats"]["unique_graphs"] < 9, counters["stats"]
    assert found == pytest.approx(expected, rel=1e-5)
    leave_world()


def compiled_blocks() -> None:
    """The blocks of a divided model are compiled, all as the same code."""
    from torch._dynamo.utils import counters

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return x + self.linear(x).tanh()

    class Stem(nn.Module):
        """Equal blocks behind layers that a plan can divide."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(5))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.down(self.up(x))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    x, labels = points()
    data = x[:24], labels[:24]
    alone, expected, _ = trained(Stem, data, World())
    assert not counters["stats"]
    plan = {"up": "colwise", "down": "rowwise", "blocks.*": "replicated"}
    for parallel in ("fsdp", {"tensor": 2, "tensor_plan": plan}):
        counters.clear()
        model, found, _ = trained(Stem, data, parallel=parallel, config={"compile": "step"})
        assert 0 < counters["stats"]["unique_graphs"] < 5, counters["stats"]
        assert found == pytest.approx(expected, rel=1e-5)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), theirs, rtol=1e-5, atol=1e-5)
    leave_world()


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def points():
    x = torch.randn(25, 8, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def lenet() -> None:
    """A model whose first weight fits two memory formats."""
    images = torch.randn(25, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    compare(LeNet5, (images, (images.mean((1, 2, 3)) > 0).long()), "ddp")


def mlp_plan() -> None:
    """Any model by a plan of the user, whose last layer stays whole."""
    plan = {"0": "colwise", "2": "rowwise", "4": "replicated"}
    compare(make_mlp, points(), {"tensor": 2, "tensor_plan": plan})


def mlp_optimizer() -> None:
    """An optimizer that was made before the model was divided gets its shards."""

    def make():
        model = make_mlp()
        made.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        return model

    made: list[torch.optim.Optimizer] = []
    torch.manual_seed(0)
    alone = make()
    torch.manual_seed(0)
    divided = make()
    config = {"epochs": 2, "batch_size": 6, "device": "cpu"}
    Trainer(alone, points(), config=config, optimizer=made[0], progress=False, world=World()).train()
    Trainer(divided, points(), config=config, optimizer=made[1], progress=False, parallel="fsdp").train()
    for mine, theirs in zip(divided.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-5, atol=1e-6)
    early = make_mlp()  # this optimizer makes its state at once
    optimizer = torch.optim.Adagrad(early.parameters())
    with pytest.raises(ConfigError, match="Adagrad has state of undivided"):
        Trainer(early, points(), config=config, optimizer=optimizer, progress=False, parallel="fsdp")
    leave_world()


def mlp_double() -> None:
    """With float64 weights and clipping, every part of a step is in float64: nothing is rounded to float32."""

    def make():
        return make_mlp().double()

    x, labels = points()
    data = x.double(), labels
    config = {"gradient_clip_norm": 0.5, "learning_rate": 0.05, "epochs": 4}
    alone, expected, _ = trained(make, data, World(), config=config)
    for parallel in ("ddp", "fsdp", {"tensor": 2, "tensor_plan": {"0": "colwise", "2": "rowwise"}}):
        model, found, _ = trained(make, data, parallel=parallel, config=config)
        assert max(abs(mine / one - 1) for mine, one in zip(found, expected, strict=True)) < 1e-12
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), theirs, rtol=1e-12, atol=1e-13)
    leave_world()


def mlp_kernels() -> None:
    """The optimizer of a divided model runs the kernel of a whole one: on a GPU others take several times as long."""
    config = {"epochs": 1, "device": "cpu"}
    for parallel in ("ddp", "fsdp", {"tensor": 2, "tensor_plan": {"0": "colwise", "2": "rowwise"}}):
        trainer = Trainer(make_mlp(), points(), config=config, progress=False, parallel=parallel)
        trainer.train()
        assert trainer.optimizer.param_groups[0]["fused"] is True, parallel
    model = trainer.model
    shards, param = Shards(model, World()), model[0].weight
    param.grad = DTensor.from_local(torch.randn(8, 6).t(), param.device_mesh, param.placements)
    shards.collect()
    local = shards.local(param)
    assert local.grad.stride() == local.stride()  # these kernels read memory in the order of the weights
    assert local.grad.equal(param.grad.to_local())
    leave_world()


def divided_already() -> None:
    """A model that several processes train already is refused: its gradients would be averaged twice, or wrongly."""
    join_world("cpu")
    config = {"epochs": 1, "batch_size": 6, "device": "cpu"}
    replicated, sharded, trained_before = nn.parallel.DistributedDataParallel(make_mlp()), make_mlp(), make_mlp()
    fully_shard(sharded)
    Trainer(trained_before, points(), config=config, progress=False, parallel="fsdp").train()
    for model in (replicated, sharded, trained_before):
        for parallel in ("ddp", "fsdp"):
            with pytest.raises(ConfigError, match="already"):
                Trainer(model, points(), config=config, progress=False, parallel=parallel)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="already"):
            TrainingLoop().train_epoch(model, points(), optimizer)
    with pytest.raises(ConfigError, match="of the Trainer"):
        predict(trained_before, points()[0])
    with pytest.raises(ConfigError, match=r"0\.weight is divided"):
        save_weights(trained_before, "weights.safetensors")
    leave_world()


class At(Callback):
    """Does something at the start of the second epoch."""

    def __init__(self, action) -> None:
        super().__init__()
        self.action = action

    def on_epoch_begin(self, epoch):
        if epoch == 1:
            self.action()


class Branch(nn.Module):
    """Uses a layer only for more than six samples."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.usual(x) + self.rare(x) if len(x) > 6 else self.usual(x)


def what_is_not_all_reduced() -> None:
    """Processes never update by gradients of their own: not in the last step either, which no other step follows."""

    def refused(words, model, action=lambda: None, **config) -> None:
        config = {"epochs": 2, "batch_size": 25, "sanity_val_batches": 0, "device": "cpu", **config}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, points(), config=config, optimizer=optimizer, callbacks=[At(action)], progress=False)
        with pytest.raises(TrainingError, match=words):
            trainer.train()
        mine = torch.cat([param.detach().flatten() for param in model.parameters()])
        first = mine.clone()
        trainer.machine.world.broadcast(first)
        assert first.equal(mine)

    model = make_mlp()
    refused("unused in the loss: 0.weight, 0.bias", model, lambda: model[0].requires_grad_(False))
    for unused in (False, True):
        frozen = make_mlp()
        frozen[0].requires_grad_(False)
        refused("was frozen", frozen, lambda one=frozen: one.requires_grad_(True), find_unused_parameters=unused)
    refused("last micro-batch", Branch(), batch_size=14, grad_accum_steps=2, epochs=1)
    leave_world()


class StopAfter(Callback):
    """Stops after some steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_step_end(self, report):
        self.left -= 1
        if self.left == 0:
            self.control.request_stop("enough")


def lent_batches_draw_nothing() -> None:
    """A run continues with the same bytes where a rank has no samples: the batch it is lent is another one then."""

    def trainer(folder, *callbacks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))
        config = {"epochs": 2, "batch_size": 6, "device": "cpu"}
        options = {"config": config, "callbacks": callbacks, "output_dir": folder, "progress": False}
        return Trainer(model, points(), parallel="fsdp", **options)

    world = join_world("cpu")
    with tempfile.TemporaryDirectory() as made:
        straight, stopped = (Path(world.share_text(made), name) for name in ("straight", "stopped"))
        trainer(straight).train()
        trainer(stopped, StopAfter(4)).train()  # the fifth batch has one sample
        resumed = trainer(stopped)
        resumed.load_checkpoint(stopped)
        resumed.train()
        expected, found = (read_checkpoint(one / "checkpoints" / "last").model_state for one in (straight, stopped))
        for name, weight in expected.items():
            assert found[name].equal(weight), name
        assert "FSDP" not in (straight / "config.yaml").read_text()  # the model is recorded as it was given
        world.barrier()
    leave_world()


def lent_batches_stay_on_their_device() -> None:
    """A lent batch is on the kind of device of the lender, also where CUDA is in use for something else."""
    world, batch = join_world("cpu"), {"x": torch.arange(6.0)}
    torch.cuda.is_initialized = lambda: True
    lent = Spare(world).instead_of(batch if world.rank == 1 else None)
    assert lent["x"].is_cpu
    assert lent["x"].equal(batch["x"])
    leave_world()


class Adversary(Task):
    """Runs a backward pass of its own, whose gradients are added to those of the loss."""

    def __call__(self, model, batch, *, metrics):
        x, labels = batch
        if torch.is_grad_enabled():
            (0.1 * nn.functional.cross_entropy(model(x * 0.9), labels, reduction="sum")).backward()
        return {"loss": LossTerm(nn.functional.cross_entropy(model(x), labels, reduction="sum"), float(len(labels)))}


class Twice(Task):
    """Runs a backward pass of its own through the outputs that the loss depends on."""

    def __call__(self, model, batch, *, metrics):
        x, labels = batch
        output = model(x)
        if torch.is_grad_enabled():
            (0.1 * output.square().sum()).backward(retain_graph=True)
        return {"loss": LossTerm(nn.functional.cross_entropy(output, labels, reduction="sum"), float(len(labels)))}


class Plain(Task):
    """Has an objective of its own."""

    kind: type[Objective]

    def __init__(self, kind) -> None:
        self.kind = kind

    def __call__(self, model, batch, *, metrics):
        x, labels = batch
        return {"loss": LossTerm(nn.functional.cross_entropy(model(x), labels, reduction="sum"), float(len(labels)))}

    def objective(self, parts):
        return self.kind(self, parts)


class OwnBackward(Objective):
    """Runs the backward passes itself, and knows the count."""

    def backward(self, terms):
        self.add(terms)["loss"].sum.backward()

    def finish(self):
        return 6.0 / self.parts.world.size


class OwnLoss(Objective):
    """Runs the backward passes itself, and leaves the count to its base class."""

    def run_backward(self, weighted):
        weighted["loss"].sum.backward()


def backward_passes_of_others() -> None:
    """Gradients of backward passes that the engine does not run are all-reduced too, and divided by the right count."""
    x, labels = points()  # one process has no samples of the last batch
    sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "config": {"learning_rate": None}}
    unused = {**sgd, "config": {"learning_rate": None, "find_unused_parameters": True}}
    for task in (Adversary(), Twice(), Plain(OwnLoss)):
        compare_one(make_mlp, (x, labels), "ddp", task=task, **sgd)
    compare_one(make_mlp, (x, labels), "ddp", task=Twice(), **unused)
    compare_one(make_mlp, (x[:24], labels[:24]), "ddp", task=Plain(OwnBackward))
    leave_world()


class Scaled(nn.Module):
    """Has a buffer, which processes share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_mlp()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.layers(x * self.scale)


class Views(Task):
    """Runs the model twice for every batch."""

    def __call__(self, model, batch, *, metrics):
        x, labels = batch
        output = model(x) + model(x * 0.5)
        return {"loss": LossTerm(nn.functional.cross_entropy(output, labels, reduction="sum"), float(len(labels)))}


def several_forward_passes() -> None:
    """A process without samples does not run the model as often as the others: buffers are shared once per step."""
    compare(Scaled, points(), "ddp", task=Views())
