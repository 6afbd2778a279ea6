"""Explaining the IndexError of an embedding that received an id out of range."""

from torch import Tensor, nn

from etude.core.errors import DataError


def explain_lookup(error: IndexError, model: nn.Module) -> DataError | None:
    """Return an explanation if an embedding of the model raised this error, else None.

    The embedding and the ids are taken from the traceback, so nothing is checked while training works.

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
                f"the batch has the id {low if low < 0 else high}, but the model's embedding '{name}' has {rows} "
                f"rows (0 … {rows - 1}); increase the model's vocab_size or maximum sequence length, or check the "
                "dtype of the data"
            )
        trace = trace.tb_next
    return None
