"""Choosing the next token from logits: temperature, top-k and top-p sampling."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

Temperature = Annotated[float, Ge(0)]
TopK = Annotated[int, Ge(1)] | None
TopP = Annotated[float, Gt(0), Le(1)] | None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this block the model is in eval mode and without gradients; afterwards all modes are restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def next_tokens(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token per row of logits (B, V); temperature 0 takes the most likely one.

    `top_k` keeps the k most likely tokens, and `top_p` the fewest that together have that probability.

    >>> next_tokens(torch.tensor([[0.0, 3.0, 1.0]]), temperature=0)
    tensor([1])
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # probability of more likely tokens: 0 for the first, which is always kept
        before = probabilities.cumsum(-1) - probabilities
        ordered = ordered.masked_fill(before >= top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, ordered)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
