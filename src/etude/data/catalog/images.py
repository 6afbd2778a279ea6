"""Folders of images for config files: one folder per class, decoded by Pillow, in memory if they fit."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt
from torch.utils.data import get_worker_info

from etude.config.registry import Section, register
from etude.core.errors import ConfigError, DataError
from etude.core.spelling import listed
from etude.data.catalog.augment import Augmentations
from etude.data.catalog.files import logger
from etude.data.catalog.holdout import Rows, Share, fingerprint, hold_out, own_files, shares
from etude.data.catalog.rows import Array, ArrayRows, Scaling
from etude.data.splits import DataSplits, OtherData

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".pbm", ".tif", ".tiff"))
OTHER_SUFFIXES = frozenset(
    (".avif", ".heic", ".heif", ".jfif", ".jp2", ".jxl", ".svg", ".tga", ".dng", ".cr2", ".nef")
)
"""Extensions of images that are not read."""
SPLIT_FOLDERS = {"validation": ("validation", "val", "valid"), "test": ("test",)}
IN_MEMORY_BYTES = 2**30
"""Decoded images up to this total size are kept in memory."""
SAMPLED_IMAGES = 2000
"""Number of training images for computing mean and standard deviation."""
_THREADS = min(8, os.cpu_count() or 1)

Size = Annotated[int, Gt(0)]
Fit = Literal["crop", "stretch"]


def prepare_images(path: Path, facts: Mapping[str, Any], arguments: Mapping[str, Any], labelled: bool) -> OtherData:
    """Return the images of a folder, named by their paths: in one folder per class if labels are read."""
    if labelled:
        files = _images_in(path)
        _refuse_unknown(files, path, facts["classes"])
        labels = np.array([facts["classes"].index(_class_of(file, path)) for file in files], dtype=np.int64)
    else:
        files = _all_images(path)
    if not files:
        raise DataError(f"{path} has no images ({listed(sorted(SUFFIXES))})")
    images = DecodedImages(files, tuple(facts["shape"]), arguments["fit"])
    found, kept = _decode_all(images, keep=False, skip_broken=arguments["skip_broken"])
    rows = ArrayRows(found, labels[kept] if labelled else None, scaling=Scaling.from_facts(facts, 255.0))
    return OtherData(rows, [files[row].relative_to(path).as_posix() if path.is_dir() else str(path) for row in kept])


def _all_images(path: Path) -> list[Path]:
    """Return an image, or all images of a folder and of the folders in it, sorted by path."""
    if not path.exists():
        raise DataError(f"{path} does not exist; check the path")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.name.startswith(".")]
    found = [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


@register("data", "image_folder", prepare=prepare_images, check_installed=lambda _: _pillow())
def load_image_folder(
    path: str,
    size: Size | tuple[Size, Size] | None = None,
    channels: Literal[1, 3] = 3,
    fit: Fit = "crop",
    mean: list[float] | None = None,
    std: list[Annotated[float, Gt(0)]] | None = None,
    augment: list[Annotated[Any, Section("augmentation")]] | None = None,
    validation: Share | str = 0.1,
    test: Share | str = 0.1,
    seed: Annotated[int, Ge(0)] = 0,
    skip_broken: bool = False,
    in_memory: bool | None = None,
) -> DataSplits:
    """Images in one folder per class: path/cat/*.jpg, or path/train/cat/*.jpg.

    path: the folder. Folders train, validation (or val) and test in it are the parts, if there is a train.
    size: height and width, or one number for both; that of the first image by default.
    channels: 3 for color, 1 for gray.
    fit: images of another shape are center-cropped (`crop`) or distorted (`stretch`).
    mean, std: per channel, in units of 0 … 1; computed from up to 2,000 training images by default.
    augment: random augmentations of training images, by name: horizontal_flip, vertical_flip, random_crop,
        color_jitter.
    validation, test: a folder, or the share of training images held out where there is no folder of that name. Which
        images depends on their paths and `seed`.
    skip_broken: skip images that cannot be decoded, with a warning; otherwise they are an error.
    in_memory: keep decoded images; by default if they take at most 1 GiB. Others are decoded batch by batch, by
        threads, or by the worker processes of `training.num_workers`.
    """
    folder = Path(path).expanduser()
    found = find_images(folder, validation, test, seed)
    files = [file for part in found.parts.values() for file in part]
    shape = (channels, *_size(files, size, skip_broken=skip_broken))
    images = DecodedImages(files, shape, fit)
    fits = len(images) * int(np.prod(shape)) <= IN_MEMORY_BYTES
    arrays, kept = _decode_all(images, keep=fits if in_memory is None else in_memory, skip_broken=skip_broken)
    rows = found.rows(kept)
    labels = found.labels()[kept]
    counts = np.bincount(labels[rows["train"]], minlength=len(found.classes)) if "train" in rows else np.zeros(1)
    if not counts.all():
        raise DataError(f"{folder}: class {found.classes[int(np.argmin(counts))]!r} has no training image; add one")
    scaling = _scaling(arrays, rows["train"], channels, mean, std)
    change = Augmentations(augment) if augment else None
    parts: dict[str, Any] = {
        part: ArrayRows(arrays, labels, one, scaling=scaling, augment=change if part == "train" else None)
        for part, one in rows.items()
    }
    numbers = {"mean": (scaling.mean / 255).tolist(), "std": (scaling.std / 255).tolist()}
    facts = {"classes": found.classes, "rows": {part: len(one) for part, one in parts.items()}}
    content = found.listing(kept, with_content=isinstance(arrays, np.ndarray))
    digest = fingerprint(content, {**facts, "shape": shape, "fit": fit, "mean": mean, "std": std})
    return DataSplits(
        **parts,
        num_classes=len(found.classes),
        input_shape=shape,
        facts={"fingerprint": digest, **facts, **numbers, "shape": list(shape)},
    )


# ------------------------------------------------------------------------------------------------ finding


@dataclass(frozen=True, slots=True)
class FoundImages:
    """The images of each part, in path order."""

    classes: list[str]
    parts: dict[str, list[Path]]
    roots: dict[str, Path]
    """The folder of the class folders, for each part."""

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the class of every image."""
        place = {name: number for number, name in enumerate(self.classes)}
        found = [place[_class_of(file, self.roots[part])] for part, files in self.parts.items() for file in files]
        return np.array(found, dtype=np.int64)

    def rows(self, kept: Rows) -> dict[str, Rows]:
        """Return the indices of the `kept` images of each part."""
        bounds = np.cumsum([0, *(len(files) for files in self.parts.values())])
        edges = np.searchsorted(kept, bounds)
        return {
            part: np.arange(edges[place], edges[place + 1])
            for place, part in enumerate(self.parts)
            if edges[place] < edges[place + 1]
        }

    def listing(self, kept: Rows, *, with_content: bool) -> Iterator[str | bytes]:
        """Yield part, path and size of every kept image, and its bytes if requested."""
        files = [(file, part) for part, one in self.parts.items() for file in one]
        for file, part in (files[row] for row in kept.tolist()):
            yield f"{part} {file.relative_to(self.roots[part]).as_posix()} {file.stat().st_size}"
            if with_content:
                yield file.read_bytes()


def _class_of(file: Path, root: Path) -> str:
    return file.relative_to(root).parts[0]


def find_images(folder: Path, validation: float | str, test: float | str, seed: int) -> FoundImages:
    """Return the images of a folder by part. Raises DataError if a class has no training images."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; use one with a folder of images per class")
    roots = {"train": folder / "train" if (folder / "train").is_dir() else folder}
    if roots["train"] != folder:
        places = [(part, folder / name) for part, names in SPLIT_FOLDERS.items() for name in reversed(names)]
        roots |= {part: place for part, place in places if place.is_dir()}
    roots |= own_files(validation, test)
    parts = {part: _images_in(root) for part, root in roots.items()}
    classes = sorted({_class_of(file, roots["train"]) for file in parts["train"]})
    if len(classes) < 2:
        raise DataError(
            f"{roots['train']} has images of {len(classes)} classes; put them into one folder per class, such as "
            f"{roots['train']}/cat/1.jpg and {roots['train']}/dog/1.jpg ({listed(sorted(SUFFIXES))})"
        )
    for part, files in parts.items():
        _refuse_unknown(files, roots[part], classes)
    of_validation, of_test = shares(validation, test)
    held = hold_out(
        _keys(parts["train"], roots["train"], seed),
        0.0 if "validation" in roots else of_validation,
        0.0 if "test" in roots else of_test,
    )
    train = parts.pop("train")
    split = {part: [train[row] for row in rows] for part, rows in held.items()}
    return FoundImages(classes, {**split, **parts}, {**dict.fromkeys(split, roots["train"]), **roots})


def _refuse_unknown(files: Sequence[Path], root: Path, classes: Sequence[str]) -> None:
    if unknown := sorted({_class_of(file, root) for file in files} - set(classes)):
        raise DataError(f"{root}/{unknown[0]}: there are no training images of this class ({listed(classes)})")


def _images_in(root: Path) -> list[Path]:
    """Return the images in the folders of a folder, sorted by path."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder")
    folders = [place for place in root.iterdir() if place.is_dir() and not place.name.startswith(".")]
    files = [(place, file) for place in folders for file in place.rglob("*") if not file.name.startswith(".")]
    found = [(place, file) for place, file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
    others = Counter(suffix for _, file in files if (suffix := file.suffix.lower()) in OTHER_SUFFIXES)
    if others:
        counts = listed([f"{count:,} {suffix}" for suffix, count in sorted(others.items())])
        logger.warning("%s: skipped images: %s; save them as .png or .jpg", root, counts)
    if (empty := {*folders} - {place for place, _ in found}) and found:
        logger.warning("%s: no images, so no class, in %s", root, listed(sorted(place.name for place in empty)))
    return sorted((file for _, file in found), key=lambda file: file.relative_to(root).as_posix())


def _keys(files: Sequence[Path], root: Path, seed: int) -> npt.NDArray[np.uint64]:
    names = (f"{seed}/{file.relative_to(root).as_posix()}".encode() for file in files)
    digests = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


# ------------------------------------------------------------------------------------------------ decoding


class DecodedImages:
    """Images that are decoded on access: like an array (N, C, H, W) of bytes."""

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, files: Sequence[Path], shape: tuple[int, int, int], fit: Fit) -> None:
        self.files, self.shape = files, (len(files), *shape)
        self._decode = partial(decode_image, shape=shape, fit=fit)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: Any) -> npt.NDArray[np.uint8]:
        """Return the images at some indices. Raises DataError with the path of a broken one."""
        places = np.arange(len(self))[rows]
        result = np.empty((len(places), *self.shape[1:]), np.uint8)
        if broken := self.decode(places, result.__setitem__):
            raise DataError(f"{broken[0][1]}; replace it, or set skip_broken")
        return result

    def decode(self, rows: Rows, store: Callable[[int, Array], None]) -> list[tuple[int, DataError]]:
        """Decode images in threads and store them one by one; return the indices of broken ones."""

        def one(place: int) -> tuple[int, DataError] | None:
            try:
                store(place, self._decode(self.files[rows[place]]))
            except DataError as error:
                return place, error
            return None

        if len(rows) == 1 or get_worker_info() is not None:  # workers already decode in parallel
            return [found for found in map(one, range(len(rows))) if found is not None]
        with ThreadPoolExecutor(_THREADS) as threads:
            return [found for found in threads.map(one, range(len(rows))) if found is not None]


def decode_image(file: Path, shape: tuple[int, int, int], fit: Fit) -> npt.NDArray[np.uint8]:
    """Return an image as bytes (C, H, W). Raises DataError with its path if it is broken."""
    _, image_ops = _pillow()
    channels, height, width = shape
    image = _open(file, least=2 * max(height, width)).convert("L" if channels == 1 else "RGB")
    if image.size != (width, height):
        image = image_ops.fit(image, (width, height)) if fit == "crop" else image.resize((width, height))
    pixels: npt.NDArray[np.uint8] = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _open(file: Path, least: int | None = None) -> Any:
    """Return a Pillow image, decoded and upright; a large JPEG is downscaled if `least` pixels remain."""
    image_module, image_ops = _pillow()
    try:
        with image_module.open(file) as image:
            if least is not None:
                image.draft(None, (least, least))
            image.load()
            return image_ops.exif_transpose(_as_bytes(image, image_module))
    except (OSError, ValueError, SyntaxError, EOFError, image_module.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be decoded ({' '.join(str(error).split())})") from error


def _as_bytes(image: Any, image_module: Any) -> Any:
    """Return an image of 16 bits per pixel in 8 bits: Pillow's own conversion clips values above 255.

    Raises ValueError if the range of the pixels is unknown.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of an unknown range; convert it to 8 bits")
    if not image.mode.startswith("I"):
        return image
    made = image_module.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    made.getexif().update(image.getexif())
    return made


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError("images need Pillow: pip install 'etude[data]'") from error
    return Image, ImageOps


def _size(files: Sequence[Path], size: int | tuple[int, int] | None, *, skip_broken: bool) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    return first_image(files, skip_broken=skip_broken)[1] if size is None else size


def first_image(files: Sequence[Path], *, skip_broken: bool) -> tuple[Path, tuple[int, int]]:
    """Return the first image, or the first that is not broken, with its height and width.

    Raises DataError if it is broken, or all of them are.
    """
    for file in files:
        try:
            width, height = _open(file).size
        except DataError as error:
            if not skip_broken:
                raise DataError(f"{error}; replace it, or set skip_broken") from error
            continue
        return file, (height, width)
    raise DataError(f"none of the {len(files)} images can be decoded; check files such as {files[0]}")


def _decode_all(images: DecodedImages, *, keep: bool, skip_broken: bool) -> tuple[Any, Rows]:
    """Return the images, decoded if they are kept in memory, and the indices of those that are not broken."""
    everything = np.arange(len(images))
    if not keep and not skip_broken:
        return images, everything
    array = np.empty(images.shape, np.uint8) if keep else None
    store = (lambda _place, _image: None) if array is None else array.__setitem__
    broken = images.decode(everything, store)
    if broken and not skip_broken:
        raise DataError(f"{broken[0][1]}; replace it, or set skip_broken")
    if broken:
        logger.warning("%d of %d images are broken and skipped, such as %s", len(broken), len(images), broken[0][1])
    kept = np.delete(everything, [place for place, _ in broken])
    if array is not None:
        return (array[kept] if broken else array), kept
    good = [images.files[row] for row in kept.tolist()]
    remaining = DecodedImages(good, images.shape[1:], images._decode.keywords["fit"])
    return remaining, kept


def _scaling(
    images: Any, rows: Rows, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Scaling:
    given = {"mean": mean, "std": std}
    for name, values in given.items():
        if values is not None and len(values) != channels:
            raise ConfigError(f"{name} has {len(values)} numbers; set one for each of {channels} channels")
    found = None
    if mean is None or std is None:
        sample = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_IMAGES)).astype(int)
        found = Scaling.of(images, rows[sample])
    numbers = [
        getattr(found, name) if values is None else 255 * np.asarray(values, dtype=np.float64)
        for name, values in given.items()
    ]
    return Scaling(*numbers)
