"""The loss `meaningful` in config files: codebooks are given as paths, the vocabulary comes from data or `vocab:`."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt
from torch import Tensor

from etude.config import Problem, Selection, register
from etude.core import ConfigError, DataError
from etude.core.spelling import suggest
from etude.losses.strategies import Smoothing
from etude.multimodal.codebooks.loading import load_codebook, load_npz_key
from etude.multimodal.loss import KindName, MeaningfulLoss
from etude.multimodal.vocab import VocabSpec
from etude.trainer.config import Weight

MEANINGFUL = "meaningful"
"""The name of the loss in config files."""
LOSS_PROVIDED = ("vocab", "data_codebooks", "data_edges")
"""What losses are given where their signature asks for it, if the data or the section `vocab` has it."""
NO_VOCABULARY = (
    "the meaningful loss needs a vocabulary, and neither the data nor a `vocab:` section has one; "
    "add `vocab: {image: 2048, …}`, the number of tokens of each modality"
)
OF_A_TASK = (
    "a task learns from one number, and the meaningful loss has one for each modality; "
    "train it by itself, with `loss:` in place of `tasks:`"
)


@register("loss", MEANINGFUL, aliases={"sample_k_per_modality": "sample_k"}, provided=LOSS_PROVIDED)
def meaningful_loss(
    vocab: VocabSpec | None = None,
    data_codebooks: Mapping[str, Tensor] | None = None,
    data_edges: Mapping[str, Tensor] | None = None,
    codebooks: dict[str, str] | None = None,
    weights: dict[str, Weight] | None = None,
    weight: Weight = 0.1,
    kind: KindName | dict[str, KindName] = "mse",
    sample_k: Annotated[int, Ge(1)] | None = 4096,
    use_ce: bool = True,
    huber_delta: Annotated[float, Gt(0)] = 1.0,
    hl_sigma: Annotated[float, Gt(0)] = 0.75,
    shift: bool | None = None,
    ignore_index: int = -100,
    label_smoothing: Smoothing = 0.0,
    fused_head: bool | str | None = None,
) -> MeaningfulLoss:
    """Cross entropy with tokens of several modalities, and the error of the values they stand for.

    codebooks: files with the values of a modality's tokens (.safetensors, .npz, .npy, .joblib), by modality; the
        others are those of the data.
    weights: how much the reconstruction of a modality counts, by modality; `weight` for the others.
    kind: how values are compared: mse, huber, hl_gauss or wasserstein; one for all modalities, or by modality.
    sample_k: positions of a batch that are drawn for each modality; null looks at all of them.
    use_ce: false leaves cross entropy out.
    huber_delta: where Huber's loss becomes linear, in the units of the values.
    hl_sigma: width of HL-Gauss's Gaussian, in bins.
    fused_head: as for `language_modeling`; by default, where the model allows it.
    """
    if vocab is None:
        raise ConfigError(NO_VOCABULARY)
    for argument, given in (("weights", weights), ("kind", kind), ("codebooks", codebooks)):
        for name in given if isinstance(given, Mapping) else ():
            if name not in vocab.modalities:
                raise ConfigError(f"{argument}.{name}: {no_modality(name, vocab.modalities)}")
    own = {name: read_codebook(path, name, vocab) for name, path in (codebooks or {}).items()}
    return MeaningfulLoss(
        vocab,
        {**(data_codebooks or {}), **own},
        weights=weights,
        weight=weight,
        kind=kind,
        sample_k=sample_k,
        use_ce=use_ce,
        huber_delta=huber_delta,
        hl_sigma=hl_sigma,
        edges={name: values for name, values in (data_edges or {}).items() if name not in own},
        shift=shift,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        fused_head=fused_head,
    )


def read_codebook(path: str, name: str, vocab: VocabSpec) -> Tensor:
    """Return the values of a modality's tokens; raise DataError if the file does not hold one for every token."""
    values = load_npz_key(path) if path.endswith(".npz") else load_codebook(path)
    size = vocab.range_of(name).size
    if len(values) != size:
        raise DataError(
            f"{path} has {len(values)} values, but the modality '{name}' has {size} tokens; there must be one for each"
        )
    return values


def loss_problems(path: str, loss: Selection, vocab: VocabSpec) -> Iterator[Problem]:
    """Yield what is wrong with a meaningful loss for this vocabulary; codebook files are looked at where they exist."""
    for key in ("weights", "kind", "codebooks"):
        given = loss.arguments.get(key)
        for name in given if isinstance(given, Mapping) else ():
            if name not in vocab.modalities:
                yield Problem(f"{path}.{key}.{name}", no_modality(name, vocab.modalities))
    codebooks: Mapping[str, Any] = loss.arguments.get("codebooks") or {}
    for name, file in codebooks.items():
        if name in vocab.modalities and Path(file).expanduser().is_file():
            try:
                read_codebook(file, name, vocab)
            except (ConfigError, DataError) as error:
                yield Problem(f"{path}.codebooks.{name}", str(error))


def no_modality(name: str, known: Collection[str]) -> str:
    """Return the message about a modality that the vocabulary does not have.

    >>> no_modality("imgae", ["image", "scalar"])
    "the vocabulary has no modality 'imgae'; did you mean 'image'? (there are: image, scalar)"
    """
    return f"the vocabulary has no modality '{name}'{suggest(name, known)}"
