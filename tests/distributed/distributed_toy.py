"""Components for small runs: models, data, losses and callbacks with what can go wrong between processes."""

import os
import shutil
import signal
import time

import torch
import torch.nn.functional as F
from torch import nn

from etude.config import register
from etude.core import DataError, LossTerm
from etude.data import DataSplits, TensorData
from etude.engine.callback import Callback
from etude.losses import LossStrategy
from etude.multimodal import Modalities, ScalarTokenizer, VectorTokenizer, build_vocab_spec

VOCABULARY, LENGTH = 19, 12
RANK = int(os.environ.get("RANK", "0"))


def features(count: int, seed: int, double: bool = False, mislabelled: int | None = None) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64 if double else torch.float32)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    if mislabelled is not None:
        y[mislabelled] = 7
    return TensorData(x, y)


@register("data", "toy_classes")
def classes(
    samples: int = 50, validation: int = 21, double: bool = False, mislabelled: int | None = None
) -> DataSplits:
    """Return points with one of three classes; a sample of the validation may have another one."""
    checked = features(validation, 2, double, mislabelled) if validation else None
    return DataSplits(features(samples, 1, double), checked)


def sentences(count: int, seed: int) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count,), generator=generator)
    lengths[::3] = 2  # far fewer tokens: a mean of means would show
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return TensorData({"input_ids": tokens, "attention_mask": mask})


@register("data", "toy_text")
def text(samples: int = 50, validation: int = 21) -> DataSplits:
    """Return token sequences of very different lengths."""
    return DataSplits(sentences(samples, 1), sentences(validation, 2))


VOCAB = build_vocab_spec(v_scalar=8, modalities={"vector": 5})  # 19 tokens, as many as `toy_lm` has


def modal_rows(count: int, seed: int) -> TensorData:
    """Half of the rows are MISS alone, a third has scalars, a sixth vectors too: ranks lack modalities at times."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((count, LENGTH), VOCAB.miss_id)
    tokens[:, 0] = VOCAB.special["BOS"]
    for name, every, last in (("scalar", 2, LENGTH), ("vector", 6, 5)):
        codes = torch.randint(-1, VOCAB.range_of(name).size, (count, LENGTH), generator=generator)
        tokens[::every, 1:last] = VOCAB.encode(name, codes)[::every, 1:last]
    tokens[4::5, 7:] = VOCAB.pad_id
    return TensorData({"input_ids": tokens, "attention_mask": (tokens != VOCAB.pad_id).long()})


@register("data", "toy_modal")
def modal(samples: int = 41, validation: int = 21) -> DataSplits:
    """Return sequences of scalars, vectors and missing values, with their vocabulary and what its tokens stand for."""
    edges = torch.tensor([-3.0, -2.0, -1.5, -0.5, 0.0, 0.25, 1.0, 2.0, 4.0])
    vectors = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    return DataSplits(
        modal_rows(samples, 1),
        modal_rows(validation, 2),
        vocab_size=VOCAB.vocab_size,
        token_schema=Modalities(VOCAB, {"scalar": ScalarTokenizer(edges), "vector": VectorTokenizer(vectors)}),
    )


@register("data", "toy_missing")
def missing(on_rank: int = 0) -> DataSplits:
    """Raise DataError on one rank."""
    if on_rank == RANK:
        raise DataError(f"no data on rank {on_rank}")
    return classes()


class Points(torch.utils.data.Dataset):
    """Points one by one, of which one may be impossible to read."""

    def __init__(self, samples: int, bad: int = -1) -> None:
        self.part, self.bad = features(samples, 1), bad

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int):
        if index == self.bad:
            raise DataError(f"sample {index} cannot be read")
        return self.part.data[index], self.part.labels[index]


@register("data", "toy_dataset")
def dataset(samples: int = 50, bad: int = -1) -> DataSplits:
    """Return points as a dataset."""
    return DataSplits(Points(samples, bad), features(21, 2))


@register("model", "toy_net")
class Net(nn.Module):
    """A small network whose layers are registered in another order than they are used."""

    def __init__(self, width: int = 16, dropout: float = 0.0, batch_norm: bool = False, double: bool = False) -> None:
        super().__init__()
        self.last = nn.Linear(width, 3)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
        self.first = nn.Linear(6, width)
        self.middle = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.to(torch.float64 if double else torch.float32)

    def forward(self, x):
        hidden = self.dropout(self.norm(torch.relu(self.first(x))))
        # An empty batch cannot be reshaped like this, nor by many models that people write.
        return self.last(torch.relu(self.middle(hidden)).view(x.shape[0], -1))


@register("model", "toy_lm")
class LanguageModel(nn.Module):
    """Embedding, GRU, head; with `spare`, a layer that takes no part in the loss."""

    def __init__(self, width: int = 16, spare: bool = False, double: bool = False) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4) if spare else None
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)
        self.to(torch.float64 if double else torch.float32)

    def forward(self, input_ids):
        return self.head(self.mix(self.embed(input_ids))[0])


@register("model", "toy_unused")
class Unused(Net):
    """Has a layer that takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


@register("loss", "toy_terms")
class SeveralTerms(LossStrategy):
    """Three terms with their own counts and weights, and a metric."""

    def terms(self, output, batch, *, metrics):
        _, y = batch
        rare = y == 2
        terms = {
            "classes": LossTerm(F.cross_entropy(output, y, reduction="sum"), float(len(y)), 0.7),
            "rare": LossTerm(output[rare].square().sum(), rare.sum(), torch.tensor(0.3)),
            "size": LossTerm(output.abs().sum(), output.numel(), 0.1),
        }
        if metrics:
            terms["hits"] = LossTerm((output.argmax(-1) == y).sum().float(), float(len(y)), 0.0)
        return terms

    def counts(self, batch):
        y = batch[1]
        return {"classes": float(len(y)), "rare": (y == 2).sum(), "size": 3 * len(y)}


class At(Callback):
    """Does something on one rank after a step."""

    def __init__(self, step: int, rank: int = 0) -> None:
        super().__init__()
        self.step, self.rank, self.run = step, rank, None

    def on_train_begin(self, run):
        self.run = run

    def on_step_end(self, report):
        if self.run.clock.step == self.step and self.rank == RANK:
            self.act()


@register("callback", "toy_signal")
class SignalAt(At):
    """Sends a signal to its own process, so many times."""

    def __init__(self, step: int, rank: int = 0, signal_name: str = "SIGTERM", times: int = 1) -> None:
        super().__init__(step, rank)
        self.signal_name, self.times = signal_name, times

    def act(self):
        for _ in range(self.times):
            os.kill(os.getpid(), getattr(signal, self.signal_name))


@register("callback", "toy_signal_launcher")
class SignalLauncherAt(At):
    """Sends a signal to the process that started this one, and waits until it has been passed on.

    This process may get it too, as when a scheduler sends it to all processes of a job.
    """

    def __init__(self, step: int, signal_name: str = "SIGTERM", here_too: bool = False) -> None:
        super().__init__(step)
        self.signal_name, self.here_too = signal_name, here_too

    def act(self):
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        os.kill(os.getppid(), getattr(signal, self.signal_name))
        os.read(reader, 1)
        signal.set_wakeup_fd(-1)
        if self.here_too:
            os.kill(os.getpid(), getattr(signal, self.signal_name))


@register("callback", "toy_told")
class ToldAt(At):
    """Prints that the training has begun, and then takes its time for every step, or forever."""

    def __init__(self, step: int = 3, seconds: float = 0.01, forever: bool = False) -> None:
        super().__init__(step)
        self.seconds, self.forever = seconds, forever

    def on_step_end(self, report):
        super().on_step_end(report)
        time.sleep(self.seconds)
        while self.forever and self.run.clock.step >= self.step:
            time.sleep(0.01)

    def act(self):
        print("training", flush=True)


@register("callback", "toy_kill")
class KillAt(Callback):
    """Kills the last process before the first step or after the one that a variable names: restarts may differ."""

    def on_train_begin(self, run):
        self.run, self.step = run, os.environ.get("TOY_KILL_AT")
        self.is_last = int(os.environ.get("WORLD_SIZE", "1")) == RANK + 1
        self.on_step_end(None)

    def on_step_end(self, report):
        if self.is_last and str(self.run.clock.step) == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@register("callback", "toy_spoil")
class SpoilAt(At):
    """Makes it impossible to save: a file stands where the checkpoints were."""

    def act(self):
        folder = self.run.run_dir / "checkpoints"
        shutil.rmtree(folder)
        folder.touch()


@register("callback", "toy_crash")
class CrashAt(At):
    """Has a bug."""

    def act(self):
        raise ZeroDivisionError("a bug in a callback")


@register("loss", "toy_fickle")
class FickleTerms(SeveralTerms):
    """Leaves a term out on one rank."""

    def terms(self, output, batch, *, metrics):
        terms = super().terms(output, batch, metrics=metrics)
        if RANK == 1:
            del terms["rare"]
        return terms


class Tripwire(torch.autograd.Function):
    """Raises an error in the backward pass of one rank."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if RANK == 1:
            raise DataError("a mistake in the backward pass")
        return gradient


@register("model", "toy_tripwire")
class TripwireNet(Net):
    """Fails on its way back, when the gradients of later layers are being summed already."""

    def __init__(self) -> None:
        super().__init__(width=800)

    def forward(self, x):
        return self.last(torch.relu(self.middle(Tripwire.apply(torch.relu(self.first(x))))))
