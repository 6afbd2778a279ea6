"""Cross entropy and expected-value losses of all modalities together: as terms, and as one number for loops by hand."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from etude.config.spelling import did_you_mean, listed
from etude.core.errors import ConfigError, DataError, TrainingError
from etude.core.head import HeadOutput
from etude.core.terms import LossTerm, Terms
from etude.core.vocab import Modality, VocabSpec
from etude.losses.functional import IGNORE_INDEX, cross_entropy_term, mean_of
from etude.losses.linear import linear_cross_entropy
from etude.losses.meaningful.blocks import logits_sums
from etude.losses.meaningful.fused import Part, expected_value_sums
from etude.losses.meaningful.kinds import make_reconstruction
from etude.losses.meaningful.positions import Positions, choose_positions
from etude.losses.meaningful.reconstruction import Reconstruction

WEIGHT = 0.1
"""The weight of a modality's loss that is not told otherwise."""
SAMPLE_K = 4096
"""How many positions of a modality are looked at in a batch, if not told otherwise."""
SHORT_NAMES = {"image": "img", "scalar": "sca", "spectrum": "spec"}
NAMES_TAKEN = {"ce": "the cross entropy", "total": "the weighted sum"}
"""Whose the names are that no modality's loss can have."""
CONFIG_KEYS = ("enabled", "sample_k", "sample_k_per_modality", "weights", "kind", "huber_delta", "hl_sigma")
CODEBOOK_NAMES = {"image_codebook": "image", "spectrum_codebook": "spectrum", "scalar_centers": "scalar"}


def short_name(modality: str) -> str:
    """Return what a modality is called in the names of numbers: img, sca and spec, or the name itself."""
    return SHORT_NAMES.get(modality, modality)


def make_reconstructions(
    vocab: VocabSpec,
    codebooks: Mapping[str, Any],
    kind: str | Mapping[str, str] = "mse",
    *,
    edges: Mapping[str, Any] | None = None,
    huber_delta: float = 1.0,
    hl_sigma: float = 0.75,
) -> dict[str, Reconstruction]:
    """Return the loss of every modality that has a codebook, in the order of the vocabulary.

    Raises ConfigError for modalities that the vocabulary does not have, and DataError for codebooks of the wrong size
    or with values that are not finite. Waits for the device.
    """
    if not isinstance(kind, (str, Mapping)):
        raise ConfigError(f"kind is {kind!r}; give the name of a kind of loss, or names by modality")
    kinds = dict(kind) if isinstance(kind, Mapping) else {}
    for what, names in (("a codebook", codebooks), ("a kind of loss", kinds), ("edges", edges or {})):
        check_modalities(names, vocab, what)
    found: dict[str, Reconstruction] = {}
    for name, modality in vocab.modalities.items():
        if name not in codebooks:
            continue
        if (taken := NAMES_TAKEN.get(short_name(name))) or (short_name(name) in map(short_name, found)):
            raise ConfigError(
                f"the modality {name!r} would report loss_{short_name(name)}, which is {taken or 'another modality'}'s "
                f"already; rename the modality"
            )
        try:
            values = _tensor(codebooks[name])
            chosen = kind if isinstance(kind, str) else kinds.get(name, "mse")
            own = None if not edges or name not in edges else _tensor(edges[name])
            if values.dim() and len(values) != modality.size:
                raise DataError(f"there are {len(values)} values for its {modality.size} tokens")
            found[name] = make_reconstruction(chosen, values, edges=own, huber_delta=huber_delta, hl_sigma=hl_sigma)
        except DataError as error:
            raise DataError(f"the codebook of the modality {name!r} does not fit: {error}") from error
    return found


def _tensor(values: Any) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"a tensor or an array of numbers is needed, found a {type(values).__name__}") from error


def check_modalities(names: Mapping[str, Any] | Sequence[str], vocab: VocabSpec, what: str) -> None:
    """Raise ConfigError for a name that is no modality of the vocabulary."""
    for name in names:
        if name not in vocab.modalities:
            hint = did_you_mean(str(name), vocab.modalities)
            raise ConfigError(
                f"{what} is given for the modality {name!r}, which the vocabulary does not have{hint} "
                f"(it has: {listed(vocab.modalities) or 'none'})"
            )


def check_output(predictions: HeadOutput | Tensor, vocab: VocabSpec) -> None:
    """Raise TrainingError if there are fewer logits than tokens. On a GPU a label beyond them would end the process."""
    if predictions.shape[-1] < vocab.vocab_size:
        raise TrainingError(
            f"the vocabulary has {vocab.vocab_size} tokens, the model's output only {predictions.shape[-1]}; "
            f"give the model vocab_size {vocab.vocab_size}"
        )


def meaningful_terms(
    predictions: HeadOutput | Tensor,
    targets: Tensor,
    vocab: VocabSpec,
    reconstructions: Mapping[str, Reconstruction],
    weights: Mapping[str, float],
    *,
    sample_k: int | None,
    metrics: bool,
    generator: torch.Generator | None = None,
) -> Terms:
    """Return `loss_<short name>` of every modality with a reconstruction, and with `metrics` `mse_<short name>` too.

    `predictions` are logits (…, V), or hidden states and an output layer that is then applied in chunks; `targets` (…)
    are token ids. Modalities of weight 0 are left out unless `metrics` asks for them, and have no gradient.
    """
    check_output(predictions, vocab)
    names = [name for name in reconstructions if metrics or weights.get(name, 0.0)]
    if not names:
        return {}
    chosen = {name: choose_positions(targets, vocab.modalities[name], sample_k, generator) for name in names}
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for learns in (True, False):  # what is only measured needs no gradients
        some = [name for name in names if (weights.get(name, 0.0) != 0) is learns]
        parts = [_part(reconstructions[name], vocab.modalities[name], chosen[name]) for name in some]
        if parts:
            with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                sums |= zip(some, _sums(predictions, parts), strict=True)
    terms: Terms = {}
    for name in names:
        (total, squared), count = sums[name], chosen[name].count
        terms[f"loss_{short_name(name)}"] = LossTerm(total, count, weights.get(name, 0.0))
        if metrics:
            terms[f"mse_{short_name(name)}"] = LossTerm(squared, count, 0.0)
    return terms


def _part(reconstruction: Reconstruction, modality: Modality, chosen: Positions) -> Part:
    return Part(reconstruction, modality.slice, chosen.rows, chosen.targets, chosen.row_weights)


def _sums(predictions: HeadOutput | Tensor, parts: Sequence[Part]) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the sum of losses and that of squared errors of every part."""
    if isinstance(predictions, HeadOutput):
        return zip(*expected_value_sums(predictions, parts), strict=True)
    return zip(*logits_sums(predictions, parts), strict=True)


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
    generator: torch.Generator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return cross entropy + Σ weight · expected-value loss, and the numbers it is made of, for a loop by hand.

    `logits` (B, L, V) line up with `targets` (B, L), the next tokens; targets of PAD or -100 do not count. Codebooks of
    other modalities than the three come by name in `codebooks`. `config` has the keys `enabled`, `sample_k`,
    `weight_<modality>` (0.1 each), `weights`, `kind`, `huber_delta` and `hl_sigma`. The numbers are `loss_total`,
    `loss_ce` and one for each modality (`loss_img`, `loss_sca`, `loss_spec`, `loss_<name>`), detached and on the
    device, so that nothing waits for it. Without `use_ce` the cross entropy is only measured, unless the others are not
    `enabled`. Raises TrainingError if nothing is left to learn from.

    >>> from etude.core.vocab import build_vocab_spec
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
    reconstructions = _last_call.reconstructions(vocab, known, settings.kinds) if settings.enabled else {}
    use_ce = use_ce or not settings.enabled
    check_something_to_learn(use_ce, {name: settings.weights[name] for name in reconstructions})
    tokens = targets if targets.is_floating_point() else targets.long()
    labels = tokens.masked_fill(tokens == vocab.pad_id, IGNORE_INDEX)
    terms: Terms = {"loss_ce": _cross_entropy(logits, labels, weighted=use_ce)}
    terms |= meaningful_terms(
        logits,
        labels,
        vocab,
        reconstructions,
        settings.weights,
        sample_k=settings.sample_k,
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
        self._key: tuple[Any, ...] = ()
        self._codebooks: dict[str, Any] = {}
        self._found: dict[str, Reconstruction] = {}

    def reconstructions(
        self, vocab: VocabSpec, codebooks: dict[str, Any], kinds: dict[str, Any]
    ) -> dict[str, Reconstruction]:
        """Return `make_reconstructions` of these, made once as long as the tensors are the same and not changed."""
        if not all(isinstance(values, Tensor) and not values.is_inference() for values in codebooks.values()):
            return make_reconstructions(vocab, codebooks, **kinds)  # who knows whether they have changed
        key = (vocab, str(kinds), {name: (id(values), values._version) for name, values in codebooks.items()})
        if key != self._key:
            self._found = make_reconstructions(vocab, codebooks, **kinds)
            self._key, self._codebooks = key, codebooks  # kept, so that no other tensor gets the same id
        return self._found


_last_call = _LastCall()


class _Settings:
    """The config of `combined_loss`, read."""

    def __init__(self, config: Mapping[str, Any], vocab: VocabSpec) -> None:
        self.enabled = bool(config.get("enabled", True))
        self.sample_k = config.get("sample_k", config.get("sample_k_per_modality", SAMPLE_K))
        own = {name: config[f"weight_{name}"] for name in vocab.modalities if f"weight_{name}" in config}
        self.weights = dict.fromkeys(vocab.modalities, WEIGHT) | dict(config.get("weights") or {}) | own
        self.kinds = {key: config[key] for key in ("kind", "huber_delta", "hl_sigma") if key in config}


def _read_config(config: Mapping[str, Any], vocab: VocabSpec) -> _Settings:
    allowed = (*CONFIG_KEYS, *(f"weight_{name}" for name in {**SHORT_NAMES, **vocab.modalities}))
    for key in config:
        if key not in allowed:
            raise ConfigError(f"unknown key {key!r}{did_you_mean(str(key), allowed)} (allowed: {listed(allowed)})")
    settings = _Settings(config, vocab)
    check_modalities(settings.weights, vocab, "a weight")
    check_numbers(settings.weights, settings.sample_k)
    return settings


def check_numbers(weights: Mapping[str, Any], sample_k: int | None) -> None:
    """Raise ConfigError for weights below 0 or not finite, and for a number of positions below 1."""
    for name, weight in weights.items():
        if not isinstance(weight, Real) or not 0 <= float(weight) < float("inf"):
            raise ConfigError(f"the weight of the modality {name!r} is {weight!r}; weights are numbers of 0 or more")
    if sample_k is not None and (isinstance(sample_k, bool) or not isinstance(sample_k, int) or sample_k < 1):
        raise ConfigError(f"sample_k is {sample_k!r}; give a whole number of at least 1, or null for all positions")


def check_something_to_learn(use_ce: bool, weights: Mapping[str, float]) -> None:
    """Raise TrainingError if neither the cross entropy nor a modality has a part in the loss."""
    if not use_ce and not any(weights.values()):
        raise TrainingError(
            "there is nothing to learn from: use_ce is off, and no modality has a codebook and a weight above 0"
        )


def _cross_entropy(predictions: HeadOutput | Tensor, labels: Tensor, *, weighted: bool) -> LossTerm:
    with torch.set_grad_enabled(weighted and torch.is_grad_enabled()):
        if isinstance(predictions, HeadOutput):
            p = predictions
            term = linear_cross_entropy(p.hidden, p.weight, labels, p.bias, softcap=p.softcap)
        else:
            term = cross_entropy_term(predictions, labels)
    return LossTerm(term.sum, term.count, 1.0 if weighted else 0.0)
