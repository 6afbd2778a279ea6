"""Expected-value losses of all modalities as terms, of all their positions or of some drawn at random."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etude.core.errors import ConfigError, DataError, TrainingError
from etude.core.model import HeadOutput
from etude.core.spelling import suggest
from etude.core.task import LossTerm, Terms
from etude.multimodal.loss.fused import LossPart, expected_value_sums
from etude.multimodal.loss.kinds import make_reconstruction
from etude.multimodal.loss.reconstruction import HL_SIGMA, HUBER_DELTA, Reconstruction
from etude.multimodal.vocab import Modality, VocabSpec

SHORT_NAMES = {"image": "img", "scalar": "sca", "spectrum": "spec"}


def short_name(modality: str) -> str:
    """Return the short name of a modality in metrics: img, sca and spec, or the name itself."""
    return SHORT_NAMES.get(modality, modality)


def make_reconstructions(
    vocab: VocabSpec,
    codebooks: Mapping[str, Any],
    kind: str | Mapping[str, str] = "mse",
    *,
    edges: Mapping[str, Any] | None = None,
    huber_delta: float = HUBER_DELTA,
    hl_sigma: float = HL_SIGMA,
) -> dict[str, Reconstruction]:
    """Return the loss of every modality with a codebook, in vocabulary order.

    Raises ConfigError for modalities that the vocabulary lacks, and DataError for codebooks of the wrong size or with
    non-finite values. Synchronises with the device.
    """
    kinds = kind if isinstance(kind, Mapping) else dict.fromkeys(vocab.modalities, kind)
    for what, names in (("a codebook", codebooks), ("a kind of loss", kinds), ("edges", edges or {})):
        check_modalities(names, vocab, what)
    found: dict[str, Reconstruction] = {}
    for name in (one for one in vocab.modalities if one in codebooks):
        if short_name(name) in ("ce", "total", *map(short_name, found)):
            raise ConfigError(
                f"the modality {name!r} would report loss_{short_name(name)}, which another metric already uses; "
                "rename it"
            )
        try:
            values, size = _tensor(codebooks[name]), vocab.modalities[name].size
            own = None if not edges or name not in edges else _tensor(edges[name])
            if values.dim() and len(values) != size:
                raise DataError(f"there are {len(values)} values for its {size} tokens")
            with torch.inference_mode(False):  # a later step may need these tensors for gradients
                found[name] = make_reconstruction(
                    kinds.get(name, "mse"), values, edges=own, huber_delta=huber_delta, hl_sigma=hl_sigma
                )
        except DataError as error:
            raise DataError(f"the codebook of the modality {name!r} does not fit: {error}") from error
    return found


def _tensor(values: Any) -> Tensor:
    try:
        found = torch.as_tensor(values)
        return found if found.is_floating_point() or found.is_complex() else found.float()
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"expected a tensor or an array of numbers, found a {type(values).__name__}") from error


def check_modalities(names: Iterable[str], vocab: VocabSpec, what: str) -> None:
    """Raise ConfigError for a name that is not a modality of the vocabulary."""
    for name in names:
        if name not in vocab.modalities:
            raise ConfigError(
                f"{what} is given for the modality {name!r}, which is not in the vocabulary"
                f"{suggest(str(name), vocab.modalities)}"
            )


def check_output(predictions: HeadOutput | Tensor, vocab: VocabSpec) -> None:
    """Raise TrainingError if there are fewer logits than tokens. On a GPU a larger label would end the process."""
    if predictions.shape[-1] < vocab.vocab_size:
        raise TrainingError(
            f"the vocabulary has {vocab.vocab_size} tokens, the model's output only {predictions.shape[-1]}; set "
            f"the model's vocab_size to {vocab.vocab_size}"
        )


class Positions(NamedTuple):
    """Positions of one modality among N targets."""

    rows: Tensor | None
    """(n,) their indices, increasing on the CPU; None if they are all N."""
    targets: Tensor
    """(n,) target tokens, relative to the modality's first id; 0 where the weight is 0."""
    row_weights: Tensor
    """(n,) weights, 1 or larger so that drawn positions represent all; 0 for other tokens."""
    count: Tensor | float  # type: ignore[assignment]  # a tuple has a method of that name
    """Number of the N targets in this modality, drawn or not."""


def count_positions(targets: Tensor, modality: Modality) -> Tensor:
    """Return how many targets are tokens of a modality, as a tensor on the device."""
    return _belong(targets, modality).sum()


def choose_positions(
    targets: Tensor, modality: Modality, most: int | None, generator: torch.Generator | None = None
) -> Positions:
    """Return up to `most` positions of a modality, uniformly drawn; all of them if `most` is None.

    Special tokens (PAD, MISS) and ignored labels belong to no modality. The weights make the sum over the drawn
    positions an unbiased estimate of the sum over all `count` positions. Random numbers come from `generator`, else
    from the device's global generator, and only if there is a choice. On a GPU the host does not synchronise: the
    number of rows is fixed, and uncounted rows have the weight 0.

    >>> targets = torch.tensor([1, 5, 6, -100, 7, 0])
    >>> chosen = choose_positions(targets, Modality("scalar", 5, 3), None)
    >>> chosen.rows, chosen.targets, chosen.count
    (tensor([1, 2, 4]), tensor([0, 1, 2]), 3)
    """
    labels = targets.reshape(-1)
    belongs = _belong(labels, modality)
    local = (labels - modality.base).masked_fill(~belongs, 0)
    if labels.is_cpu:
        rows = belongs.nonzero()[:, 0]
        number, scale = len(rows), 1.0
        if most is not None and number > most:
            drawn = torch.rand(number, generator=generator).topk(most, sorted=False).indices
            rows, scale = rows[drawn.sort().values], number / most
        weights = torch.full((len(rows),), scale)
        return Positions(None if len(rows) == len(labels) else rows, local[rows], weights, number)
    count = belongs.sum()
    if most is None or most >= len(labels):
        return Positions(None, local, belongs.float(), count)
    keys = torch.rand(len(labels), device=labels.device, generator=generator).masked_fill_(~belongs, -1.0)
    drawn, rows = keys.topk(most, sorted=False)
    weights = torch.where(drawn >= 0, count / count.clamp(1, most), 0.0)
    return Positions(rows, local[rows], weights, count)


def _belong(targets: Tensor, modality: Modality) -> Tensor:
    return (targets >= modality.base) & (targets < modality.stop)


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
    """Return `loss_<short name>` of every modality with a reconstruction.

    With `metrics`, losses of other kinds also have `mse_<short name>`, the squared error of the expected value.

    `predictions` are logits (…, V), or hidden states and an output layer that is then applied in chunks; `targets`
    (…) are token ids. Modalities of weight 0 are omitted unless `metrics` is set, and have no gradient.
    """
    names = [name for name in reconstructions if metrics or weights.get(name, 0.0)]
    if not names:
        return {}
    chosen = {name: choose_positions(targets, vocab.modalities[name], sample_k, generator) for name in names}
    losses: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    for learns in (True, False):  # terms that are only reported need no gradients
        some = [name for name in names if (weights.get(name, 0.0) != 0) is learns]
        parts = [LossPart(reconstructions[name], vocab.modalities[name].slice, *chosen[name][:3]) for name in some]
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            if isinstance(predictions, HeadOutput):
                found, squared = expected_value_sums(predictions, parts)
            else:
                found, squared = logits_sums(predictions, parts, metrics=metrics)
        losses |= zip(some, found, strict=True)
        squares |= zip(some, squared, strict=False)  # none without metrics
    terms: Terms = {}
    for name in names:
        terms[f"loss_{short_name(name)}"] = LossTerm(losses[name], chosen[name].count, weights.get(name, 0.0))
        if metrics and reconstructions[name].name != "mse":
            terms[f"mse_{short_name(name)}"] = LossTerm(squares[name], chosen[name].count, 0.0)
    return terms


def logits_sums(logits: Tensor, parts: Sequence[LossPart], *, metrics: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sum of the losses of every part, and with `metrics` that of the squared errors of expected values."""
    losses, squares = list[Tensor](), list[Tensor]()
    rows = logits.reshape(-1, logits.shape[-1])
    blocks = _Blocks.apply(rows, tuple(parts)) if parts else ()  # type: ignore[no-untyped-call]
    kind = torch.float64 if logits.dtype is torch.float64 else torch.float32
    with torch.autocast(logits.device.type, enabled=False):  # values need more precision than bf16
        for part, block in zip(parts, blocks, strict=True):
            wide, weights, own = block.to(kind), part.row_weights.to(kind), part.reconstruction.on(block.device, kind)
            losses.append((own.row_losses(wide, part.targets) * weights).sum())
            if metrics:
                with torch.no_grad():
                    errors = own.errors(torch.softmax(wide, 1), part.targets)
                    squares.append((errors.square_().mean(1) * weights).sum())
    return losses, squares


class _Blocks(torch.autograd.Function):
    """Blocks of a matrix; their gradients share one matrix, where torch's slices would allocate one each."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, parts: tuple[LossPart, ...]) -> Any:
        ctx.shape, ctx.slices = logits.shape, [part.slice for part in parts]
        ctx.save_for_backward(*(part.rows for part in parts))
        return tuple(
            logits[:, part.slice].contiguous()
            if part.rows is None
            else logits[:, part.slice].index_select(0, part.rows)
            for part in parts
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].new_zeros(ctx.shape)
        for grad, columns, rows in zip(grads, ctx.slices, ctx.saved_tensors, strict=True):
            if rows is None:
                total[:, columns] = grad
            else:
                total[:, columns].index_add_(0, rows, grad)
        return total, None
