"""Codebooks from files: the centroids or bin centres that tokens represent, as one float32 tensor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from etude.core.errors import ConfigError, DataError
from etude.core.spelling import did_you_mean, nearest
from etude.multimodal.joblib_files import read_joblib

CODEBOOK_KEYS = ("centroids", "codebook", "centers", "cluster_centers_", "values")
NPZ_KEYS = ("bin_centers", "centers", "quantile_centers", "centroids", "codebook", "values")
_JOBLIB = (".joblib", ".pkl", ".pickle")
_COMPRESSED = (".z", ".gz", ".bz2", ".xz", ".lzma")


def load_codebook(path: str | Path, key_candidates: Sequence[str] = CODEBOOK_KEYS) -> Tensor:
    """Load a codebook, (V,) or (V, D), from a .joblib, .npz, .npy or .safetensors file as float32 on the CPU.

    The first of `key_candidates` in the file is used; in a joblib file also one level down, as in a dict with a
    fitted KMeans. A dotted name (`model.kmeans.cluster_centers_`) goes further down. A file with a single array needs
    no key. joblib files are read without executing their contents. Raises DataError if no key is found or the array
    is not a codebook: empty, not real, with NaN or infinity, or not of one or two dimensions.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "codebook.npz"
    >>> np.savez(path, centroids=np.arange(6.0).reshape(3, 2))
    >>> load_codebook(path)
    tensor([[0., 1.],
            [2., 3.],
            [4., 5.]])
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    while len(suffixes) > 1 and suffixes[-1] in _COMPRESSED and suffixes[-2] in _JOBLIB:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    return _load(path, ".joblib" if suffix in _JOBLIB else suffix, key_candidates)


def load_npz_key(path: str | Path, key_candidates: Sequence[str] = NPZ_KEYS) -> Tensor:
    """Load the first of `key_candidates` in an .npz file, (V,) or (V, D), as float32 on the CPU.

    Raises DataError as `load_codebook` does.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "scalar.npz"
    >>> np.savez(path, edges=[0.0, 1.0, 3.0], bin_centers=[0.5, 2.0])
    >>> load_npz_key(path)
    tensor([0.5000, 2.0000])
    """
    return _load(path, ".npz", key_candidates)


def _read(path: Path, suffix: str, candidates: tuple[str, ...]) -> Any:
    """Return the array of a file, or its contents by name."""
    if suffix == ".joblib":
        return read_joblib(path, candidates)
    if suffix == ".safetensors":
        return safetensors.torch.load(path.read_bytes())
    with path.open("rb") as file:
        if suffix == ".npy":
            return np.lib.format.read_array(file, allow_pickle=False)
        with np.load(file, allow_pickle=False) as archive:
            chosen = next((name for name in candidates if name in archive.files), None)
            return dict.fromkeys(archive.files) if chosen is None else archive[chosen]


def _load(path: str | Path, suffix: str, key_candidates: Sequence[str]) -> Tensor:
    path = Path(path).expanduser()
    if isinstance(key_candidates, str) or not all(isinstance(name, str) for name in key_candidates):
        raise ConfigError(f"key_candidates must be a list of names, not {key_candidates!r}")
    if suffix not in (".joblib", ".npz", ".npy", ".safetensors"):
        raise DataError(
            f"{path}: a codebook must be a .joblib, .pkl, .npz, .npy or .safetensors file; write it with "
            "numpy.savez(path, centroids=array)"
        )
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*")]
        raise DataError(f"{path}: no such file{did_you_mean(path.name, beside)}")
    candidates = tuple(key_candidates)
    try:
        found = _read(path, suffix, candidates)
    except DataError:
        raise
    except Exception as error:  # damaged files can raise anything
        words = " ".join(str(error).split())[:160] or type(error).__name__
        raise DataError(
            f"{path}: damaged, or not what its name says: {words}; copy it again, or write it with numpy.savez"
        ) from error
    if isinstance(found, Mapping):
        found = found[_choose(path, found, candidates)]
    return _as_codebook(found, str(path))


def _choose(path: Path, found: Mapping[str, Any], candidates: tuple[str, ...]) -> str:
    """Return the name of the array: names at the top level come first."""
    arrays = [name for name, value in found.items() if isinstance(value, (np.ndarray, Tensor))]
    for candidate in candidates:
        if candidate in arrays:
            return candidate
    for candidate in candidates:
        deeper = [name for name in arrays if name.endswith(f".{candidate}")]
        if len(deeper) > 1:
            raise DataError(f"{path}: {len(deeper)} arrays fit; pass one of key_candidates={tuple(deeper[:12])}")
        if deeper:
            return deeper[0]
    names = arrays or list(found)
    close = next(filter(None, (nearest(one, names) for one in candidates)), names[0] if names else "…")
    holds = [
        f"{name!r} ({' '.join(value.split())})" if isinstance(value, str) else repr(name)
        for name, value in found.items()
    ]
    more = f" and {len(holds) - 12} more" if len(holds) > 12 else ""
    raise DataError(
        f"{path}: none of {', '.join(map(repr, candidates))} is an array in the file, which holds "
        f"{', '.join(holds[:12]) or 'nothing by name'}{more}; pass its name, such as key_candidates=({close!r},), or "
        f"write the array with numpy.savez(path, centroids=array)"
    )


def _as_codebook(array: Any, where: str) -> Tensor:
    """Return the array as a new float32 tensor, or raise DataError if it is not a codebook."""
    is_real = array.dtype.kind in "iuf" if isinstance(array, np.ndarray) else isinstance(array, Tensor)
    if isinstance(array, np.ndarray) and is_real:
        with np.errstate(over="ignore", invalid="ignore"):  # rejected below
            array = torch.from_numpy(np.array(array, np.float32, order="C"))
    if not is_real or array.is_complex() or array.dtype == torch.bool:
        found = " ".join(str(array.dtype if isinstance(array, (np.ndarray, Tensor)) else array).split())
        raise DataError(
            f"{where}: found {found:.60}, not real numbers; write it with numpy.savez(path, centroids=array)"
        )
    if array.dim() not in (1, 2) or not array.numel():
        raise DataError(f"{where}: the array has the shape {tuple(array.shape)}; a codebook is (V,) or (V, D)")
    values: Tensor = array.to(torch.float32, copy=True).contiguous()
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).nonzero()[0, 0])
        raise DataError(f"{where}: entry {row} is NaN, infinite, or too large for float32; remove such entries")
    return values
