"""Codebooks from files: the centroids or bin centres that tokens stand for, as one float32 tensor."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from etude.core.errors import ConfigError, DataError
from etude.core.spelling import did_you_mean, nearest, shorten
from etude.multimodal.codebooks.array_files import Array, Entry, npy_entries, npz_entries, safetensors_entries

CODEBOOK_KEYS = ("centroids", "codebook", "centers", "cluster_centers_", "values")
NPZ_KEYS = ("bin_centers", "centers", "quantile_centers", "centroids", "codebook", "values")
_JOBLIB = (".joblib", ".pkl", ".pickle")
_COMPRESSED = (".z", ".gz", ".bz2", ".xz", ".lzma", ".lz4")
_READERS = {".npz": npz_entries, ".npy": npy_entries, ".safetensors": safetensors_entries}
_LISTED = 12


def load_codebook(path: str | Path, key_candidates: Sequence[str] = CODEBOOK_KEYS) -> Tensor:
    """Load a codebook, (V,) or (V, D), from a .joblib, .npz, .npy or .safetensors file as float32 on the CPU.

    The first of `key_candidates` that the file holds is taken; in a joblib file also one level down, as in a dict with
    a fitted KMeans. A name with dots (`model.kmeans.cluster_centers_`) leads further down. A file that is one array
    needs no key. joblib files are opened without executing what is in them. Raises DataError if nothing fits or the
    array is no codebook: empty, not of real numbers, with NaN or infinity, of other than one or two dimensions.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "codebook.npz"
    >>> np.savez(path, centroids=np.arange(6.0).reshape(3, 2))
    >>> load_codebook(path)
    tensor([[0., 1.],
            [2., 3.],
            [4., 5.]])
    """
    path, candidates = _existing(path), _checked(key_candidates)
    suffix = path.suffix.lower()
    if suffix in _JOBLIB or (suffix in _COMPRESSED and Path(path.stem).suffix.lower() in _JOBLIB):
        try:
            from etude.multimodal.codebooks.joblib_files import joblib_entries
        except ImportError as error:
            raise DataError(f"{path}: joblib files need joblib: pip install 'etude[joblib]'") from error
        return _load(path, joblib_entries(path, candidates), candidates)
    if suffix not in _READERS:
        raise DataError(
            f"{path}: a codebook is a file .joblib, .pkl, .npz, .npy or .safetensors, not "
            f"{repr(suffix) if suffix else 'one without a suffix'}; write it with numpy.savez(path, centroids=array)"
        )
    return _load(path, _READERS[suffix](path), candidates)


def load_npz_key(path: str | Path, key_candidates: Sequence[str] = NPZ_KEYS) -> Tensor:
    """Load the first of `key_candidates` that an .npz file holds, (V,) or (V, D), as float32 on the CPU.

    Raises DataError as `load_codebook` does.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "scalar.npz"
    >>> np.savez(path, edges=[0.0, 1.0, 3.0], bin_centers=[0.5, 2.0])
    >>> load_npz_key(path)
    tensor([0.5000, 2.0000])
    """
    path, candidates = _existing(path), _checked(key_candidates)
    if path.suffix.lower() != ".npz":
        raise DataError(f"{path}: load_npz_key reads .npz files; load_codebook reads others, too")
    return _load(path, npz_entries(path), candidates)


def _existing(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"{path}: this is a folder; give the codebook file in it")
    if not path.exists():
        beside = [file.name for file in path.parent.glob("*")]
        raise DataError(f"{path}: no such file{did_you_mean(path.name, beside)}")
    return path


def _checked(candidates: Sequence[str]) -> tuple[str, ...]:
    if isinstance(candidates, str):
        raise ConfigError(f"key_candidates is a list of names: pass key_candidates=({candidates!r},)")
    if not candidates or not all(isinstance(name, str) for name in candidates):
        raise ConfigError(f"key_candidates must be one or more names, not {candidates!r}")
    return tuple(candidates)


def _load(path: Path, entries: list[Entry], candidates: tuple[str, ...]) -> Tensor:
    entry = _choose(path, entries, candidates)
    where = f"{path}, {entry.name!r}" if entry.keys else str(path)
    return _as_codebook(entry.read(), where)


def _choose(path: Path, entries: list[Entry], candidates: tuple[str, ...]) -> Entry:
    """Return the entry to read: arrays before other things, and the top of the file before what is further down."""
    if len(entries) == 1 and not entries[0].keys:
        return entries[0]
    for arrays_only in (True, False):
        usable = [entry for entry in entries if entry.is_array or not arrays_only]
        for candidate in candidates:
            for entry in usable:
                if entry.name == candidate:
                    return entry
        for candidate in candidates:
            deeper = [entry for entry in usable if len(entry.keys) > 1 and entry.keys[-1] == candidate]
            if len(deeper) > 1:
                names = ", ".join(repr(entry.name) for entry in deeper[:_LISTED])
                raise DataError(
                    f"{path}: {len(deeper)} entries fit: {names}; pass {_remedy(deeper[0].name)} or another"
                )
            if deeper:
                return deeper[0]
    raise DataError(_missing(path, entries, candidates))


def _missing(path: Path, entries: list[Entry], candidates: tuple[str, ...]) -> str:
    """Return the message for a file without the names looked for; it names what is there and the likeliest."""
    wanted = ", ".join(repr(name) for name in candidates)
    if not entries:
        return f"{path}: the file holds no arrays; looked for {wanted}"
    arrays = [entry for entry in entries if entry.is_array]
    shown = [entry for entry in arrays + [entry for entry in entries if not entry.is_array] if entry.name][:_LISTED]
    more = f" and {len(entries) - len(shown)} more" if len(entries) > len(shown) else ""
    holds = ", ".join(f"{shorten(entry.name)!r} ({entry.what})" for entry in shown) + more
    names = {entry.keys[-1].lower(): entry.name for entry in reversed(arrays)}
    close = next(filter(None, (nearest(name, list(names)[:1000]) for name in candidates)), None)
    hint = ""
    if close is not None:
        hint = f"; did you mean '{shorten(names[close])}'? pass {_remedy(names[close])}"
    elif arrays:
        hint = f"; pass {_remedy(arrays[0].name)}" + (" or another" if len(arrays) > 1 else "")
    return f"{path}: none of {wanted} is in the file, which holds {holds}{hint}"


def _remedy(name: str) -> str:
    return f"key_candidates=({name!r},)" if len(name) <= 200 else "its name as key_candidates"


def _as_codebook(array: Array | Tensor, where: str) -> Tensor:
    """Return the array as a float32 tensor of its own, or say why it is no codebook."""
    shape = tuple(array.shape)
    if len(shape) not in (1, 2):
        raise DataError(f"{where}: the array has the shape {shape}; a codebook is (V,) or (V, D)")
    if 0 in shape:
        raise DataError(f"{where}: the array is empty, its shape is {shape}; a codebook has at least one entry")
    if isinstance(array, Tensor):
        is_real = not array.is_complex() and array.dtype != torch.bool
    else:
        is_real = array.dtype.kind in "iuf"
    if not is_real:
        name = str(array.dtype).removeprefix("torch.")
        raise DataError(f"{where}: the array has dtype {name}; a codebook has real numbers (floats or integers)")
    if isinstance(array, Tensor):
        values = array.to(torch.float32, copy=True).contiguous()
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            values = torch.from_numpy(np.array(array, np.float32, order="C"))
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        bad, row = f"{int((~finite).sum())} of {values.numel()} values", int((~finite).nonzero()[0, 0])
        given = array.double().isfinite().all() if isinstance(array, Tensor) else np.isfinite(array).all()
        if bool(given):
            raise DataError(f"{where}: {bad} are too large for float32, the first in entry {row}; scale them down")
        raise DataError(
            f"{where}: {bad} are NaN or infinite, the first in entry {row}; remove such entries or fit it again"
        )
    return values
