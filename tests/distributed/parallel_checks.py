"""Checks of models that processes divide, run in several processes by `distributed_server.py`."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from etude import Callback, LeNet5, Trainer
from etude.core.model import whole
from etude.distributed import World, leave_world
from etude.distributed.sharding import Shards
from etude.distributed.shards import local_of, part_of


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


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=24, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    return LlamaForCausalLM(config)


def llama_data():
    from etude.data import TensorData

    return TensorData({"input_ids": tokens(), "labels": tokens()})


def llama_tensor() -> None:
    """A model of Hugging Face by its own tensor plan."""
    compare(make_llama, llama_data(), {"tensor": 2})


def llama_sharded() -> None:
    """A model of Hugging Face by FSDP2, with its blocks recomputed."""
    compare(make_llama, llama_data(), "fsdp", config={"activation_checkpointing": True})


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
