"""Problems whose true distributions are known: tokens to learn from, and the right answer to each.

A value between -2 and 2 lies in one of 41 even bins. At a place of a line, or after another value, bins have
probabilities that are known exactly, so that a model can be compared with the best that any model could do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.multimodal import VocabSpec, build_vocab_spec

BINS, PLACES = 41, 32
EDGES = torch.linspace(-2.05, 2.05, BINS + 1, dtype=torch.float64)
CENTRES = (EDGES[:-1] + EDGES[1:]) / 2
WIDTH = float(CENTRES[1] - CENTRES[0])
VOCAB: VocabSpec = build_vocab_spec(v_scalar=BINS, modalities={"place": PLACES})
"""Tokens of values, and tokens of 32 places on a line that a value can be asked for."""


@dataclass(frozen=True)
class Problem:
    """Sequences of tokens, all but the first of which are values."""

    name: str
    what: str
    law: Callable[[Tensor], Tensor]
    """The true probabilities of the bins (…, 41) after a token: a place or a value, as a number."""
    length: int = 2
    count: int = 8192
    """How many values there are to learn from."""
    share: float = 1.0
    """Of the usual number of steps that a model has."""
    values: Tensor = field(default_factory=lambda: CENTRES)
    """What the bins stand for: the codebook."""

    def draw(self, count: int, seed: int) -> Tensor:
        """Return sequences of tokens (count, length)."""
        generator = torch.Generator().manual_seed(seed)
        if self.length == 2:
            token = VOCAB.range_of("place").base + torch.randint(PLACES, (count,), generator=generator)
        else:
            token = VOCAB.range_of("scalar").base + torch.randint(BINS, (count,), generator=generator)
        tokens = [token]
        for _ in range(self.length - 1):
            drawn = torch.multinomial(self.truth(tokens[-1]), 1, generator=generator)[:, 0]
            tokens.append(VOCAB.encode("scalar", drawn))
        return torch.stack(tokens, dim=1)

    def truth(self, tokens: Tensor) -> Tensor:
        """Return the true probabilities of the bins of the value that follows each token."""
        if self.length == 2:
            return self.law(VOCAB.decode("place", tokens).double() / (PLACES - 1))
        return self.law(self.values[VOCAB.decode("scalar", tokens)])


def normal(mean: Tensor, deviation: float) -> Tensor:
    """Return the probabilities of the bins for normal values; the outer bins have the tails too."""
    below = 0.5 * (1 + torch.erf((EDGES - mean[..., None]) / (deviation * math.sqrt(2))))
    below[..., 0], below[..., -1] = 0, 1
    return below.diff(dim=-1)


def curve(place: Tensor) -> Tensor:
    """One mode: a sine with noise of one and a half bins."""
    return normal(1.2 * torch.sin(2 * math.pi * place), 1.5 * WIDTH)


def fork(place: Tensor) -> Tensor:
    """Two modes that move apart, and nothing between them; the lower one is the rarer."""
    height = 0.6 + 0.8 * place
    return 0.4 * normal(-height, WIDTH) + 0.6 * normal(height, WIDTH)


def jumps(value: Tensor) -> Tensor:
    """A value that decays slowly, but for one in seven, which is drawn from the upper end whatever came before."""
    return 6 / 7 * normal(0.9 * value, WIDTH) + 1 / 7 * normal(torch.full_like(value, 1.7), WIDTH)


def overflow(place: Tensor) -> Tensor:
    """The curve, but one value in fifty is far out, in the last bin."""
    rare = torch.zeros(BINS, dtype=torch.float64)
    rare[-1] = 1
    return 0.98 * curve(place) + 0.02 * rare


FAR_OUT = CENTRES.clone()
FAR_OUT[-1] = 40.0

PROBLEMS = (
    Problem("curve", "one mode", curve),
    Problem("early", "the same after a sixth of the steps", curve, share=1 / 6),
    Problem("sparse", "the same from 16 values for each place", curve, count=16 * PLACES),
    Problem("fork", "two modes", fork),
    Problem("jumps", "a stream, one value in seven an outlier", jumps, length=17),
    Problem("overflow", "one mode, one value in fifty in a last bin that stands for 40", overflow, values=FAR_OUT),
)
