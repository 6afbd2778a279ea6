"""`combined_loss`: the meaningful loss as one number and the numbers it is made of, for loops by hand."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from etude.core.errors import ConfigError
from etude.core.model import HeadOutput
from etude.core.spelling import suggest
from etude.core.task import LossTerm, Terms
from etude.losses.functional import IGNORE_INDEX, cross_entropy_term, mean_of
from etude.losses.linear import linear_cross_entropy
from etude.multimodal.loss.reconstruction import Reconstruction
from etude.multimodal.loss.settings import DEFAULTS, WEIGHT_OF, as_arguments, spellings_of
from etude.multimodal.loss.terms import (
    SHORT_NAMES,
    check_modalities,
    check_numbers,
    check_output,
    check_something_to_learn,
    make_reconstructions,
    meaningful_terms,
    short_name,
)
from etude.multimodal.vocab import VocabSpec

_ELSEWHERE = ("use_ce", "shift", "ignore_index", "label_smoothing", "fused_head")
"""Settings of `MeaningfulLoss` that `combined_loss` has as arguments, or that say nothing to it."""
_SETTINGS = spellings_of(name for name in DEFAULTS if name not in _ELSEWHERE)
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
    """Return cross entropy + Σ weight · expected-value loss, and the numbers it is made of, for a loop by hand.

    `logits` (B, L, V) line up with `targets` (B, L), the next tokens; targets of PAD or -100 do not count. Codebooks of
    other modalities than the three come by name in `codebooks`, edges of bins (for hl_gauss) in `edges`. `config` has
    settings of `MeaningfulLoss`, such as `sample_k` and `kind`, and `weight_<modality>` for parts of `weights`. The
    numbers are `loss_total`, `loss_ce` and one for each modality (`loss_img`, `loss_sca`, `loss_spec`, `loss_<name>`),
    detached and on the device, so that nothing waits for it. Without `use_ce` the cross entropy is only measured,
    unless the others are not `enabled`. Raises TrainingError if nothing is left to learn from.

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
    settings = _read_config(config or {}, vocab)
    check_output(logits, vocab)
    known = join_codebooks(codebooks, given)
    reconstructions = {}
    if settings["enabled"]:
        kinds = {key: settings[key] for key in ("kind", "huber_delta", "hl_sigma")}
        reconstructions = _last_call.reconstructions(vocab, known, dict(edges or {}), kinds)
    use_ce = use_ce or not settings["enabled"]
    check_something_to_learn(use_ce, {name: settings["weights"][name] for name in reconstructions})
    tokens = targets if targets.is_floating_point() else targets.long()
    labels = tokens.masked_fill(tokens == vocab.pad_id, IGNORE_INDEX)
    terms: Terms = {"loss_ce": _cross_entropy(logits, labels, weighted=use_ce)}
    terms |= meaningful_terms(
        logits,
        labels,
        vocab,
        reconstructions,
        settings["weights"],
        sample_k=settings["sample_k"],
        metrics=False,
        generator=generator,
    )
    means = {name: mean_of(term) for name, term in terms.items()}
    total = torch.stack([means[name] * term.weight for name, term in terms.items()]).sum()
    names = ("ce", *SHORT_NAMES.values(), *(short_name(name) for name in vocab.modalities))
    zero = total.new_zeros(())
    stats = {f"loss_{name}": means.get(f"loss_{name}", zero).detach() for name in dict.fromkeys(names)}
    return total, {"loss_total": total.detach(), **stats}


def join_codebooks(codebooks: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return codebooks by modality, from a mapping and from those that have an argument of their own."""
    found = dict(codebooks or {})
    for argument, name in CODEBOOK_NAMES.items():
        if given.get(argument) is None:
            continue
        if name in found:
            raise ConfigError(f"the codebook of {name!r} is given twice, in codebooks and as {argument}; keep one")
        found[name] = given[argument]
    return found


class _LastCall:
    """The reconstructions of the last call: a loop by hand comes with the same codebooks, and checking them waits."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = (None, None, None)

    def reconstructions(
        self, vocab: VocabSpec, codebooks: dict[str, Any], edges: dict[str, Any], kinds: dict[str, Any]
    ) -> dict[str, Reconstruction]:
        """Return `make_reconstructions` of these, made once as long as the tensors are the same and not changed."""
        given = [*codebooks.items(), *edges.items()]
        if not all(isinstance(values, Tensor) and not values.is_inference() for _, values in given):
            return make_reconstructions(vocab, codebooks, edges=edges, **kinds)  # who knows whether they have changed
        key = (vocab, str(kinds), [(name, id(values), values._version) for name, values in given])
        last_key, _, found = self._last
        if key != last_key:
            found = make_reconstructions(vocab, codebooks, edges=edges, **kinds)
            self._last = (key, given, found)  # tensors are kept, so that no other one gets the same id
        return dict(found)


_last_call = _LastCall()


def _read_config(config: Mapping[str, Any], vocab: VocabSpec) -> dict[str, Any]:
    """Return all settings, with the weight of every modality; raise ConfigError for keys that have no meaning here."""
    allowed = [*_SETTINGS, *(f"{WEIGHT_OF}{name}" for name in {**SHORT_NAMES, **vocab.modalities})]
    for key in config:
        if key not in allowed:
            raise ConfigError(f"unknown key {key!r}{suggest(str(key), allowed, label='allowed')}")
    others = {f"{WEIGHT_OF}{name}" for name in SHORT_NAMES if name not in vocab.modalities}
    settings = {**DEFAULTS, **as_arguments({key: value for key, value in config.items() if key not in others})}
    weights = settings["weights"] or {}
    settings["weights"] = {**dict.fromkeys(vocab.modalities, settings["weight"]), **weights}
    check_modalities(settings["weights"], vocab, "a weight")
    check_numbers(settings["weights"], settings["sample_k"])
    return settings


def _cross_entropy(predictions: HeadOutput | Tensor, labels: Tensor, *, weighted: bool) -> LossTerm:
    with torch.set_grad_enabled(weighted and torch.is_grad_enabled()):
        if isinstance(predictions, HeadOutput):
            p = predictions
            term = linear_cross_entropy(p.hidden, p.weight, labels, p.bias, softcap=p.softcap)
        else:
            term = cross_entropy_term(predictions, labels)
    return LossTerm(term.sum, term.count, 1.0 if weighted else 0.0)
