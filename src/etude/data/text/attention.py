"""The attention mask of packed documents: tokens see their own document only."""

import torch
from torch import Tensor


def document_mask(document_ids: Tensor, *, causal: bool = True, dtype: torch.dtype = torch.bool) -> Tensor:
    """Return the mask (B, 1, L, L) of packed blocks: true where the token of the row may see that of the column.

    With `causal` a token sees itself and those before it, without (masked language models) all of its document.
    A floating `dtype` gives a mask to be added to attention scores: 0 where seen, else the least number there is.
    Padding (document -1) sees padding, so that no row is empty. It runs on the device of `document_ids`: for a GPU,
    make the mask there, as it is L times as large as the ids.

    >>> document_mask(torch.tensor([[0, 0, 1]])).int()
    tensor([[[[1, 0, 0],
              [1, 1, 0],
              [0, 0, 1]]]], dtype=torch.int32)
    """
    seen = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if causal:
        length = document_ids.shape[1]
        seen &= torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    if dtype == torch.bool:
        return seen
    hidden = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)
