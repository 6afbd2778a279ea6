"""What token files and the modalities beside them tell about ids and types, and whether they fit."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from etude.core.errors import DataError
from etude.data.tokens import TokenFile
from etude.data.tokens.places import is_remote
from etude.data.tokens.vectors import chunks
from etude.multimodal.folder import TOKENIZERS, VOCAB_FILE, Modalities, has_vocabulary, read_modalities
from etude.multimodal.vocab import VocabSpec
from etude.multimodal.writer import TYPES


def modal_fields(
    modal: Modalities | None, files: Collection[TokenFile], vocab_size: int | None = None
) -> dict[str, Any]:
    """Return what `DataSplits` holds of ids, types and modalities; raises DataError if files do not fit them.

    vocab_size: what the user says, to be taken in place of what files and vocabulary tell.
    """
    if modal is None:
        _refuse_modal(files)
        sizes = [file.vocab_size for file in files if file.vocab_size is not None]
        size = vocab_size if vocab_size is not None else max(sizes, default=None)
        return {"vocab_size": size, "num_types": num_types(files, None)}
    vocab = modal.vocab
    if vocab_size is not None and vocab_size < vocab.vocab_size:
        raise DataError(
            f"vocab_size is {vocab_size}, but vocab.json has {vocab.vocab_size} tokens; leave it out, or raise it"
        )
    for file in files:
        check_vocabulary(file, vocab)
    return {
        "vocab_size": vocab.vocab_size if vocab_size is None else vocab_size,
        "num_types": num_types(files, vocab),
        "vocab": vocab,
        "codebooks": modal.codebooks,
        "edges": modal.edges,
    }


def shared_modalities(roots: Mapping[str, str]) -> Modalities | None:
    """Return what all folders of a mixture share; raises DataError if their ids or codes mean different things."""
    found = {name: read_modalities(root) if has_vocabulary(root) else None for name, root in roots.items()}
    first, shared = next(iter(found.items()), ("", None))
    for name, modal in found.items():
        if (shared is None) != (modal is None) or (shared is not None and not shared.equals(modal)):
            raise DataError(
                f"{first} and {name} have different vocabularies or tokenizers, so their ids mean different things; "
                f"make them with the same vocab.json and tokenizers"
            )
    return shared


def check_vocabulary(file: TokenFile, vocab: VocabSpec) -> None:
    """Raise DataError if the ids of a file mean something else, or lie outside the vocabulary.

    A file that tells neither its vocabulary nor its size is read once, from end to end, unless it is a remote one.
    """
    told = file.meta.get("vocab")
    if told is not None and told != vocab.to_dict():
        raise DataError(f"{file.path} was written for another vocabulary than vocab.json beside it; make it anew")
    if told is None and (found := _limit(file)) is not None and found > vocab.vocab_size:
        raise DataError(
            f"{file.path} has ids up to {found - 1:,}, but vocab.json beside it has {vocab.vocab_size:,} tokens; "
            f"they do not belong together"
        )


def num_types(files: Iterable[TokenFile], vocab: VocabSpec | None) -> int | None:
    """Return how many types there are in the stream `types`: as the files tell, else as the vocabulary does."""
    known = [_told_types(file, vocab) for file in files if TYPES in file.streams]
    found = [number for number in known if number is not None]
    return max(found, default=None)


def _refuse_modal(files: Iterable[TokenFile]) -> None:
    """Raise DataError if a file tells of modalities: without them its ids would be taken for those of text."""
    for file in files:
        told = file.meta.get("vocab")
        if isinstance(told, Mapping) and "modalities" in told:
            raise DataError(
                f"{file.path} was written for several modalities, but there is no {VOCAB_FILE} beside it; "
                f"copy it there with the folder {TOKENIZERS}, or write both with write_modalities"
            )


def _told_types(file: TokenFile, vocab: VocabSpec | None) -> int | None:
    told: Any = file.meta.get("num_types")
    if told is None:
        return None if vocab is None else vocab.num_types
    if type(told) is not int or told < 1:
        raise DataError(f"{file.path} has num_types {told!r} in its facts; it must be a whole number of at least 1")
    return told


def _limit(file: TokenFile) -> int | None:
    """The number that all ids of a file are below; None if nothing is known."""
    if file.vocab_size is not None or is_remote(file.path):
        return file.vocab_size
    largest = -1
    for _, ids in chunks(file.vectors[None]):
        largest = max(largest, int(ids.max()))
    return largest + 1
