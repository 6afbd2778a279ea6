"""Finding the logits in whatever a model returns."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from etude.core.errors import TrainingError
from etude.core.head import HeadOutput

LOGITS_KEYS = ("logits", "output", "out", "prediction", "predictions")
"""Keys under which a mapping holds its logits; the first one present is taken."""


def logits_of(output: Any) -> Tensor:
    """Return the logits (or predictions) of a model's output.

    Accepts a tensor, a tuple such as `(logits,)`, `(logits, loss, …)` or `(loss, logits, …)`, a mapping with `logits`
    (a Hugging Face `ModelOutput` is one), and any object with an attribute `logits`. Raises TrainingError otherwise.
    Where a `HeadOutput` stands for the logits, they are computed.

    >>> import torch
    >>> logits_of((torch.ones(2, 3), torch.tensor(0.5))).shape
    torch.Size([2, 3])
    """
    found = _find(output)
    if isinstance(found, Tensor):
        return found
    if isinstance(found, HeadOutput):
        return found.logits
    if isinstance(output, Mapping):
        what = f"a mapping with the keys {', '.join(map(str, output)) or 'none'}"
    else:
        what = f"a {type(output).__name__}"
    raise TrainingError(
        f"no logits in the model's output, {what}: return a tensor, (logits, …), a mapping with 'logits' "
        f"or an object with .logits, or give a LossStrategy that reads this output"
    )


def head_of(output: Any) -> HeadOutput | None:
    """Return the `HeadOutput` that stands for the logits in a model's output, or None if there is none."""
    found = _find(output)
    return found if isinstance(found, HeadOutput) else None


def shape_of(output: Any) -> torch.Size:
    """Return the shape of the logits, without computing those of a `HeadOutput`; raise TrainingError as `logits_of`."""
    head = head_of(output)
    return head.shape if head is not None else logits_of(output).shape


def _find(output: Any) -> Any:
    """Return what stands in the place of the logits, None if nothing does."""
    if isinstance(output, (Tensor, HeadOutput)):
        return output
    if isinstance(output, Mapping):
        return next((output[key] for key in LOGITS_KEYS if key in output), None)
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, (tuple, list)):
        # A number among the outputs is a loss the model computed itself.
        several = (Tensor, HeadOutput)
        found = next((item for item in output if isinstance(item, several) and len(item.shape) > 0), None)
    return found
