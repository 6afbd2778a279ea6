"""Positions of several modalities with codebooks, and their combined loss by hand."""

import torch
import torch.nn.functional as F

from etude.multimodal import build_vocab_spec

VOCAB = build_vocab_spec(v_image=7, v_scalar=5, v_spectra=4, modalities={"class": 3, "period": 6})
IMAGE, SPECTRUM = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)), torch.randn(4, 2)
SCALAR, PERIOD = torch.tensor([0.0, 0.5, 2.0, 3.0, 9.0]), torch.linspace(-1, 1, 6)
SHORT = {"image": "img", "scalar": "sca", "spectrum": "spec", "period": "period"}
BOOKS = {"image_codebook": IMAGE, "spectrum_codebook": SPECTRUM, "scalar_centers": SCALAR}


def make(dtype=torch.float64, extra=0, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 11, 4, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB.vocab_size + extra, 4, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB.vocab_size, (3, 11), generator=g)
    targets[0, :3] = VOCAB.pad_id
    targets[1, :2] = -100
    targets[2, 0] = VOCAB.miss_id
    return hidden, weight, targets


def by_hand(logits, targets, weights, books, use_ce=True):
    """Σ weight · mean squared error of the expected value, and the cross entropy, written out."""
    counted = (targets != VOCAB.pad_id) & (targets != -100)
    numbers = {"loss_ce": F.cross_entropy(logits[counted], targets[counted])}
    total = numbers["loss_ce"] if use_ce else 0.0
    for name, values in books.items():
        modality = VOCAB.range_of(name)
        own = (targets >= modality.base) & (targets < modality.base + modality.size)
        probs = torch.softmax(logits[own][:, modality.base : modality.base + modality.size], 1)
        values = values.double().reshape(modality.size, -1)
        loss = ((probs @ values - values[targets[own] - modality.base]) ** 2).mean()
        numbers[f"loss_{SHORT[name]}"] = loss
        total = total + weights.get(name, 0.1) * loss
    return total, numbers
