"""Recomputed activations: the same gradients bit for bit, less memory, the same names, and words where it cannot be."""

import copy
import io

import pytest
import torch
from torch import nn

from etude import DataLoader, Trainer
from etude.core import ConfigError
from etude.core.blocks import repeated_blocks
from etude.core.random import rng_state, set_rng_state
from etude.engine.recompute import recompute_activations
from etude.trainer import TrainerConfig


class Block(nn.Module):
    def __init__(self, width, dropout, norm=nn.LayerNorm):
        super().__init__()
        self.norm = norm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.dropout(self.down(self.dropout(torch.relu(self.up(self.norm(x))))))


class Net(nn.Module):
    def __init__(self, depth=4, width=16, dropout=0.2, norm=nn.LayerNorm):
        super().__init__()
        self.inward = nn.Sequential(nn.Linear(8, width), nn.ReLU())
        self.blocks = nn.ModuleList(Block(width, dropout, norm) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def net(**arguments):
    torch.manual_seed(0)
    return Net(**arguments)


def gradients(model, *, autocast=False):
    """Return output and gradients of one pass, and the random state after it."""
    torch.manual_seed(1)
    x = torch.randn(32, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    output.float().square().sum().backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    return {"output": output.detach(), **grads, "random": torch.rand(4)}


def saved_bytes(model, x):
    """Return the bytes of the tensors that the forward pass keeps for the backward pass, each storage once."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    return sum(size for pointer, size in kept.items() if pointer not in weights)


def assert_same(mine, theirs, **tolerance):
    """Two ways to compute the same: other kernels and another order of sums round differently."""
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "arguments", [{}, {"every": 2}, {"blocks": "blocks.[12]"}, {"blocks": "*.up"}], ids=["all", "2nd", "some", "up"]
)
def test_gradients_are_the_same(arguments, autocast):
    model = net()
    recompute_activations(model, **arguments)
    tolerance = {"rtol": 2**-7, "atol": 1e-2} if autocast else {}
    found, expected = gradients(model, autocast=autocast), gradients(net(), autocast=autocast)
    assert torch.equal(found.pop("random"), expected.pop("random"))
    assert_same(found, expected, **tolerance)


def test_dropout_is_drawn_again_and_matters():
    """Guards the test above: with other random numbers the gradients are others."""
    model = net()
    before = rng_state()
    first = gradients(model)
    set_rng_state(before)
    model.blocks[0].dropout.p = 0.3
    assert (first["blocks.0.up.weight"] - gradients(model)["blocks.0.up.weight"]).abs().max() > 0.1


def test_blocks_are_computed_twice_in_training_and_once_otherwise():
    model = net()
    calls = []
    model.blocks[1].up.register_forward_hook(lambda *_: calls.append(1))
    assert recompute_activations(model) == [f"blocks.{n}" for n in range(4)]
    gradients(model)
    assert len(calls) == 2
    with torch.no_grad():
        model(torch.randn(2, 8))
    model.eval()
    model(torch.randn(2, 8)).sum().backward()
    assert len(calls) == 4


def test_memory_is_that_of_the_inputs_of_the_blocks():
    x = torch.randn(64, 8)
    plain, half, whole = net(depth=12), net(depth=12), net(depth=12)
    recompute_activations(half, every=2)
    recompute_activations(whole)
    sizes = [saved_bytes(model, x) for model in (plain, half, whole)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[2] < sizes[0] / 5
    stream = 64 * 16 * 4  # bytes of what flows from block to block
    assert sizes[2] <= 16 * stream + 64 * 8 * 4


def test_names_copies_and_checkpoints_are_those_of_the_plain_model():
    model = net()
    recompute_activations(model)
    recompute_activations(model)  # once more changes nothing
    assert list(model.state_dict()) == list(net().state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert_same(gradients(twin), gradients(net()))
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda width: nn.BatchNorm1d(width, momentum=None)])
def test_running_statistics_count_a_batch_once(norm):
    plain, model = net(norm=norm), net(norm=norm)
    recompute_activations(model)
    for _ in range(3):
        assert_same(gradients(model), gradients(plain))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert model.blocks[0].norm.num_batches_tracked == 3


def test_blocks_are_found_in_the_outermost_lists():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert repeated_blocks(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)) == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    stages = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(Block(4, 0), Block(4, 0)), nn.Sequential(Block(4, 0)))
    assert repeated_blocks(stages) == ["1.0", "1.1"]
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []


def test_nothing_to_recompute_is_an_error_that_names_the_lists():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="no repeated blocks in Sequential, which has 0, 1"):
        recompute_activations(model)
    with pytest.raises(ConfigError, match=r"no module matches 'blcoks\.\*' in .* inward, blocks, head"):
        recompute_activations(net(), blocks="blcoks.*")
    with pytest.raises(ConfigError, match="no module matches 'blocks'"):  # a list, which is never called
        recompute_activations(net(), blocks="blocks")
    assert recompute_activations(net(), blocks="block*") == [f"blocks.{n}" for n in range(4)]


def test_hugging_face_models_use_their_own_way(recwarn):
    transformers = pytest.importorskip("transformers")

    def gpt2():
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=40, n_positions=16)
        return transformers.GPT2LMHeadModel(config).train()

    def passed(model):
        torch.manual_seed(1)
        ids = torch.randint(40, (4, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: param.grad for name, param in model.named_parameters()}

    plain, model = gpt2(), gpt2()
    assert recompute_activations(model) == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert model.is_gradient_checkpointing
    calls = []
    model.transformer.h[1].ln_1.register_forward_hook(lambda *_: calls.append(1))
    assert_same(passed(model), passed(plain))
    assert len(calls) == 2
    second = gpt2()
    assert recompute_activations(second, every=2) == ["transformer.h.0", "transformer.h.2"]
    plain.zero_grad()
    assert_same(passed(second), passed(plain))
    inside = nn.ModuleDict({"lm": gpt2()})  # a model of the user around it
    assert recompute_activations(inside) == ["lm.transformer.h.0", "lm.transformer.h.1", "lm.transformer.h.2"]
    plain.zero_grad()
    assert_same(passed(inside["lm"]), passed(plain))
    assert not [w for w in recwarn.list if "use_cache" in str(w.message) or "reentrant" in str(w.message)]


@pytest.mark.parametrize("setting", [True, "blocks.*", {"every": 3}, {"blocks": "blocks.*", "every": 2}])
def test_a_run_is_the_same_with_it_stopped_and_resumed_or_not(setting, tmp_path):
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(96, 8, generator=generator), torch.randint(3, (96,), generator=generator)

    def trainer(setting, epochs, folder=None):
        config = {"epochs": epochs, "activation_checkpointing": setting, "device": "cpu"}
        return Trainer(net(), DataLoader(x, y, 32), config=config, output_dir=folder, progress=False)

    plain, ours = trainer(False, 2), trainer(setting, 2)
    plain.train()
    ours.train()
    assert_same(ours.model.state_dict(), plain.model.state_dict())
    trainer(setting, 1, tmp_path).train()
    resumed = trainer(False, 2, tmp_path)  # a checkpoint does not know how it was computed
    resumed.load_checkpoint(tmp_path)
    resumed.train()
    assert_same(resumed.model.state_dict(), plain.model.state_dict())
    assert any("forward" in vars(block) for block in ours.model.blocks)


def test_config_forms():
    assert TrainerConfig().activation_checkpointing is False
    assert TrainerConfig(gradient_checkpointing=True).activation_checkpointing is True
    assert TrainerConfig(activation_checkpointing="layers.*").activation_checkpointing == "layers.*"
    assert TrainerConfig(activation_checkpointing={"every": 2}).activation_checkpointing.every == 2
    with pytest.raises(ConfigError, match=r"training\.activation_checkpointing"):
        Trainer(net(), config={"activation_checkpointing": {"evry": 2}})
    with pytest.raises(ConfigError, match=r"training\.activation_checkpointing"):
        Trainer(net(), config={"activation_checkpointing": {"every": 0}})


def test_out_of_memory_names_it_where_it_would_help():
    class Hungry(Net):
        def forward(self, x):
            raise torch.OutOfMemoryError("out of memory")

    batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
    for setting, named in ((False, True), (True, False)):
        config = {"activation_checkpointing": setting, "device": "cpu"}
        with pytest.raises(Exception, match="remedies") as raised:
            Trainer(Hungry(), batch, config=config, progress=False).train()
        assert ("training.activation_checkpointing=true" in str(raised.value)) is named
