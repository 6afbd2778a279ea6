"""Predictions: every sample once, in the order of the data, whatever the data and the model's output look like."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader as TorchDataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import etude
from etude import DataLoader, MultiTask, MultiTaskModel, TaskSpec, Trainer
from etude.core import ConfigError, DataError, TrainingError
from etude.data import LoaderData, StreamLoader, TensorData
from etude.data.catalog.texts import TextRows
from etude.multitask.heads import LinearHead

X = torch.linspace(-1, 1, 23 * 4).view(23, 4)
Y = torch.arange(23) % 3


class Net(nn.Module):
    """Layers that behave differently in training, and an output of a chosen form."""

    def __init__(self, form=lambda logits: logits):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.form = form

    def forward(self, x):
        return self.form(self.layers(x))


def expected(model):
    """The outputs by plain torch, in one batch."""
    logits = nn.functional.linear
    layers = model.layers
    hidden = logits(X.double(), layers[0].weight.double(), layers[0].bias.double())
    norm = layers[1]
    hidden = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    return logits(hidden, layers[3].weight.double(), layers[3].bias.double())


def make(model, **config):
    return Trainer(model, config={"batch_size": 5, **config}, progress=False, device="cpu")


class Samples(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"x": X[index], "labels": Y[index]}


class Endless(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


DATA = {
    "tensor": lambda: X,
    "array": lambda: X.double().numpy(),
    "pair": lambda: (X, Y),
    "part": lambda: TensorData(X, Y),
    "dataset": lambda: Samples(),
    "shuffled loader": lambda: DataLoader(X, Y, batch_size=4, shuffle=True, drop_last=True),
    "loader without labels": lambda: DataLoader(X, batch_size=4),
    "shuffled torch loader": lambda: TorchDataLoader(TensorDataset(X, Y), 4, shuffle=True, drop_last=True),
    "torch loader of mappings": lambda: TorchDataLoader(Samples(), 7, shuffle=True),
    "torch loader without labels": lambda: TorchDataLoader(TensorDataset(X), 4),
    "iterable dataset": lambda: TorchDataLoader(Endless(), 4),
    "list of batches": lambda: [(X[:9], Y[:9]), (X[9:], Y[9:])],
    "generator": lambda: (part for part in X.split(6)),
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_every_sample_once_in_order(data):
    model = Net()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = make(model).predict(data())
    assert found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(found.double(), expected(model), rtol=1e-4, atol=1e-5)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@settings(deadline=None, max_examples=25)
@given(size=st.integers(1, 40), batch_size=st.integers(1, 17))
def test_any_size_and_batch_size(size, batch_size):
    inputs = torch.arange(float(size))[:, None]
    found = etude.predict(nn.Identity(), DataLoader(inputs, batch_size=batch_size))
    assert torch.equal(found, inputs)
    assert torch.equal(etude.predict(nn.Identity(), inputs, batch_size=batch_size), inputs)


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (lambda out: (out, out[:, 0]), ((23, 3), (23,))),
        (lambda out: {"a": out, "b": {"c": out[:, :1]}}, {"a": (23, 3), "b": {"c": (23, 1)}}),
        (lambda out: (out, out.sum()), ((23, 3),)),
        (lambda out: [out, None, "words"], ((23, 3),)),
    ],
)
def test_structure_of_the_output(form, shape):
    def shapes(value):
        if isinstance(value, dict):
            return {key: shapes(one) for key, one in value.items()}
        return tuple(map(shapes, value)) if isinstance(value, tuple) else tuple(value.shape)

    assert shapes(make(Net(form)).predict(X)) == shape


def test_logits_of_a_hugging_face_output():
    outputs = pytest.importorskip("transformers").modeling_outputs
    model = Net(lambda out: outputs.SequenceClassifierOutput(loss=out.sum(), logits=out, hidden_states=(out,)))
    assert torch.equal(make(model).predict(X), make(Net()).predict(X))


@pytest.mark.parametrize("form", [lambda out: out.sum(), lambda out: out[:2], lambda out: {"a": out, "b": out.T}])
def test_outputs_without_a_row_per_sample_are_refused(form):
    with pytest.raises(TrainingError, match=r"5 samples"):
        make(Net(form)).predict(X)


@pytest.mark.parametrize("form", [lambda _: "words", lambda _: {}, lambda _: ()])
def test_outputs_without_tensors_are_refused(form):
    with pytest.raises(TrainingError, match=type(form(0)).__name__):
        make(Net(form)).predict(X)


def test_padded_sequences_give_a_list():
    batches = [torch.ones(3, 4, 2), torch.ones(2, 6, 2)]
    found = etude.predict(nn.Linear(2, 1), batches)
    assert [tuple(one.shape) for one in found] == [(4, 1)] * 3 + [(6, 1)] * 2


def test_samples_in_buckets_come_in_order():
    lengths = np.array([5, 1, 4, 2, 3, 1, 6])
    rows = TextRows(np.arange(22, dtype=np.int32), np.cumsum(lengths), np.zeros(7, np.int64), np.arange(7))

    class First(nn.Module):
        def forward(self, input_ids, attention_mask):
            return input_ids[:, :1]

    part = LoaderData(rows, {"bucket_batches": 4})
    found = etude.predict(First(), part, batch_size=2)
    assert found[:, 0].tolist() == (np.cumsum(lengths) - lengths).tolist()
    loader = DataLoader(rows, batch_size=2, bucket_batches=4, shuffle=True)
    assert torch.equal(found, etude.predict(First(), loader))


def test_precision_of_the_run():
    model = Net()
    found = make(model, precision="bf16").predict(X)
    assert found.dtype == torch.float32
    assert not torch.equal(found, make(model).predict(X))
    torch.testing.assert_close(found.double(), expected(model), rtol=0.05, atol=0.05)


def test_random_numbers_of_the_caller_are_untouched():
    trainer = make(Net())
    torch.manual_seed(7)
    before = torch.rand(1)
    torch.manual_seed(7)
    trainer.predict(X)
    assert torch.equal(torch.rand(1), before)


def test_modes_are_restored_after_ctrl_c():
    def stop(_):
        raise KeyboardInterrupt

    model = Net(stop)
    model.train()
    model.layers[1].eval()
    with pytest.raises(KeyboardInterrupt):
        make(model).predict(X)
    assert model.training
    assert not model.layers[1].training


@pytest.mark.parametrize(
    "loader",
    [
        lambda: TorchDataLoader(Samples(), 4, sampler=SubsetRandomSampler([1, 2])),
        lambda: TorchDataLoader(Samples(), 4, sampler=WeightedRandomSampler([1.0] * 23, 5)),
        lambda: TorchDataLoader(Samples(), batch_sampler=[[3, 1], [2]]),
    ],
)
def test_loaders_of_unknown_order_are_refused(loader):
    with pytest.raises(ConfigError, match=r"SubsetRandomSampler|WeightedRandomSampler|list"):
        make(Net()).predict(loader())


def test_streams_and_empty_data_are_refused():
    with pytest.raises(DataError, match="streams"):
        make(Net()).predict(StreamLoader({"a": X, "b": X}, 2))
    with pytest.raises(DataError, match="empty"):
        make(Net()).predict([])


def test_tasks_by_name_with_and_without_labels():
    class Trunk(nn.Module):
        def forward(self, x):
            return x

    heads = {name: LinearHead(size, in_features=4) for name, size in (("one", 2), ("two", 3))}
    model = MultiTaskModel(Trunk(), heads)
    task = MultiTask(
        {name: TaskSpec(head=name, loss=nn.CrossEntropyLoss(), labels=f"label_{name}") for name in heads}
    )
    found = etude.predict(model, DataLoader({"x": X}, batch_size=5), task=task)
    assert {name: tuple(one.shape) for name, one in found.items()} == {"one": (23, 2), "two": (23, 3)}
    labelled = DataLoader({"x": X, "label_one": Y % 2, "label_two": Y}, batch_size=5)
    again = Trainer(model, task=task, progress=False, device="cpu").predict(labelled)
    assert all(torch.equal(found[name], again[name]) for name in heads)


def test_an_unknown_precision_is_reported():
    with pytest.raises(ConfigError, match="fp8"):
        etude.predict(nn.Linear(4, 3), torch.zeros(2, 4), precision="fp8")


class PerToken(nn.Module):
    """Outputs for tokens, with and without the last one, and for samples."""

    def forward(self, input_ids, attention_mask):
        tokens = input_ids[:, :, None].float()
        return {"tokens": tokens, "whole": (input_ids * attention_mask).sum(1, keepdim=True)}


def padded(lengths, *, left=False):
    ids = nn.utils.rnn.pad_sequence(
        [torch.arange(1, 1 + n) for n in lengths], batch_first=True, padding_side="left" if left else "right"
    )
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize("left", [False, True])
def test_predictions_of_tokens_have_no_padding_and_do_not_depend_on_batches(left):
    lengths = [2, 5, 3, 1]
    for batches in ([lengths], [lengths[:3], lengths[3:]]):
        found = etude.predict(PerToken(), [padded(one, left=left) for one in batches])
        assert [row.flatten().tolist() for row in found["tokens"]] == [list(range(1, 1 + n)) for n in lengths]
        assert found["whole"].flatten().tolist() == [n * (n + 1) // 2 for n in lengths]


def test_documents_of_one_length_are_one_tensor_whatever_their_batches_are_padded_to():
    batch = padded([3, 3])
    longer = {name: nn.functional.pad(value, (0, 2)) for name, value in batch.items()}
    found = etude.predict(PerToken(), [batch, longer])["tokens"]
    assert found.shape == (4, 3, 1)


class NextTokens(nn.Module):
    def forward(self, tokens, attn_mask=None):
        return tokens[:, :, None].float()


def test_predictions_of_next_token_batches_have_a_row_for_each_target():
    batch = padded([2, 5, 3])
    given = {"tokens": batch["input_ids"], "attn_mask": batch["attention_mask"]}
    assert [row.flatten().tolist() for row in etude.predict(NextTokens(), [given])] == [[1], [1, 2, 3, 4], [1, 2]]
