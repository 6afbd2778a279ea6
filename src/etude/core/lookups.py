"""An embedding that was asked for a row it does not have: what torch calls an IndexError, in words."""

from torch import Tensor, nn

from etude.core.errors import DataError


def explain_lookup(error: IndexError, model: nn.Module) -> DataError | None:
    """Return what went wrong if an embedding of the model raised this error, else None.

    The traceback tells which one it was, and what it was asked for: nothing is checked as long as all is well.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(10, 4))
    >>> try:
    ...     model(torch.tensor([3, 12]))
    ... except IndexError as error:
    ...     print(str(explain_lookup(error, model)).split(";")[0])
    the batch has the id 12, but the model's embedding '0' has 10 rows (0 … 9)
    """
    trace = error.__traceback__
    while trace is not None:
        inside = trace.tb_frame.f_locals
        layer, ids = inside.get("self"), inside.get("input")
        if isinstance(layer, nn.Embedding) and isinstance(ids, Tensor) and ids.numel():
            name = next((name for name, module in model.named_modules() if module is layer), "")
            low, high, rows = int(ids.min()), int(ids.max()), layer.num_embeddings
            if low >= 0 and high < rows:
                return None
            return DataError(
                f"the batch has the id {low if low < 0 else high}, but the model's embedding '{name}' has {rows} rows "
                f"(0 … {rows - 1}); is the model's vocabulary (vocab_size) or its longest sequence too small for the "
                f"data, or the data of another dtype?"
            )
        trace = trace.tb_next
    return None
