"""Checks of models that processes divide, run in several processes by `distributed_server.py`."""

import torch
from torch import nn

from etude import Callback, Trainer
from etude.core.model import whole
from etude.distributed import World, leave_world


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def on_log(self, record):
        self.found.append(record["loss"])


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
    alone, expected, one = trained(make, data, World(), **arguments)
    model, found, other = trained(make, data, parallel=parallel, **arguments)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: name + text)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    leave_world()


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
