"""Arrays for config files: .npz, .safetensors, or a folder of .npy files. Reading them never executes code."""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from safetensors import SafetensorError, safe_open

from etude.config.registry import register
from etude.core.errors import DataError
from etude.core.spelling import did_you_mean, listed
from etude.data.catalog.files import MAX_BYTES
from etude.data.catalog.holdout import Share, fingerprint, hold_out, mix_keys, own_files, shares
from etude.data.catalog.rows import Array, ArrayRows, Scaling, digest_blocks
from etude.data.splits import DataSplits, OtherData, check_labels

INPUTS = ("inputs", "x", "X", "data", "images", "features")
LABELS = ("labels", "y", "Y", "targets", "target")
"""Usual names of inputs and labels."""
MAX_RATIO = 100
"""Arrays above MAX_BYTES are not unpacked if this many times larger than in their archive."""


def prepare_arrays(path: Path, facts: Mapping[str, Any], arguments: Mapping[str, Any], labelled: bool) -> OtherData:
    """Return the samples of a file or folder of arrays, or of the inputs in a .npy file."""
    found = read_arrays(path, arguments["inputs"], arguments["labels"], labelled=labelled)
    if (shape := list(found["inputs"].shape[1:])) != facts["shape"]:
        raise DataError(f"{path}: inputs have the shape {shape}, in training {facts['shape']}; use the same shape")
    if labelled and facts["num_classes"] is not None:
        check_labels(found["labels"], facts["num_classes"])
    scaling = Scaling.from_facts(facts) if arguments["standardize"] else None
    return OtherData(ArrayRows(found["inputs"], found.get("labels"), scaling=scaling))


@register("data", "arrays", prepare=prepare_arrays)
def load_arrays(
    path: str,
    inputs: str | None = None,
    labels: str | None = None,
    standardize: bool = True,
    validation: Share | str = 0.1,
    test: Share | str = 0.1,
    seed: Annotated[int, Ge(0)] = 0,
) -> DataSplits:
    """Arrays of inputs and labels, one sample per row.

    Integer labels are classes, other numbers are regression targets. Files are memory-mapped and read as needed,
    except for .npz, which are read at once.

    path: a .npz or .safetensors file, or a folder with .npy files.
    inputs, labels: the names of the arrays (of the files, without .npy); usual names are found.
    standardize: inputs to mean 0 and standard deviation 1 over the training part: per feature of (N, F), per channel
        of (N, C, H, W), else by one number. Without it bytes are scaled to 0 … 1 and other whole numbers stay as they
        are.
    validation, test: another file or folder with the same names, or the share of samples held out, chosen by `seed`.
    """
    main = read_arrays(Path(path).expanduser(), inputs, labels)
    keys = mix_keys(mix_keys(np.array([seed], dtype=np.uint64)) ^ np.arange(len(main["inputs"]), dtype=np.uint64))
    rows = hold_out(keys, *shares(validation, test))
    found = {part: (main, one if len(rows) > 1 else None) for part, one in rows.items()}
    for part, place in own_files(validation, test).items():
        found[part] = read_arrays(place, inputs, labels, like=main), None
    num_classes = _num_classes([arrays["labels"] for arrays, _ in found.values()])
    scaling = Scaling.of(main["inputs"], rows["train"]) if standardize else None
    parts: dict[str, Any] = {
        part: ArrayRows(arrays["inputs"], arrays["labels"], one, scaling=scaling)
        for part, (arrays, one) in found.items()
    }
    facts = {"rows": {part: len(one) for part, one in parts.items()}}
    files = {id(arrays): arrays for arrays, _ in found.values()}.values()
    content = (block for one in files for block in digest_blocks(one))
    digest = fingerprint(content, {"standardize": standardize, "seed": seed, **facts})
    sample = main["labels"].shape[1:]
    return DataSplits(
        **parts,
        num_classes=num_classes,
        num_targets=int(np.prod(sample)) if num_classes is None else None,
        input_shape=main["inputs"].shape[1:],
        facts={
            "fingerprint": digest,
            **facts,
            "shape": list(main["inputs"].shape[1:]),
            "num_classes": num_classes,
            **({} if scaling is None else scaling.facts()),
        },
    )


def _num_classes(labels: list[Array]) -> int | None:
    """Return the number of classes if labels are classes. Raises DataError for an invalid one."""
    if labels[0].ndim > 1 or labels[0].dtype.kind not in "iu":
        return None
    number = max(int(one.max()) for one in labels) + 1
    for one in labels:
        check_labels(torch.from_numpy(one), max(number, 1))
    if number < 2:
        raise DataError("labels has only one class, 0; add samples of others")
    return number


def read_arrays(
    path: Path,
    inputs: str | None,
    labels: str | None,
    like: Mapping[str, Array] | None = None,
    *,
    labelled: bool = True,
) -> dict[str, Array]:
    """Return the arrays `inputs` and, if `labelled`, `labels` of a file or folder."""
    there = _open(path)
    found = {"inputs": there[_name(path, there, None if path.suffix == ".npy" else inputs, INPUTS, "inputs")]}
    if labelled:
        found["labels"] = there[_name(path, there, labels, LABELS, "labels")]
    for name, array in found.items():
        if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
            raise DataError(f"{path}: {name} is of type {array.dtype}; save it as numbers")
        if array.ndim == 0 or not len(array):
            raise DataError(f"{path}: {name} has no samples")
        if like is not None and array.shape[1:] != like[name].shape[1:]:
            raise DataError(
                f"{path}: {name} has the shape {array.shape}, in the training file {like[name].shape}; use the same "
                "shape"
            )
    if labelled:
        if len(found["inputs"]) != len(found["labels"]):
            raise DataError(
                f"{path}: {len(found['inputs'])} inputs and {len(found['labels'])} labels; save equally many"
            )
        found["labels"] = _as_labels(path, found["labels"])
    return found


def _as_labels(path: Path, labels: Array) -> Array:
    """Return classes as int64 (N,), numbers as float32 (N, K)."""
    if labels.dtype.kind in "iub":
        labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
        return np.array(labels, dtype=np.int64)
    numbers: Array = np.array(labels, dtype=np.float32)
    if not np.isfinite(numbers).all():
        bad = int(np.flatnonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(1))[0])
        raise DataError(f"{path}: label {bad} is not finite; fix it")
    return numbers[:, None] if numbers.ndim == 1 else numbers


def _name(path: Path, there: Mapping[str, Any], given: str | None, usual: tuple[str, ...], what: str) -> str:
    if given is not None:
        if given not in there:
            raise DataError(f"{path} has no array {given!r}{did_you_mean(given, there)} (there are: {listed(there)})")
        return given
    name = next((one for one in usual if one in there), None)
    if name is None:
        raise DataError(f"{path} has no array called {' or '.join(usual)} (there are: {listed(there)}); set {what}")
    return name


class ArrayFiles(Mapping[str, Array]):
    """Arrays by name, opened on access."""

    def __init__(self, path: Path, openers: Mapping[str, Any]) -> None:
        self.path, self._openers = path, openers

    def __getitem__(self, name: str) -> Array:
        try:
            array: Array = self._openers[name]()
        except (OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile) as error:
            reason = "it holds Python objects" if "allow_pickle" in str(error) else " ".join(str(error).split())
            raise DataError(f"{self.path}: array {name!r} cannot be read ({reason})") from error
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._openers)

    def __len__(self) -> int:
        return len(self._openers)


def _open(path: Path) -> ArrayFiles:
    """Return the arrays of a file or folder by name. Raises DataError for anything else."""
    try:
        if path.is_dir():
            files = sorted(path.glob("*.npy"))
            return ArrayFiles(path, {file.stem: lambda file=file: np.load(file, mmap_mode="r") for file in files})
        if path.suffix == ".npy":
            path.stat()
            return ArrayFiles(path, {INPUTS[0]: lambda: np.load(path, mmap_mode="r")})
        if path.suffix == ".safetensors":
            file: Any = safe_open(path, "pt")  # as tensors they are mapped, as arrays they would be read
            names = file.keys()
            return ArrayFiles(path, {name: lambda name=name: file.get_tensor(name).numpy() for name in names})
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            return ArrayFiles(path, {name: lambda name=name: _unpacked(path, name) for name in names})
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({' '.join(str(error).split())})") from error
    raise DataError(f"{path} is not a file of arrays; use a .npz or .safetensors file, or a folder of .npy files")


def _unpacked(path: Path, name: str) -> Array:
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{name}.npy")
        if entry.file_size > max(MAX_BYTES, MAX_RATIO * entry.compress_size):
            raise ValueError(
                f"it would unpack from {entry.compress_size:,} to {entry.file_size:,} bytes; save it with np.savez, or "
                f"as .npy in a folder"
            )
        with archive.open(entry) as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array
