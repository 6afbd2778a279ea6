"""Components that the command line tests name in their configs: small data sets, good and bad, and small parts."""

from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import nn

from etude import Callback, LossStrategy, LossTerm, register
from etude.data import DataSplits, TensorData, read_idx

FEATURES, CLASSES = 6, 3


def points(samples: int) -> TensorData:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, FEATURES, generator=generator)
    return TensorData(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


@register("data", "cli_points")
def good_data(samples: Annotated[int, Ge(0)] = 40) -> DataSplits:
    return DataSplits(points(samples), points(20), points(30), num_classes=CLASSES)


@register("data", "cli_bad_labels")
def bad_labels(label: int = 12, declared: bool = True) -> DataSplits:
    part = points(40)
    assert part.labels is not None
    part.labels[7] = label
    return DataSplits(part, num_classes=CLASSES if declared else None)


@register("data", "cli_file")
def data_from_file(file: str) -> DataSplits:
    images = torch.from_numpy(read_idx(file)).float()
    return DataSplits(TensorData(images, torch.zeros(len(images), dtype=torch.int64)))


@register("model", "cli_net")
class Net(nn.Sequential):
    """A small network."""

    def __init__(self, width: Annotated[int, Gt(0)] = 8, dropout: Annotated[float, Ge(0)] = 0.1) -> None:
        super().__init__(nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES))


@register("model", "cli_broken")
class Broken(Net):
    """A network with a mistake in its code, which shows after some steps."""

    def __init__(self, good_steps: int = 0) -> None:
        super().__init__()
        self.good_steps = good_steps

    def forward(self, x):
        self.good_steps -= 1
        return super().forward(x) if self.good_steps >= 0 else {}["missing"]


@register("model", "cli_choosy")
class Choosy(Net):
    """A network that takes some widths only."""

    def __init__(self, width: int = 8) -> None:
        if width % 2:
            raise ValueError(f"the width {width} is odd")
        super().__init__(width)


@register("model", "cli_frozen")
class Frozen(Net):
    """A network that cannot learn."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


@register("model", "cli_reads_its_weights")
class ReadsItsWeights(Net):
    """A network that looks at values while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self[0].weight.detach().abs().max())


@register("optimizer", "cli_choosy")
def choosy(params, groups: int = 1) -> torch.optim.Optimizer:
    """An optimizer that takes one group only."""
    if groups != 1:
        raise ValueError(f"{groups} groups are too many")
    return torch.optim.SGD(params, 0.1)


@register("optimizer", "cli_sign_descent")
class SignDescent(torch.optim.Optimizer):
    """p ← p - lr·sign(g)."""

    def __init__(self, params, lr: Annotated[float, Gt(0)] = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=-group["lr"])


@register("loss", "cli_margin")
class Margin(LossStrategy):
    """Squared distance of the logits from ±1, scaled."""

    def __init__(self, scale: Annotated[float, Gt(0)] = 1.0) -> None:
        self.scale = scale

    def terms(self, output, batch, *, metrics):
        targets = 2.0 * nn.functional.one_hot(batch.labels, output.shape[1]) - 1.0
        return {"loss": LossTerm(self.scale * (output - targets).square().mean(1).sum(), len(output))}


@register("callback", "cli_diary")
class Diary(Callback):
    """Writes a line per epoch into a file of the run folder."""

    def __init__(self, file: str = "diary.txt") -> None:
        super().__init__()
        self.file = file

    def on_train_begin(self, run):
        self.path = run.run_dir / self.file

    def on_epoch_end(self, epoch, logs):
        with self.path.open("a") as file:
            file.write(f"epoch {epoch}: {sorted(logs)}\n")
