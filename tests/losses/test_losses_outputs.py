"""Logits are found in every form of output, and their absence is explained."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from etude.core.errors import TrainingError
from etude.losses import logits_of

LOGITS, LOSS = torch.randn(2, 3), torch.tensor(0.5)


class ModelOutput(OrderedDict):
    """Like that of Hugging Face: a mapping whose keys are attributes too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclass
class PlainOutput:
    logits: torch.Tensor
    hidden: list = field(default_factory=list)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS,),
        [LOGITS],
        (LOGITS, LOSS),
        (LOGITS, None, torch.zeros(7)),
        (LOSS, LOGITS),
        {"logits": LOGITS, "output": torch.zeros(1)},
        {"out": LOGITS, "aux": torch.zeros(1)},
        {"predictions": LOGITS},
        ModelOutput(loss=LOSS, logits=LOGITS),
        PlainOutput(LOGITS),
        namedtuple("Named", "hidden logits")(torch.zeros(9), LOGITS),
    ],
)
def test_logits_are_found(output):
    assert logits_of(output) is LOGITS


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (None, "a NoneType"),
        ((), "a tuple"),
        ((LOSS,), "a tuple"),
        ({"hidden": LOGITS, "loss": LOSS}, "a mapping with the keys hidden, loss"),
        ({"logits": [1.0]}, "a mapping with the keys logits"),
        (ModelOutput(last_hidden_state=LOGITS), "a mapping with the keys last_hidden_state"),
    ],
)
def test_their_absence_is_explained(output, found):
    with pytest.raises(TrainingError, match=f"^no logits in the model's output, {found}: "):
        logits_of(output)
