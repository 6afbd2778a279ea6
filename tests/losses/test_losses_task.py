"""The supervised task: model, batch, strategy; the gradient of accumulated sums; nothing read from the device."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.core import DataBatch, Task
from etude.core.errors import DataError
from etude.losses import ClassificationLoss, LanguageModelingLoss, SupervisedTask


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, tokens, types=None, attn_mask=None):
        return self.head(torch.tanh(self.embedding(tokens).cumsum(1)))


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def test_it_is_a_task_that_counts_ahead():
    task = SupervisedTask()
    assert isinstance(task, Task)
    batch = (torch.zeros(5, 6), torch.zeros(5, dtype=torch.long))
    assert task.counts(batch) is None
    task(classifier(), batch, metrics=False)
    assert task.counts(batch) == {"loss": 5}


def test_the_terms_are_those_of_the_plain_loop():
    model = classifier()
    batch = DataBatch(torch.randn(9, 6), torch.randint(4, (9,)))
    terms = SupervisedTask(nn.CrossEntropyLoss())(model, batch, metrics=True)
    torch.testing.assert_close(
        terms["loss"].sum / terms["loss"].count, F.cross_entropy(model(batch.data), batch.labels)
    )
    assert int(terms["accuracy"].sum) == int((model(batch.data).argmax(1) == batch.labels).sum())


def test_accumulated_ragged_parts_give_the_gradient_of_the_whole():
    torch.manual_seed(1)
    model = TinyLM().double()
    tokens = torch.randint(13, (8, 10))
    mask = torch.arange(10) < torch.tensor([10, 3, 7, 1, 10, 2, 5, 9])[:, None]
    task = SupervisedTask(LanguageModelingLoss())

    def gradient(parts):
        model.zero_grad()
        count = 0
        for part in parts:
            term = task(model, {"tokens": tokens[part], "attn_mask": mask[part]}, metrics=False)["loss"]
            term.sum.backward()
            count += term.count
        return [parameter.grad / count for parameter in model.parameters()]

    whole = gradient([slice(None)])
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    exact = torch.autograd.grad((losses * mask[:, 1:].flatten()).sum() / mask[:, 1:].sum(), list(model.parameters()))
    parts = gradient([slice(0, 1), slice(1, 4), slice(4, 8)])
    for one, other, reference in zip(whole, parts, exact, strict=True):
        torch.testing.assert_close(one, reference)
        torch.testing.assert_close(other, reference)


def test_another_model_is_called_by_its_own_signature():
    class Named(nn.Module):
        def forward(self, image, scale):
            return image * scale

    task = SupervisedTask(nn.MSELoss())
    labels = torch.ones(2, 3)
    task(nn.Linear(3, 3), {"image": torch.ones(2, 3), "labels": labels}, metrics=False)
    batch = {"scale": torch.tensor(4.0), "image": torch.ones(2, 3), "labels": labels}
    assert float(task(Named(), batch, metrics=False)["loss"].sum) == 6 * 9


@pytest.mark.parametrize(
    "loss",
    [None, ClassificationLoss(), nn.CrossEntropyLoss(), ClassificationLoss(class_weights=[1.0, 2.0, 3.0, 4.0])],
)
def test_after_the_first_batch_nothing_is_read_from_the_device(loss, monkeypatch):
    model, task = classifier(), SupervisedTask(loss)
    batch = (torch.randn(5, 6), torch.randint(4, (5,)))
    task(model, batch, metrics=True)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(Tensor, name, lambda self, *_: pytest.fail("waits for the device"))
    terms = task(model, batch, metrics=True)
    sum(term.sum for term in terms.values()).backward()


def test_language_modelling_reads_nothing_from_the_device(monkeypatch):
    model, task = TinyLM(), SupervisedTask(LanguageModelingLoss())
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(Tensor, name, lambda self, *_: pytest.fail("waits for the device"))
    task(model, {"tokens": torch.ones(2, 5, dtype=torch.long), "attn_mask": torch.ones(2, 5)}, metrics=True)


def test_the_task_works_under_compile():
    model, task = classifier(), SupervisedTask(ClassificationLoss())
    compiled = torch.compile(model, backend="eager")
    batch = (torch.randn(5, 6), torch.randint(4, (5,)))
    torch.testing.assert_close(
        task(compiled, batch, metrics=False)["loss"].sum, task(model, batch, metrics=False)["loss"].sum
    )


@pytest.mark.parametrize("worst", [13, 400, -1])
@pytest.mark.parametrize("fused_head", [False, "head"])
def test_ids_that_the_model_does_not_know_are_explained(worst, fused_head):
    ids = torch.randint(13, (2, 5))
    ids[1, 2] = worst
    task = SupervisedTask(LanguageModelingLoss(fused_head=fused_head))
    with pytest.raises(DataError, match=rf"the id {worst}, .* embedding 'embedding' has 13 rows \(0 … 12\)"):
        task(TinyLM(), {"input_ids": ids}, metrics=False)


def test_other_index_errors_are_left_alone():
    class Broken(TinyLM):
        def forward(self, tokens):
            return [self.embedding(tokens)][1]

    with pytest.raises(IndexError, match="list index"):
        SupervisedTask(LanguageModelingLoss())(Broken(), torch.zeros(2, 5, dtype=torch.long), metrics=False)
