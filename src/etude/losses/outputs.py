"""Finding the logits in whatever a model returns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from etude.core.errors import TrainingError

LOGITS_KEYS = ("logits", "output", "out", "prediction", "predictions")
"""Keys under which a mapping holds its logits; the first one present is taken."""


def logits_of(output: Any) -> Tensor:
    """Return the logits (or predictions) of a model's output.

    Accepts a tensor, a tuple such as `(logits,)`, `(logits, loss, …)` or `(loss, logits, …)`, a mapping with `logits`
    (a Hugging Face `ModelOutput` is one), and any object with an attribute `logits`. Raises TrainingError otherwise.

    >>> import torch
    >>> logits_of((torch.ones(2, 3), torch.tensor(0.5))).shape
    torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    found: Any = None
    if isinstance(output, Mapping):
        found = next((output[key] for key in LOGITS_KEYS if key in output), None)
    else:
        found = getattr(output, "logits", None)
        if found is None and isinstance(output, (tuple, list)):
            # A number among the outputs is a loss the model computed itself.
            found = next((item for item in output if isinstance(item, Tensor) and item.dim() > 0), None)
    if isinstance(found, Tensor):
        return found
    if isinstance(output, Mapping):
        what = f"a mapping with the keys {', '.join(map(str, output)) or 'none'}"
    else:
        what = f"a {type(output).__name__}"
    raise TrainingError(
        f"no logits in the model's output, {what}: return a tensor, (logits, …), a mapping with 'logits' "
        f"or an object with .logits, or give a LossStrategy that reads this output"
    )
