"""The data of an ejected file: which files it reads, and how batches are made from them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from etude.core.files import cache_folder
from etude.core.random import mix
from etude.data.catalog.mnist import FASHION_MNIST, FILES, MNIST, Normalize, load_fashion_mnist, load_mnist
from etude.data.catalog.rows import ArrayRows
from etude.data.order.permutation import SORTED_LIMIT
from etude.data.sources.arrays import as_tensor, is_array
from etude.data.splits import DataSplits, LoaderData, TensorData
from etude.data.text.blocks import TokenBlocks
from etude.data.tokens.places import local_copy
from etude.eject.plain import permuted, read_idx, shuffled
from etude.eject.refusal import DATA, refuse
from etude.eject.source import Sources
from etude.eject.text import DataText, literal
from etude.experiment import ExperimentConfig

MAX_BYTES = 2**30
"""Maximum size of samples that are stored beside a script."""
_PAIR = ("inputs", "labels")


def data_text(config: ExperimentConfig, splits: DataSplits, sources: Sources) -> DataText:
    """Return the text for the data of an experiment; raise ConfigError for samples that cannot be written."""
    selection = config.require("data")
    mnist = {load_mnist: MNIST, load_fashion_mnist: FASHION_MNIST}.get(selection.component.factory)
    if mnist is not None:
        return _mnist(selection.defaults | selection.arguments, splits, mnist, sources)
    if isinstance(splits.train, LoaderData) and type(splits.train.data) is TokenBlocks:
        if splits.train.data.file.streams:
            raise refuse(config, "data", "its tokens have streams beside them, which are not written")
        return _tokens(splits, sources)
    parts = {"train": splits.train, "validation": splits.validation}
    stored = {name: _samples(part) for name, part in parts.items() if part is not None}
    if None in stored.values():
        raise refuse(config, "data", DATA)
    tensors = {
        f"{name}_{what}": one for name, pair in stored.items() for what, one in zip(_PAIR, pair or (), strict=True)
    }
    if sum(one.nbytes for one in tensors.values()) > MAX_BYTES:
        raise refuse(config, "data", f"it takes more than {MAX_BYTES >> 30} GiB, which the file would have to store")
    return _stored(tensors, sources)


def _order(size: int, sources: Sources) -> str:
    """Add the function that shuffles this many samples; return the line that calls it."""
    return f"order = {sources.add(shuffled if size <= SORTED_LIMIT else permuted)}(TRAIN_SIZE, SEED, epoch)"


def _mnist(given: dict[str, Any], splits: DataSplits, source: Any, sources: Sources) -> DataText:
    sources.add(read_idx)
    paths = [_find(name, given["root"], source) for name in FILES]
    folder = Path(os.path.commonpath(paths)) if len({path.parent for path in paths}) > 1 else paths[0].parent
    held, sizes = given["validation_size"], (len(splits.train), len(splits.validation))
    names = ", ".join(f'"{path.relative_to(folder)}"' for path in (paths[:2] if held else paths))
    images = "images, labels" if held else "images, labels, test_images, test_labels"
    if held:  # the last of the training images
        begin = len(read_idx(paths[0])) - held
        slices = [("", f"[:{sizes[0]}]"), ("", f"[{begin}:{begin + sizes[1]}]")]
    else:
        names_of = zip(("", "test_"), sizes, strict=True)
        slices = [(name, "" if given["limit"] is None else f"[:{size}]") for name, size in names_of]
    parts = ", ".join(f"({name}images{part}, {name}labels{part})" for name, part in slices)
    transform: Normalize = splits.train.transform
    constants = f"""\
FOLDER = Path({literal(str(folder))})
TRAIN_SIZE, VALIDATION_SIZE = {sizes[0]}, {sizes[1]}
SCALE = 1 / {transform.std} / 255  # pixels become (pixel / 255 - mean) / std, in one operation
SHIFT = torch.tensor(-{transform.mean} / {transform.std})"""
    functions = f'''
def load_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images and labels for training and for validation."""
    names = [{names}]
    {images} = (read_idx(FOLDER / name) for name in names)
    return {parts}


def get_batch(data: tuple[Tensor, Tensor], places: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the normalised images (B, 1, 28, 28) and the labels (B,) at some places."""
    images, labels = (part[torch.from_numpy(places)] for part in data)
    return torch.add(SHIFT, images.unsqueeze(1), alpha=SCALE), labels.long()
'''
    sources.imports |= {("pathlib", "Path", ""), ("numpy", "", "np"), ("numpy.typing", "", "npt")}
    order = [_order(sizes[0], sources)]
    return DataText(constants, "tuple[Tensor, Tensor]", functions, order, "np.arange(VALIDATION_SIZE)")


def _find(name: str, root: str | None, source: Any) -> Path:
    """Return where a file of MNIST is; all copies that are used have the same checksum."""
    title = source.title.lower()
    shared = os.environ.get("ETUDE_DATA_DIR")
    own = root if root is not None else Path(shared) / title if shared else None
    folders = [Path(one).expanduser() for one in (own, cache_folder(title), *source.folders) if one is not None]
    inside = [folder / part for folder in folders for part in ("", "raw", "MNIST/raw")]
    return next(
        path for place in inside for path in (place / name, place / f"{name}.gz") if path.is_file()
    ).absolute()


def _tokens(splits: DataSplits, sources: Sources) -> DataText:
    train: TokenBlocks = splits.train.data
    validation: TokenBlocks | None = splits.validation.data if splits.validation is not None else None
    parts = [train] if validation is None else [train, validation]
    folder = local_copy(train.file.path).absolute().parent
    opened = []
    for part in parts:
        path, tokens = local_copy(part.file.path).absolute(), part.file.vectors[None]
        place = f'"{path.name}"' if path.parent == folder else f'"{path}"'
        opened.append(
            f'np.memmap(FOLDER / {place}, "{tokens.dtype.str}", "r", offset={tokens.offset}, shape=({tokens.count},))'
        )
    sizes = ", ".join(f"{name}_SIZE" for name in ("TRAIN", "VALIDATION")[: len(parts)])
    constants = f"""\
FOLDER = Path({literal(str(folder))})
LENGTH = {train.length}  # tokens per block
{sizes} = {", ".join(str(len(part)) for part in parts)}  # blocks"""
    purpose = "training" if validation is None else "training and for validation"
    returned = ",\n        ".join(opened)
    functions = f'''
def load_data() -> tuple[npt.NDArray[np.integer], ...]:
    """Return the tokens for {purpose}, read from the disk when needed."""
    return (
        {returned},
    )


def get_batch(tokens: npt.NDArray[np.integer], places: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the blocks (B, L) that begin at some places, and for each token the one that follows it."""
    rows = torch.from_numpy(tokens[places[:, None] + np.arange(LENGTH + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]
'''
    order = [f"{_order(len(train), sources)} * LENGTH"]
    if train.moving:
        order.append(f"order += {sources.add(mix)}(SEED, epoch, 3) % LENGTH  # other blocks in every epoch")
    sources.imports |= {("pathlib", "Path", ""), ("numpy", "", "np"), ("numpy.typing", "", "npt")}
    places = "" if validation is None else "np.arange(VALIDATION_SIZE) * LENGTH"
    return DataText(constants, "npt.NDArray[np.integer]", functions, order, places)


def _samples(part: Any) -> tuple[Tensor, Tensor] | None:
    """Return inputs and labels of all samples of a split; None if they are not the same in every epoch."""
    if type(part) is TensorData and part.transform is None and part.labels is not None and is_array(part.data):
        return as_tensor(part.data, "data"), as_tensor(part.labels, "labels")
    if type(part) is ArrayRows and part.augment is None and not part.decodes and part.labels is not None:
        batch: Any = part.gather(np.arange(len(part)), epoch=0, seed=0)
        return batch.data, batch.labels
    return None


def _stored(tensors: dict[str, Tensor], sources: Sources) -> DataText:
    """Return the text for samples that are stored beside the script."""
    names = list(dict.fromkeys(name.partition("_")[0] for name in tensors))
    sizes = [len(tensors[f"{name}_inputs"]) for name in names]
    constants = f"{', '.join(f'{name.upper()}_SIZE' for name in names)} = {', '.join(map(str, sizes))}"
    pairs = ", ".join(f'(stored["{name}_inputs"], stored["{name}_labels"])' for name in names)
    functions = f'''
def load_data() -> tuple[tuple[Tensor, Tensor], ...]:
    """Return inputs and labels for {" and for ".join(names).replace("train", "training")}."""
    stored = load_file(Path(__file__).with_suffix(".data.safetensors"))
    return {pairs}{"," if len(names) == 1 else ""}


def get_batch(data: tuple[Tensor, Tensor], places: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the inputs and the labels at some places."""
    inputs, labels = data
    return inputs[torch.from_numpy(places)], labels[torch.from_numpy(places)]
'''
    sources.imports |= {("pathlib", "Path", ""), ("safetensors.torch", "load_file", "")}
    sources.imports |= {("numpy", "", "np"), ("numpy.typing", "", "npt")}
    validation = "np.arange(VALIDATION_SIZE)" if len(names) > 1 else ""
    order = [_order(sizes[0], sources)]
    return DataText(constants, "tuple[Tensor, Tensor]", functions, order, validation, tensors)
