"""Building the data: fetch, correct, choose, fit tokenizers on the training split, write; whole or not at all."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.core.errors import DataError
from etude.corpus.report import folder_lock, write_json
from etude.multimodal import MultimodalWriter, ScalarTokenizer, Tokenizer, VectorTokenizer, write_modalities
from etude.multimodal.vocab import VocabSpec, build_vocab_spec
from stars.catalogue import Catalogue, correct, fetch, read, take
from stars.curves import PATCH_SIZE
from stars.layout import COLUMNS, PLACES, SCALARS, Values, class_of, columns_of, place_of, values_of
from stars.options import SPLITS, Options, choose, split_of

SCHEMA, PARTIAL, TRUTH = "schema.json", ".partial", "truth"
VERSION = 1
Tell = Callable[[str], None]
Tokenizers = Mapping[str, Tokenizer]


@dataclass(frozen=True)
class Stars:
    """The stars of a split, with their values and the numbers of their places and classes."""

    ids: list[str]
    places: NDArray[np.int64]
    classes: NDArray[np.int64]
    values: Values


def prepare(
    out: str | Path,
    options: Options,
    *,
    root: str | None = None,
    download: bool = True,
    overwrite: bool = False,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Build the data into `out` and return its schema; what is there and made with these options is left as it is.

    Killed at any time, it leaves no schema and is begun again. Several processes may call this at once: one builds,
    the others wait. Raises DataError, also if `out` holds data made with other options and `overwrite` is not set.
    """
    folder = Path(out).expanduser()
    if (folder / SCHEMA).exists() and not overwrite:
        return _compared(folder, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=True):
            if (folder / SCHEMA).exists() and not overwrite:  # another process has made it in the meantime
                return _compared(folder, options)
            try:
                return _build(folder, options, correct(read(fetch(root, download=download))), tell)
            finally:
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error


def read_schema(folder: str | Path) -> dict[str, Any]:
    """Return what a folder's schema.json says. Raises DataError if there is none, or a file of the data is gone."""
    path = Path(folder).expanduser() / SCHEMA
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is not there; make the data with prepare.py --out {folder}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); make the data with prepare.py --overwrite") from error
    if not isinstance(schema, dict) or schema.get("version") != VERSION:
        raise DataError(f"{path} is of another version; make the data with prepare.py --out {folder} --overwrite")
    for name in schema["files"]:
        if not (path.parent / name).is_file():
            raise DataError(f"{path.parent} has no {name}; make the data again with prepare.py --overwrite")
    return schema


def stars_of(catalogue: Catalogue, classes: list[str], rows: list[int]) -> Stars:
    """Return the stars in some rows of a catalogue."""
    part = take(catalogue, np.array(rows, np.int64))
    kinds = [class_of(*pair) for pair in zip(part.types, part.subtypes, strict=True)]
    return Stars(
        part.ids,
        np.array([PLACES.index(place_of(star)) for star in part.ids]),
        np.array([classes.index(kind) for kind in kinds]),
        values_of(part),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fit(stars: Stars, options: Options, num_classes: int) -> dict[str, Tokenizer]:
    """Return the tokenizers of all modalities that have one, by name, fit to these stars.

    Classes have one-hot vectors: the expected one is the vector of probabilities, and its squared error is Brier's
    score. Places have none: nothing but cross entropy learns them.
    """
    fitted: dict[str, Tokenizer] = {}
    for modality in SCALARS:
        columns = [stars.values.scalars[COLUMNS[place][0]] for place in columns_of(modality)]
        fitted[modality] = ScalarTokenizer.fit(np.concatenate(columns), options.bins)
    patches = stars.values.patches.reshape(-1, PATCH_SIZE)
    with _one_thread():  # sums of several would differ in their last digits, and codebooks with them
        fitted["image"] = VectorTokenizer.fit(patches, options.image_codes)
        fitted["spectrum"] = VectorTokenizer.fit(stars.values.spectrum, options.spectrum_codes)
    fitted["class"] = VectorTokenizer(torch.eye(num_classes))
    return fitted


def make_vocab(tokenizers: Tokenizers) -> VocabSpec:
    """Return the vocabulary: special tokens, then a range for each modality."""
    sizes = {name: tokenizer.size for name, tokenizer in tokenizers.items() if name not in ("image", "spectrum")}
    return build_vocab_spec(
        v_image=tokenizers["image"].size,
        v_spectra=tokenizers["spectrum"].size,
        modalities={"place": len(PLACES), **sizes},
    )


def codes_of(stars: Stars, tokenizers: Tokenizers) -> list[tuple[str, Tensor]]:
    """Return the modality and the codes, (N,) or (N, patches), of every part of a sequence after BOS; -1 is missing."""
    codes = [("place", torch.from_numpy(stars.places))]
    for name, modality in COLUMNS:
        if modality in SCALARS:
            codes.append((modality, tokenizers[modality].encode(stars.values.scalars[name])))
    codes.append(("image", tokenizers["image"].encode(stars.values.patches)))
    codes.append(("spectrum", tokenizers["spectrum"].encode(stars.values.spectrum)))
    return [*codes, ("class", torch.from_numpy(stars.classes))]


def _build(out: Path, options: Options, catalogue: Catalogue, tell: Tell) -> dict[str, Any]:
    work = out / PARTIAL
    shutil.rmtree(work, ignore_errors=True)
    (work / TRUTH).mkdir(parents=True)
    kinds = [class_of(*pair) for pair in zip(catalogue.types, catalogue.subtypes, strict=True)]
    rows, classes = choose(catalogue.ids, kinds, options)
    tell(f"{len(catalogue):,} stars in the catalogue, {len(rows):,} taken of {len(classes)} classes")
    by_split: dict[str, list[int]] = {split: [] for split in SPLITS}
    for row in rows:
        by_split[split_of(catalogue.ids[row], options)].append(row)
    if empty := [split for split, mine in by_split.items() if not mine]:
        raise DataError(f"there are no stars for {' and '.join(empty)}; take more per class, or larger shares")
    stars = {split: stars_of(catalogue, classes, mine) for split, mine in by_split.items()}
    tokenizers = fit(stars["train"], options, len(classes))
    tell(f"fit {len(tokenizers)} tokenizers to the training split")
    vocab = make_vocab(tokenizers)
    write_modalities(work, vocab, tokenizers)
    missing = {}
    for split in SPLITS:
        codes = codes_of(stars[split], tokenizers)
        with MultimodalWriter(work / f"{split}.bin", vocab) as writer:
            writer.add_rows(["BOS", *codes])
        _write_truth(work / TRUTH / f"{split}.safetensors", stars[split])
        missing[split] = [0, *(int(n) for _, part in codes for n in (part < 0).sum(0).reshape(-1))]
        tell(f"{split}: {len(stars[split].ids):,} stars")
    names = [name.relative_to(work).as_posix() for name in sorted(work.rglob("*")) if name.is_file()]
    schema = {
        "version": VERSION,
        "options": options.facts(),
        "classes": classes,
        "columns": [name for name, _ in COLUMNS],
        "stars": {split: len(one.ids) for split, one in stars.items()},
        "stars_by_class": {
            split: dict(sorted(Counter(classes[code] for code in one.classes).items()))
            for split, one in stars.items()
        },
        "missing_by_column": missing,
        "corrected": dict(catalogue.corrected),
        "files": names,
    }
    _put_in_place(work, out, schema)
    return schema


def read_truth(folder: str | Path, split: str) -> dict[str, NDArray[Any]]:
    """Return the values of a split's stars before they became tokens: columns by name, `spectrum`, `curve`, `class`."""
    return safetensors.numpy.load_file(Path(folder).expanduser() / TRUTH / f"{split}.safetensors")


def _write_truth(path: Path, stars: Stars) -> None:
    values = {**stars.values.scalars, "spectrum": stars.values.spectrum, "curve": stars.values.curve}
    arrays = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in values.items()}
    names = np.array([star.ljust(32).encode() for star in stars.ids], "S32").view(np.uint8).reshape(-1, 32)
    safetensors.numpy.save_file({**arrays, "class": stars.classes, "id": np.ascontiguousarray(names)}, path)
    path.chmod(0o644)


def _put_in_place(work: Path, out: Path, schema: dict[str, Any]) -> None:
    """Move finished files to their place; the schema goes first and comes last, so that it never speaks of half."""
    (out / SCHEMA).unlink(missing_ok=True)
    for part in sorted(work.iterdir()):
        target = out / part.name
        if target.is_dir():
            shutil.rmtree(target)
        part.replace(target)
    write_json(out / SCHEMA, schema)


def _compared(folder: Path, options: Options) -> dict[str, Any]:
    schema = read_schema(folder)
    was, now = schema["options"], options.facts()
    if other := [name for name in now if was.get(name) != now[name]]:
        changed = ", ".join(f"{name} {was.get(name)}, not {now[name]}" for name in other)
        raise DataError(
            f"{folder} was made with {changed}; make it again with prepare.py --overwrite, or give another out"
        )
    return schema
