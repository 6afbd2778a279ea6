"""What a model knows of held-out stars: cross entropy, errors in physical units, and classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.data import open_tokens
from etude.multimodal import Tokenizer, read_modalities
from etude.multimodal.vocab import VocabSpec
from stars.build import read_schema, read_truth
from stars.curves import NUM_PATCHES, joined, read_off
from stars.layout import COLUMNS, LENGTH, SCALARS, UNITS, columns_of

Floats = NDArray[np.float64]
Logits = Callable[[Tensor], Tensor]
"""From sequences (N, L) to logits (N, L, V)."""
BATCH = 512


@dataclass(frozen=True)
class Held:
    """A split of the data: its tokens, what they stood for, and the tokenizers between the two."""

    tokens: Tensor
    """(N, LENGTH)"""
    truth: dict[str, NDArray[Any]]
    vocab: VocabSpec
    tokenizers: Mapping[str, Tokenizer]
    classes: list[str]

    @property
    def ids(self) -> list[str]:
        """The names of the stars."""
        return [bytes(row).decode().strip() for row in self.truth["id"]]

    @property
    def amplitudes(self) -> Floats:
        """The amplitudes of the light curves in magnitudes."""
        return np.asarray(10.0 ** self.truth["log A1"].astype(np.float64))

    def take(self, rows: NDArray[np.int64]) -> "Held":
        """Return some of the stars."""
        truth = {name: values[rows] for name, values in self.truth.items()}
        return replace(self, tokens=self.tokens[torch.from_numpy(rows)], truth=truth)


def open_split(folder: str | Path, split: str) -> Held:
    """Open a split of the data in a folder."""
    schema, modal = read_schema(folder), read_modalities(folder)
    file = open_tokens(Path(folder).expanduser() / f"{split}.bin")
    tokens = torch.from_numpy(file.read([0], [file.num_tokens]).astype(np.int64)).reshape(len(file), LENGTH)
    return Held(tokens, read_truth(folder, split), modal.vocab, modal.tokenizers, schema["classes"])


def runner(model: nn.Module, vocab: VocabSpec, device: torch.device | str = "cpu") -> Logits:
    """Return the function from sequences to logits, in evaluation mode."""
    numbers = {None: 0} | {name: number for number, name in enumerate(vocab.modalities, start=1)}
    types = torch.tensor([numbers[modality] for _, modality in COLUMNS], device=device)
    model = model.to(device).eval()

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        parts = [
            model(part.to(device), types[: tokens.shape[1]].expand_as(part)).float().cpu()
            for part in tokens.split(BATCH)
        ]
        return torch.cat(parts)

    return logits


def measure(logits: Logits, held: Held, train: Held) -> dict[str, float]:
    """Return all numbers of a model on a split, by name.

    `ce` and `ce/<modality>` are nats per token, over the whole vocabulary; `ce/MISS` those of missing values.
    `rmse/<modality>` is the error of the expected value, `rmse_top/…` that of the likeliest token, both of that
    modality's tokens and against the catalogue's value, given everything that stands before; `rmse_free/image` that of
    light curves drawn from the numbers before them alone. `accuracy` and `balanced_accuracy` are of the class.
    """
    guess = logits(held.tokens[:, :-1])
    numbers = cross_entropies(guess, held)
    for modality in UNITS:
        expected, top = reconstructed(guess, modality, held)
        numbers[f"rmse/{modality}"] = error(modality, expected, held)
        numbers[f"rmse_top/{modality}"] = error(modality, top, held)
    numbers["rmse_free/image"] = error("image", draw_freely(logits, held), held)
    chosen = guess[:, columns_of("class")[0] - 1, held.vocab.range_of("class").slice].argmax(-1).numpy()
    right = chosen == held.truth["class"]
    numbers["accuracy"] = float(right.mean())
    recalls = [right[held.truth["class"] == one].mean() for one in np.unique(held.truth["class"])]
    numbers["balanced_accuracy"] = float(np.mean(recalls))
    return numbers | references(held, train)


def cross_entropies(guess: Tensor, held: Held) -> dict[str, float]:
    """Return the mean cross entropy of all tokens, of missing values, and of every modality's tokens."""
    targets = held.tokens[:, 1:]
    losses = nn.functional.cross_entropy(guess.transpose(1, 2).double(), targets, reduction="none")
    return _by_modality("ce", losses, held)


def reconstructed(guess: Tensor, modality: str, held: Held) -> tuple[Floats, Floats]:
    """Return the expected values (N, columns[, D]) of a modality's tokens, and those of the likeliest tokens."""
    columns = torch.tensor(columns_of(modality)) - 1  # a token is predicted where the one before it stands
    part = guess[:, columns, held.vocab.range_of(modality).slice].double()
    values = held.tokenizers[modality].values.double()
    return (torch.softmax(part, -1) @ values).numpy(), values[part.argmax(-1)].numpy()


def references(held: Held, train: Held) -> dict[str, float]:
    """Return what to compare with: `floor/…`, the error that tokens alone make; `mean/…`, that of the mean of the
    training stars, column by column; `marginal/…`, the cross entropy of their frequencies of tokens."""
    numbers: dict[str, float] = {}
    for modality in UNITS:
        codes = held.vocab.decode(modality, held.tokens[:, columns_of(modality)])
        numbers[f"floor/{modality}"] = error(modality, held.tokenizers[modality].decode(codes).double().numpy(), held)
        mean = np.nanmean(_true(modality, train), axis=0, keepdims=True)
        numbers[f"mean/{modality}"] = _rmse(modality, mean - _true(modality, held), held)
    losses = torch.empty(held.tokens[:, 1:].shape, dtype=torch.float64)
    for column in range(1, LENGTH):
        counts = torch.bincount(train.tokens[:, column], minlength=held.vocab.vocab_size).double()
        name = COLUMNS[column][1]
        assert name is not None
        counts[held.vocab.range_of(name).slice] += 1
        counts[held.vocab.miss_id] += 1
        losses[:, column - 1] = -(counts / counts.sum()).log()[held.tokens[:, column]]
    numbers |= _by_modality("marginal", losses, held)
    shares = np.bincount(train.truth["class"], minlength=len(held.classes)) / len(train.tokens)
    numbers["marginal/accuracy"] = float((held.truth["class"] == shares.argmax()).mean())
    return numbers


def draw_freely(logits: Logits, held: Held) -> Floats:
    """Return pictures in patches (N, NUM_PATCHES, PATCH_SIZE) drawn by a model from the numbers before them alone.

    The likeliest patch is what the model sees next; the expected one is what is drawn.
    """
    first, image = columns_of("image")[0], held.vocab.range_of("image")
    values = held.tokenizers["image"].values.double()
    tokens, drawn = held.tokens[:, :first], []
    for _ in range(NUM_PATCHES):
        part = logits(tokens)[:, -1, image.slice]
        drawn.append(torch.softmax(part.double(), -1) @ values)
        tokens = torch.cat([tokens, part.argmax(-1, keepdim=True) + image.base], 1)
    return np.asarray(torch.stack(drawn, 1).numpy())


def error(modality: str, values: Floats, held: Held) -> float:
    """Return the root mean square error of a modality's values (N, columns[, D]), in its unit."""
    if modality == "image":
        return _rmse(modality, read_off(joined(values)) - _true(modality, held), held)
    return _rmse(modality, values.reshape(_true(modality, held).shape) - _true(modality, held), held)


def _true(modality: str, held: Held) -> Floats:
    if modality in SCALARS:
        columns = [held.truth[COLUMNS[place][0]] for place in columns_of(modality)]
        return np.stack(columns, 1).astype(np.float64)
    return np.asarray(held.truth["curve" if modality == "image" else modality], np.float64)


def _rmse(modality: str, errors: Floats, held: Held) -> float:
    """The root of the mean square of what is not missing; light curves in magnitudes, by the star's amplitude."""
    scaled = errors * held.amplitudes[:, None] if modality == "image" else errors
    return float(np.sqrt(np.nanmean(np.square(scaled))))


def _by_modality(prefix: str, losses: Tensor, held: Held) -> dict[str, float]:
    targets = held.tokens[:, 1:]
    numbers = {prefix: float(losses.mean()), f"{prefix}/MISS": float(losses[targets == held.vocab.miss_id].mean())}
    for name, modality in held.vocab.modalities.items():
        own = (targets >= modality.base) & (targets < modality.stop)
        numbers[f"{prefix}/{name}"] = float(losses[own].mean())
    return numbers
