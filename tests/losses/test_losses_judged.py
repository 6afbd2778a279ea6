"""What metrics compare is what the loss compares: the same labels, shifted, masked and ignored in the same way."""

import pytest
import torch
from torch import nn

from etude import DataLoader
from etude.engine.evaluation import evaluate
from etude.losses import ClassificationLoss, LanguageModelingLoss, MaskedLanguageModelingLoss
from etude.metrics import Accuracy
from etude.multitask import MultiTask, TaskSpec

IDS = torch.randint(1, 6, (8, 10), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(9) < torch.tensor([9, 7, 5, 9, 3, 1, 9, 8])[:, None]).long()
FIRST = torch.tensor([2, 3, 4, 3, 5, 1, 3, 2])

BATCHES = {
    "next tokens": ({"input_ids": IDS[:, :-1], "labels": IDS[:, 1:]}, LanguageModelingLoss()),
    "labels that repeat the inputs": ({"input_ids": IDS[:, :-1], "labels": IDS[:, :-1]}, LanguageModelingLoss()),
    "no labels": ({"input_ids": IDS[:, :-1]}, LanguageModelingLoss()),
    "tokens": ({"tokens": IDS}, LanguageModelingLoss()),
    "padding": ({"input_ids": IDS[:, :-1], "attention_mask": MASK}, LanguageModelingLoss()),
    "another ignored token": (
        {"input_ids": IDS[:, :-1], "labels": IDS[:, 1:]},
        LanguageModelingLoss(ignore_index=3),
    ),
    "masked tokens": (
        {"input_ids": IDS[:, :-1], "labels": IDS[:, :-1].where(MASK == 1, -100)},
        MaskedLanguageModelingLoss(),
    ),
    "chosen by shapes": ({"input_ids": IDS[:, :-1], "labels": IDS[:, :-1]}, None),
    "another ignored class": ({"input_ids": IDS[:, :-1], "labels": FIRST}, ClassificationLoss(ignore_index=3)),
}


class Model(nn.Module):
    """Logits of six classes at every position, or of the first one."""

    def __init__(self, whole):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.whole = nn.Embedding(6, 6), whole

    def forward(self, batch, heads):
        ids = batch["tokens"][:, :-1] if "tokens" in batch else batch["input_ids"]
        logits = self.table(ids)
        return dict.fromkeys(heads, logits if self.whole else logits[:, 0])


@pytest.mark.parametrize("name", BATCHES)
def test_accuracy_as_a_metric_is_that_of_the_loss(name):
    batch, loss = BATCHES[name]
    task = MultiTask({"words": TaskSpec("words", loss, metrics={"right": Accuracy()})})
    model = Model(whole=not isinstance(loss, ClassificationLoss))
    with torch.no_grad():  # each token predicts itself somewhat, and its successor more
        model.table.weight.copy_(torch.eye(6) + 2 * torch.eye(6).roll(1, 1))
    numbers = evaluate(model, task, DataLoader(batch, batch_size=4))
    assert numbers["words/right"] == pytest.approx(numbers["words/accuracy"])
