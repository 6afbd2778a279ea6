"""What a model's own loss is announced as: a mean only where two samples show it as sharply as rounding allows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude.losses import SupervisedTask
from etude.losses.own import ModelLoss

B, L, V = 4, 6, 11
HALVES = slice(0, 1), slice(1, B)
LENGTHS = torch.tensor([6, 3, 2, 4])


class Tagger(nn.Module):
    """Classes of tokens and of whole samples; `extra` is added to the mean over the labels of tokens."""

    def __init__(self, extra):
        super().__init__()
        self.embed, self.tokens, self.whole = nn.Embedding(V, 8), nn.Linear(8, V), nn.Linear(8, 2)
        self.extra = extra

    def forward(self, ids, labels=None):
        hidden = self.embed(ids)
        logits = self.tokens(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + self.extra(self, hidden)}


def nothing(model, hidden):
    return 0.0


def of_samples(model, hidden):
    """A second mean, over samples, as in the pretraining of BERT."""
    return F.cross_entropy(model.whole(hidden.mean(1)).float(), torch.zeros(len(hidden), dtype=torch.long))


def of_batches(model, hidden):
    """A thousandth of the loss, as of a router."""
    return 1e-3 * hidden.mean((0, 1)).square().sum().float()


def at_random(model, hidden):
    return torch.rand(len(hidden)).mean()


def batch():
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, V, (B, L), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(L) >= LENGTHS[:, None], -100)}


def announced(extra, *, autocast=False):
    torch.manual_seed(0)
    loss = ModelLoss()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        SupervisedTask(loss)(Tagger(extra), batch(), metrics=False)
    return loss.announcement().partition("own, ")[2]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (nothing, "a mean over labels"),
        (of_samples, "not a mean over labels or samples, weighted by labels"),
        (of_batches, "not a mean over labels or samples, weighted by labels"),
        (at_random, "taken for a mean over labels"),
    ],
)
def test_only_a_mean_is_called_a_mean(extra, words, autocast):
    assert announced(extra, autocast=autocast) == words


class InBfloat16(Tagger):
    def forward(self, ids, labels=None):
        return {"loss": super().forward(ids, labels)["loss"].bfloat16()}


def test_a_loss_rounded_to_half_precision_is_about_a_mean():
    torch.manual_seed(0)
    loss = ModelLoss()
    SupervisedTask(loss)(InBfloat16(nothing), batch(), metrics=False)
    assert "about a mean over labels" in loss.announcement()


class OfMasked(Tagger):
    def forward(self, ids, masked, labels=None):
        return {"loss": F.cross_entropy(self.tokens(self.embed(ids))[masked], labels)}


def test_labels_of_masked_positions_only_are_counted_one_by_one():
    torch.manual_seed(0)
    model, loss = OfMasked(nothing), ModelLoss()
    ids, masked = batch()["ids"], torch.arange(L) < LENGTHS[:, None]
    parts = [{"ids": ids[part], "masked": masked[part], "labels": ids[part][masked[part]]} for part in HALVES]
    terms = [SupervisedTask(loss)(model, part, metrics=False)["loss"] for part in parts]
    assert "taken for a mean over labels" in loss.announcement()
    whole = model(ids, masked, ids[masked])["loss"]
    torch.testing.assert_close(sum(one.sum for one in terms) / sum(one.count for one in terms), whole)


def test_settings_of_precision_are_restored():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        announced(nothing)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
