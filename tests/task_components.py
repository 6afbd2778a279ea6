"""Small data and a small model for experiments with several tasks: two streams of token sequences with labels."""

import signal

import torch
from torch import Tensor, nn

from etude import Callback, register
from etude.data import DataSplits, TensorData
from etude.engine.callback import RunInfo

VOCABULARY, LENGTH, LABELS = 12, 6, 4


def sequences(samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    later = torch.rand(samples, LABELS, generator=generator)
    quality = (ids[:, :LABELS] > VOCABULARY // 2).float()
    quality[later < 0.1] = float("nan")  # some labels are missing
    return {
        "input_ids": ids,
        "full": ids % 3,
        "simple": ids % 2,
        "quality": quality,
        "match": (ids[:, 0] > ids[:, 1]).float(),
    }


@register("data", "task_sequences")
def task_sequences(
    samples: int = 48,
    seed: int = 1,
    keys: list[str] | None = None,
    validation: int = 16,
    test: int = 0,
    vocab_size: int = VOCABULARY,
) -> DataSplits:
    def part(number: int, split: int) -> TensorData | None:
        found = sequences(number, 10 * seed + split)
        return TensorData({key: found[key] for key in ("input_ids", *(keys or []))}) if number else None

    train = part(samples, 0)
    assert train is not None
    return DataSplits(train, part(validation, 1), part(test, 2), vocab_size=vocab_size)


@register("model", "task_trunk")
class Trunk(nn.Module):
    """Embeds tokens and mixes them a little."""

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.mix = nn.Linear(width, width)
        self.feature_dim = width

    def features(self, input_ids: Tensor) -> Tensor:
        """Return features (B, L, width)."""
        hidden = self.embedding(input_ids)
        return torch.tanh(self.mix(hidden + hidden.mean(1, keepdim=True)))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the features."""
        return self.features(input_ids)


@register("callback", "stop_by_signal")
class StopBySignal(Callback):
    """Interrupts a new run in its second step, as Ctrl-C does; lets a resumed one go on."""

    def on_train_begin(self, run: RunInfo) -> None:
        self.resumed = run.resumed

    def on_step_begin(self, step: int) -> None:
        if step == 1 and not self.resumed:
            signal.raise_signal(signal.SIGINT)
