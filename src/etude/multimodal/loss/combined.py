"""`combined_loss`: the meaningful loss as one number with its components, for hand-written loops."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from etude.core.errors import ConfigError
from etude.core.model import HeadOutput
from etude.core.task import LossTerm, Terms
from etude.losses.functional import IGNORE_INDEX, cross_entropy_term, mean_of
from etude.losses.linear import linear_cross_entropy
from etude.multimodal.loss.settings import DEFAULTS, read_settings
from etude.multimodal.loss.strategy import MeaningfulLoss
from etude.multimodal.loss.terms import SHORT_NAMES, check_output, meaningful_terms, short_name
from etude.multimodal.vocab import VocabSpec

SETTINGS = tuple(
    name for name in DEFAULTS if name not in ("use_ce", "shift", "ignore_index", "label_smoothing", "fused_head")
)
"""Settings of `MeaningfulLoss` allowed in `config`; the others are arguments of `combined_loss` or unused."""
CODEBOOK_NAMES = {"image_codebook": "image", "spectrum_codebook": "spectrum", "scalar_centers": "scalar"}


def combined_loss(
    logits: Tensor | HeadOutput,
    targets: Tensor,
    vocab: VocabSpec,
    image_codebook: Any = None,
    spectrum_codebook: Any = None,
    scalar_centers: Any = None,
    config: Mapping[str, Any] | None = None,
    use_ce: bool = True,
    *,
    codebooks: Mapping[str, Any] | None = None,
    edges: Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return cross entropy + Σ weight · expected-value loss, and its components, for a hand-written loop.

    `logits` (B, L, V) are aligned with `targets` (B, L), the next tokens; targets of PAD or -100 do not count.
    Codebooks of modalities other than these three are passed by name in `codebooks`, bin edges (for hl_gauss) in
    `edges`. `config` has settings of `MeaningfulLoss`, such as `sample_k`, `kind` and `weights`, or `weight_image`
    for an entry of `weights`. The components are `loss_total`, `loss_ce` and one per modality (`loss_img`,
    `loss_sca`, `loss_spec`, `loss_<name>`), detached and on the device, so that nothing synchronises. Without
    `use_ce` the cross entropy is only reported, unless the other losses are not `enabled`. Raises TrainingError if no
    trained term is left.

    >>> from etude.multimodal.vocab import build_vocab_spec
    >>> vocab = build_vocab_spec(v_scalar=3)
    >>> targets = torch.tensor([[6, 8]])
    >>> loss, stats = combined_loss(torch.zeros(1, 2, 9), targets, vocab, scalar_centers=torch.tensor([0.0, 1.0, 2.0]))
    >>> {name: round(float(value), 3) for name, value in stats.items()}
    {'loss_total': 2.297, 'loss_ce': 2.197, 'loss_img': 0.0, 'loss_sca': 1.0, 'loss_spec': 0.0}
    """
    given = {
        "image_codebook": image_codebook,
        "spectrum_codebook": spectrum_codebook,
        "scalar_centers": scalar_centers,
    }
    books = join_codebooks(codebooks, given)
    loss = _loss_of_last_call(vocab, books, dict(edges or {}), config or {}, use_ce)
    check_output(logits, vocab)
    tokens = targets if targets.is_floating_point() else targets.long()
    labels = tokens.masked_fill(tokens == vocab.pad_id, IGNORE_INDEX)
    terms: Terms = {"loss_ce": _cross_entropy(logits, labels, weighted=loss.use_ce)}
    chosen: dict[str, Any] = {"sample_k": loss.sample_k, "metrics": False, "generator": generator}
    terms |= meaningful_terms(logits, labels, vocab, loss.reconstructions, loss.weights, **chosen)
    means = {name: mean_of(term) for name, term in terms.items()}
    total = torch.stack([means[name] * term.weight for name, term in terms.items()]).sum()
    names = ("ce", *SHORT_NAMES.values(), *(short_name(name) for name in vocab.modalities))
    zero = total.new_zeros(())
    stats = {f"loss_{name}": means.get(f"loss_{name}", zero).detach() for name in dict.fromkeys(names)}
    return total, {"loss_total": total.detach(), **stats}


def join_codebooks(codebooks: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return codebooks by modality, from a mapping and from separate arguments."""
    named = {name: given[key] for key, name in CODEBOOK_NAMES.items() if given.get(key) is not None}
    if twice := named.keys() & (codebooks or {}).keys():
        raise ConfigError(
            f"the codebook of {twice.pop()!r} is given twice, in codebooks and as its own argument; keep one"
        )
    return {**(codebooks or {}), **named}


_last: tuple[Any, Any, MeaningfulLoss] | None = None


def _loss_of_last_call(
    vocab: VocabSpec, codebooks: dict[str, Any], edges: dict[str, Any], config: Mapping[str, Any], use_ce: bool
) -> MeaningfulLoss:
    """Return the loss object for these arguments, cached, because checking them synchronises."""
    global _last
    tensors = [*codebooks.items(), *edges.items()]
    is_known = all(isinstance(one, Tensor) and not one.is_inference() for _, one in tensors)
    versions = [(name, id(one), one._version) for name, one in tensors] if is_known else None
    key = (vocab, versions, repr(config), use_ce)
    if is_known and _last is not None and _last[0] == key:
        return _last[2]
    settings = read_settings(config, "config", names=SETTINGS)
    weights = settings.pop("weights", {})
    # Files have the weights of all three modalities, even if a vocabulary lacks some.
    weights = {name: weight for name, weight in weights.items() if name in codebooks or name not in SHORT_NAMES}
    loss = MeaningfulLoss(vocab, codebooks, edges=edges, use_ce=use_ce, weights=weights, **settings)
    _last = (key, tensors, loss)  # keep the tensors, so that their ids are not reused
    return loss


def _cross_entropy(predictions: HeadOutput | Tensor, labels: Tensor, *, weighted: bool) -> LossTerm:
    with torch.set_grad_enabled(weighted and torch.is_grad_enabled()):
        if isinstance(predictions, HeadOutput):
            p = predictions
            term = linear_cross_entropy(p.hidden, p.weight, labels, p.bias, softcap=p.softcap)
        else:
            term = cross_entropy_term(predictions, labels)
    return LossTerm(term.sum, term.count, 1.0 if weighted else 0.0)
