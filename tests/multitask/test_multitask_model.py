"""A multi-task model runs its trunk once and only the heads asked for, whatever the trunk is."""

import copy

import pytest
import torch
import torch.distributed as dist
from model_batches import VOCAB, WIDTH, batch, counted, ids
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from etude.core.batch import DataBatch, JointBatch, inputs_of, map_tensors, num_samples, tensors_in, to_device
from etude.core.blocks import repeated_blocks
from etude.core.errors import ConfigError, TrainingError
from etude.core.model import HeadOutput, ModelCall
from etude.losses import LanguageModelingLoss
from etude.models import MLP, CausalTransformerLM, LeNet5, feature_dim
from etude.models.features import Trunk
from etude.multitask import (
    BinaryHead,
    LanguageModelHead,
    LinearHead,
    MultiTaskModel,
    SequenceClassifier,
    TokenClassifier,
)
from etude.multitask.weighting import UncertaintyWeighting


def transformer(**arguments):
    return CausalTransformerLM(
        **{
            "vocab_size": VOCAB,
            "d_model": WIDTH,
            "n_layers": 2,
            "n_heads": 2,
            "dropout": 0.0,
            "max_len": 16,
            **arguments,
        }
    )


def make(weighting=None, **arguments):
    torch.manual_seed(0)
    heads = {
        "code": LanguageModelHead(),
        "tags": TokenClassifier(5, in_features=WIDTH),
        "tags:simple": TokenClassifier(3, in_features=WIDTH),
        "quality": SequenceClassifier(4, hidden=8, in_features=WIDTH),
        "belongs": BinaryHead(pooling="last", in_features=WIDTH),
    }
    model = MultiTaskModel(transformer(**arguments), heads)
    model.weighting = weighting
    return model


def test_each_head_is_given_the_features_of_the_trunk():
    model, inputs = make(), batch()
    outputs = model(inputs, ["quality", "code", "belongs"])
    assert list(outputs) == ["quality", "code", "belongs"]
    hidden = model.trunk.features(inputs["input_ids"], attn_mask=inputs["attention_mask"])
    real = inputs["attention_mask"][..., None]
    means = (hidden * real).sum(1) / real.sum(1)
    torch.testing.assert_close(outputs["quality"], model.heads["quality"].classify(means))
    last = hidden[torch.arange(3), torch.tensor([6, 3, 6])]
    torch.testing.assert_close(outputs["belongs"], model.heads["belongs"].classify(last))
    logits = model.trunk(inputs["input_ids"], attn_mask=inputs["attention_mask"])
    torch.testing.assert_close(outputs["code"].logits, logits)


def test_the_trunk_runs_once_and_heads_that_are_not_asked_for_never():
    model = make()
    trunk, heads = counted(model.trunk.blocks[0]), {name: counted(head) for name, head in model.heads.items()}
    model(batch(), ["tags:simple", "code"])
    assert len(trunk) == 1
    assert {name: len(calls) for name, calls in heads.items()} == {
        "code": 1, "tags": 0, "tags:simple": 1, "quality": 0, "belongs": 0,
    }  # fmt: skip


def test_heads_without_a_part_in_the_loss_have_no_gradients():
    model = make()
    model(batch(), ["tags"])["tags"].sum().backward()
    used = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name for name in used if name.startswith("heads.")} == {
        "heads.tags.classify.0.weight", "heads.tags.classify.0.bias",
    }  # fmt: skip
    assert {name for name, _ in model.named_parameters() if name.startswith("trunk.")} <= used


def test_the_loss_of_the_language_model_is_that_of_the_trunk_alone():
    model, inputs, loss = make(), {**batch(), "labels": ids()}, LanguageModelingLoss(shift=True)
    output = model(inputs, ["code"])["code"]
    assert isinstance(output, HeadOutput)
    alone = ModelCall(model.trunk)(model.trunk, inputs)
    for name, term in loss.terms(alone, inputs, metrics=True).items():
        found = loss.terms(output, inputs, metrics=True)[name]
        assert found.sum.item() == pytest.approx(term.sum.item(), rel=1e-5)


def test_batches_of_any_form_reach_the_trunk():
    model, tokens = make().eval(), ids()
    expected = model({"input_ids": tokens}, ["quality"])["quality"]
    for form in (tokens, (tokens,), (tokens, torch.zeros(3)), DataBatch(tokens, torch.zeros(3)), {"input": tokens}):
        assert model(form, ["quality"])["quality"].equal(expected)
    longer = torch.cat([tokens, torch.zeros(3, 1, dtype=torch.int64)], 1)
    assert model({"tokens": longer, "quality": 0}, ["quality"])["quality"].equal(expected)  # a next-token batch
    free = model({"input_ids": tokens, "causal": False}, ["code"])["code"].logits
    torch.testing.assert_close(free, model.trunk(tokens, causal=False))


def test_padding_is_not_pooled_in_a_next_token_batch():
    model, tokens = make().eval(), ids(2, 8)
    mask = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
    found = model({"tokens": tokens, "attn_mask": mask}, ["quality", "belongs"])
    alone = model({"input_ids": tokens[:1, :5]}, ["quality", "belongs"])
    for name in alone:
        torch.testing.assert_close(found[name][:1], alone[name])


@pytest.mark.parametrize(
    ("trunk", "inputs", "layer"),
    [
        (LeNet5(), torch.rand(3, 1, 28, 28), "fc3"),
        (MLP(in_features=12, hidden=[9, 7], out_features=4, dropout=0.1), torch.rand(3, 12), "layers.6"),
        (transformer(), ids(), "head"),
    ],
    ids=["lenet5", "mlp", "transformer"],
)
def test_features_are_what_the_models_output_layer_is_given(trunk, inputs, layer):
    trunk.eval()
    given_to_the_layer = []
    trunk.get_submodule(layer).register_forward_pre_hook(lambda _, args: given_to_the_layer.append(args[0]))
    logits = trunk(inputs)
    assert isinstance(trunk, Trunk)
    assert trunk.features(inputs).equal(given_to_the_layer[0])
    assert trunk.get_output_embeddings()(trunk.features(inputs)).equal(logits)
    assert given_to_the_layer[0].shape[-1] == trunk.feature_dim == feature_dim(trunk)


def test_two_heads_on_images():
    heads = {"digit": SequenceClassifier(10, in_features=84), "slant": LinearHead(1, in_features=84)}
    model, images = MultiTaskModel(LeNet5(), heads), torch.rand(4, 1, 28, 28)
    outputs = model({"input": images, "labels": torch.zeros(4), "stream": "mnist"}, ["digit", "slant"])
    features = model.trunk.features(images)
    assert outputs["digit"].equal(heads["digit"].classify(features))
    assert outputs["slant"].equal(heads["slant"].layer(features))
    assert model.last_shared_layer((images, torch.zeros(4))) == "trunk.fc2"
    assert ids_of(model.layer_parameters("fc2")) == ids_of(model.trunk.fc2.parameters())


def test_of_any_other_module_the_output_is_the_features():
    trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
    model, inputs = MultiTaskModel(trunk, {"y": LinearHead(2, in_features=8)}), torch.rand(3, 5)
    assert model((inputs, torch.zeros(3)), ["y"])["y"].equal(model.heads["y"].layer(trunk(inputs)))
    assert model.last_shared_layer((inputs, torch.zeros(3))) == "trunk.0"


class Defined(nn.Module):
    """Layers in an order of definition that is not that of the forward pass, and one that has no part in the result."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.used = order
        self.fc = nn.Linear(6, 6)
        self.convs = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.ReLU(), nn.Conv1d(1, 1, 3, padding=1))
        self.matrix = nn.Parameter(torch.eye(6))
        self.norm = nn.LayerNorm(6)
        self.pooler = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input
        for name in self.used:
            if name == "c":
                x = self.convs(x[:, None])[:, 0]
            else:
                x = (
                    self.fc(x)
                    if name == "f"
                    else nn.functional.linear(x, self.fc.weight)
                    if name == "F"
                    else x @ self.matrix
                )
        x = self.norm(self.drop(x))
        self.pooler(x)
        return x


def ids_of(parameters):
    return {id(parameter) for parameter in parameters}


@pytest.mark.parametrize(
    ("order", "layer"),
    [("cf", "fc"), ("fc", "convs.2"), ("mcf", "fc"), ("cF", "fc"), ("cfm", ""), ("fcf", "fc"), ("fm", "")],
)
def test_the_last_shared_layer_is_that_of_the_forward_pass(order, layer):
    trunk = Defined(order)
    model, batch = MultiTaskModel(trunk, {"y": LinearHead(1, in_features=6)}), {"input": torch.rand(4, 6)}
    random, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    name = model.last_shared_layer(batch)
    assert name == f"trunk.{layer}".removesuffix(".")
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert ids_of(model.layer_parameters(name)) == ids_of(trunk.get_submodule(layer).parameters())


def test_a_look_for_the_last_layer_leaves_running_statistics_alone():
    trunk = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    before = {name: value.clone() for name, value in trunk.state_dict().items()}
    assert MultiTaskModel(trunk, {}).last_shared_layer({"input": torch.rand(4, 6)}) == "trunk.0"
    assert all(torch.equal(before[name], value) for name, value in trunk.state_dict().items())


@pytest.mark.parametrize("name", ["fcc", "trunk.fcc", "heads.y", "weighting", "convs.3", ""])
def test_a_layer_that_is_not_there_is_one_line(name):
    model = MultiTaskModel(Defined("cf"), {"y": LinearHead(1, in_features=6)})
    with pytest.raises(ConfigError, match=f"'{name}'") as caught:
        model.layer_parameters(name)
    assert "\n" not in str(caught.value)
    if "fcc" in name:
        assert f"did you mean '{name[:-1]}'" in str(caught.value)
    model.trunk.fc.requires_grad_(False)
    with pytest.raises(ConfigError, match="'fc'"):
        model.layer_parameters("fc")


def test_the_last_shared_layer_is_the_last_trainable_block():
    model = make()
    assert model.last_shared_layer({"input_ids": ids()}) == "trunk.blocks.1"
    model.trunk.blocks[1].requires_grad_(False)
    assert model.last_shared_layer({"input_ids": ids()}) == "trunk.blocks.0"
    assert len(model.shared_parameters()) == sum(p.requires_grad for p in model.trunk.parameters())
    mlp = MultiTaskModel(MLP(4, [6], 3), {"y": LinearHead(1, in_features=6)})
    assert mlp.last_shared_layer((torch.rand(2, 4), torch.zeros(2))) == "trunk.layers.1"


@pytest.mark.parametrize(("tied", "heads", "shared"), [(True, 1, True), (False, 1, False), (False, 2, True)])
def test_the_output_layer_of_the_trunk_is_shared_if_it_is_the_embedding_or_several_heads_use_it(tied, heads, shared):
    trunk = CausalTransformerLM(11, d_model=8, n_layers=1, n_heads=2, dropout=0.0, max_len=8, tie_embeddings=tied)
    named = {f"words{number}": LanguageModelHead() for number in range(heads)}
    model = MultiTaskModel(trunk, {**named, "own": LanguageModelHead(11, tied=False, in_features=8)})
    found = {id(parameter) for parameter in model.shared_parameters()}
    assert (id(trunk.head.weight) in found) == shared
    assert found | {id(trunk.head.weight)} == {id(parameter) for parameter in trunk.parameters()}


def test_state_and_names():
    model, other = make(UncertaintyWeighting(["code", "tags"])), make(UncertaintyWeighting(["code", "tags"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    state = model.state_dict()
    assert {name.split(".")[0] for name in state} == {"trunk", "heads", "weighting"}
    assert any(name.startswith("heads.tags:simple.") for name in state)
    other.load_state_dict(state)
    assert other(batch(), ["quality"])["quality"].equal(model(batch(), ["quality"])["quality"])
    assert copy.deepcopy(model)(batch(), ["tags"])["tags"].equal(model(batch(), ["tags"])["tags"])
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert model.get_output_embeddings() is model.trunk.head


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*:DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_it_compiles_in_one_graph(dropout):
    model = make(UncertaintyWeighting(["code", "tags"]), dropout=dropout)
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    for names in (["code", "quality"], ["tags"]):
        torch.manual_seed(5)
        expected = model(batch(), names)
        torch.manual_seed(5)
        found = compiled(batch(), names)
        assert list(found) == names
        for name in names:
            one, other = (o.logits if isinstance(o, HeadOutput) else o for o in (found[name], expected[name]))
            torch.testing.assert_close(one, other)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("names", [["code", "quality"], ["code"], ["tags"]])
def test_data_parallelism_sees_which_parameters_the_loss_will_use(names):
    """A parameter that torch takes for unused is marked ready twice, which it refuses."""
    weighting = UncertaintyWeighting(["code", "quality", "tags"])
    model, plain = make(weighting, tie_embeddings=False), make(copy.deepcopy(weighting), tie_embeddings=False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)

    def loss(outputs, weights):
        parts = [o.logits if isinstance(o, HeadOutput) else o for o in outputs.values()]
        losses = torch.stack([*(part.square().sum() for part in parts), *[torch.tensor(1.0)] * (3 - len(parts))])
        return weights(losses)

    for _ in range(2):
        loss(wrapped(batch(), names), weighting).backward()
        loss(plain(batch(), names), plain.weighting).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad)
    assert all(p.grad is not None for p in weighting.parameters())


def test_linking_the_weighting_needs_gradients_and_changes_no_values():
    model, with_weights = make(), make(UncertaintyWeighting(["code"]))
    assert model(batch(), ["tags"])["tags"].equal(with_weights(batch(), ["tags"])["tags"])
    with torch.no_grad():
        assert with_weights(batch(), ["tags"])["tags"].grad_fn is None


def test_a_joint_batch_gives_one_answer_for_each_part():
    model = make().eval()
    one, other = batch(), batch()
    other["input_ids"] = other["input_ids"].roll(1, 0)
    answers = model(JointBatch([one, other]), [["tags"], ["tags", "quality"]])
    assert [sorted(answer) for answer in answers] == [["tags"], ["quality", "tags"]]
    for part, answer in zip((one, other), answers, strict=True):
        torch.testing.assert_close(answer["tags"], model(part, ["tags"])["tags"])


def test_errors_are_one_line():
    model = make()
    with pytest.raises(TrainingError, match=r"no head 'qualty'; did you mean 'quality'\? \(there are: code, tags"):
        model(batch(), ["qualty"])
    for name in ("a.b", "", "type"):
        with pytest.raises(ConfigError, match=f"a head cannot be named '{name}'"):
            MultiTaskModel(transformer(), {name: LanguageModelHead()})
    recurrent = MultiTaskModel(nn.LSTM(5, 4), {"y": LinearHead(1, in_features=4)})
    with pytest.raises(TrainingError, match=r"heads need features .* LSTM returned tuple; add a method `features`"):
        recurrent(torch.rand(2, 3, 5), ["y"])
    with pytest.raises(ConfigError, match=r"a trunk without an output layer .* set vocab_size"):
        MultiTaskModel(nn.Linear(3, 4), {"words": LanguageModelHead()})


def test_blocks_for_recomputation_are_found():
    assert repeated_blocks(make()) == ["trunk.blocks.0", "trunk.blocks.1"]


def test_numbers_of_a_batch_look_past_names_and_switches():
    one = {"stream": "code", "causal": False, "input_ids": ids(), "labels": ids()}
    assert num_samples(one) == 3
    assert next(tensors_in(one)) is one["input_ids"]
    assert inputs_of(one) is one["input_ids"]
    assert map_tensors(one, lambda t: t + 1)["causal"] is False
    moved = to_device(one, torch.device("cpu"))
    assert moved["stream"] == "code"
    assert list(moved) == list(one)


class Takes(nn.Module):
    """Returns the names it was called with."""

    def forward(self, input_ids, **more):
        return sorted(more)


class TakesCausal(nn.Module):
    def forward(self, x, *, causal=None):
        return x, causal


def test_names_and_switches_go_to_models_that_name_them_only():
    tokens = ids()
    extras = {"stream": "code", "causal": False}
    assert ModelCall(Takes())(Takes(), {"input_ids": tokens, "types": tokens, **extras}) == ["types"]
    model = TakesCausal()
    for key in ("input_ids", "input", "pixels"):
        assert ModelCall(model)(model, {key: tokens, **extras, "labels": tokens}) == (tokens, False)
        assert ModelCall(model)(model, {key: tokens, "labels": tokens}) == (tokens, None)
    linear = nn.Linear(2, 2)
    assert ModelCall(linear)(linear, {"input": torch.ones(3, 2), "labels": tokens, **extras}).shape == (3, 2)
