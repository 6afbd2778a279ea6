"""Perplexity: between how many tokens, equally likely, a language model chooses on average."""

import math

_LARGEST = math.log(1.7e308)


def perplexity(mean_loss: float) -> float:
    """Return exp of a mean cross entropy in nats; infinity where that is beyond the range of numbers.

    >>> round(perplexity(math.log(50257))), perplexity(1e9), perplexity(math.nan)
    (50257, inf, nan)
    """
    return math.inf if mean_loss > _LARGEST else math.exp(mean_loss)
