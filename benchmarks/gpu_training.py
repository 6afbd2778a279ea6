"""Models and sections of the GPU benchmark: GPT-2, and trainings whose steps are short."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_loops import AUTOCAST, Training, by_hand, etude, huggingface, lightning
from benchmarks.gpu_race import DEVICE, Contestant, Section
from benchmarks.work import LOG_EVERY
from etude.models import CausalTransformerLM, LeNet5

COMPILED, EAGER = "by hand, compiled", "by hand, eager"
GRAPH, BOTH = "by hand, CUDA graph", "by hand, compiled + CUDA graph"
BY_HAND = (COMPILED, EAGER, GRAPH, BOTH)
READY = (
    "ready s: from the start of a training to the end of its warm-up, with compiling, unless the compiler's cache has "
    "it, and recording. × by hand: of the fastest loop by hand. graphs: whether the steps were CUDA graphs at the end."
)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and what goes past them."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.past: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            self.past = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.past(x))


class ResNet18(nn.Module):
    """ResNet-18 for pictures of 32 × 32: a 3×3 convolution and four stages of two blocks."""

    def __init__(self, width: int = 64, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width * 2**stage for stage in range(4)]
        blocks = []
        for stage, (before, own) in enumerate(zip([width, *widths], widths, strict=False)):
            blocks += [BasicBlock(before, own, 2 if stage else 1), BasicBlock(own, own, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], num_classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x.contiguous(memory_format=torch.channels_last)))
        return self.head(x.mean((2, 3)))


def pictures(shape: tuple[int, int, int], count: int) -> tuple[Tensor, Tensor]:
    """Return random pictures of ten classes; they repeat after a while."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(min(count, 4096), *shape, generator=generator)
    x = few.repeat(-(-count // len(few)), 1, 1, 1)[:count]
    return x, torch.randint(10, (count,), generator=generator)


def texts(vocabulary: int, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Return random tokens, and those that follow them."""
    tokens = torch.randint(vocabulary, (count, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt(layers: int, width: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    return CausalTransformerLM(
        vocab_size=vocabulary, d_model=width, n_layers=layers, n_heads=heads, dropout=0.0, max_len=length
    )


def gpt_training(
    name: str, sizes: tuple[int, int, int, int, int], batch: int, pace: tuple[int, int, int], unit: str = "steps/s"
) -> Training:
    *_, vocabulary, length = sizes
    per_step = batch * length if unit == "tokens/s" else 1
    data = partial(texts, vocabulary, length)
    return Training(name, batch, partial(gpt, *sizes), data, True, unit, per_step, *pace)


def gpt2_sections(*, quick: bool) -> list[Section]:
    """Return the tables of GPT-2 124M, of its usual batch and of one twice as large."""
    sizes, batch, pace = (
        ((2, 32, 2, 128, 16), 2, (2, 2, 2)) if quick else ((12, 768, 12, 50_304, 1024), 32, (8, 8, 5))
    )
    work = gpt_training("GPT-2", sizes, batch, pace, "tokens/s")
    twice = gpt_training("GPT-2", sizes, 2 * batch, (pace[0], pace[1] // 2, pace[2]), "tokens/s")
    contestants = {
        COMPILED: Contestant(partial(by_hand, work, compiled=True)),
        EAGER: Contestant(partial(by_hand, work), cuda=False),
        "Lightning, compiled model": Contestant(
            partial(lightning, work, compiled=True), ("lightning",), is_peer=True
        ),
        "HF Trainer, torch_compile": Contestant(
            partial(huggingface, work), ("transformers", "accelerate"), is_peer=True
        ),
    }
    for mode, words in (("step", "compile step"), ("model", "compile model"), ("off", "eager")):
        for fused in (False, True):
            name = f"Etude, {words}{', fused head' * fused}"
            run = partial(etude, work, compile=mode, capture="auto", fused_head=fused)
            contestants[name] = Contestant(run, cuda=mode != "off")
    larger = {COMPILED: Contestant(partial(by_hand, twice, compiled=True))}
    for capture, words in (("auto", ""), ("off", ", capture off")):
        run = partial(etude, twice, compile="step", capture=capture, fused_head=True)
        larger[f"Etude, compile step, fused head{words}"] = Contestant(run)
    layers, width, heads, vocabulary, length = sizes
    columns = {"loop": "", "tokens/s": ",.0f", "from": ",.0f", "to": ",.0f", "× by hand": ".3f"}
    columns |= {"peak GiB": ".1f", "ready s": ".0f", "graphs": ""}
    return [
        Section(
            f"GPT-2: {layers} × {width}, {heads} heads, {vocabulary:,} tokens, batch {one.batch} × {length}, "
            f"{'bf16' if AUTOCAST else 'float32'}, fused AdamW, clipping, on {device_words()}",
            columns,
            f"Each in a process of its own; medians and quartiles of {pace[2]} stretches of {steps} steps after "
            f"{pace[0]}. {READY} By hand and other trainers gather batches on the device, Etude on the host.",
            those,
            ("tokens/s", "× by hand"),
            lambda _: BY_HAND,
            alone=True,
        )
        for one, steps, those in ((work, pace[1], contestants), (twice, pace[1] // 2, larger))
    ]


def small_works(*, quick: bool) -> list[Training]:
    """Return trainings whose steps are short."""
    few, fast, slow = (2, 2, 2), (60, 100, 5), (30, 50, 5)
    one_gpt = (2, 32, 2, 64, 16) if quick else (6, 384, 6, 8192, 256)
    width = 4 if quick else 64
    lenet = partial(pictures, (1, 28, 28))
    colours = partial(pictures, (3, 32, 32))
    pace = few if quick else slow
    pictures_per_step = 4 if quick else 128
    small, large = (2, 4) if quick else (16, 64)
    size = f"GPT {one_gpt[0]} × {one_gpt[1]}, {one_gpt[3]:,} tokens"
    return [
        Training("LeNet-5, batch 64", 64, LeNet5, lenet, False, "steps/s", 1, *(few if quick else fast)),
        gpt_training(f"{size}, {small} × {one_gpt[4]}", one_gpt, small, pace),
        gpt_training(f"{size}, {large} × {one_gpt[4]}", one_gpt, large, pace),
        Training(
            f"ResNet-18, batch {pictures_per_step}",
            pictures_per_step,
            partial(ResNet18, width),
            colours,
            False,
            "steps/s",
            1,
            *pace,
        ),
    ]


def small_sections(*, quick: bool) -> list[Section]:
    """Return a table for each of the short steps."""
    return [small_section(work) for work in small_works(quick=quick)]


def small_section(work: Training) -> Section:
    contestants = {
        EAGER: Contestant(partial(by_hand, work), cuda=False),
        COMPILED: Contestant(partial(by_hand, work, compiled=True)),
        GRAPH: Contestant(partial(by_hand, work, graph=True)),
        BOTH: Contestant(partial(by_hand, work, compiled=True, graph=True)),
        "Lightning": Contestant(partial(lightning, work), ("lightning",), cuda=False, is_peer=True),
    }
    for mode in ("off", "step"):
        for capture in ("off", "on"):
            run = partial(etude, work, compile=mode, capture=capture)
            contestants[f"Etude, compile {mode}, capture {capture}"] = Contestant(
                run, cuda=mode != "off" or capture == "on"
            )
    contestants["Etude, compile step, capture on, data on the device"] = Contestant(
        partial(etude, work, compile="step", capture="on", on_device=True)
    )
    precision = "bf16" if AUTOCAST else "float32"
    title = f"{work.name}, {precision}, fused AdamW, clipping, on {device_words()}"
    columns = {"loop": "", "steps/s": ",.1f", "from": ",.1f", "to": ",.1f", "× by hand": ".3f"}
    how = (
        f"One after the other in one process; medians and quartiles of {work.rounds} stretches of {work.stretch} steps "
        f"after {work.warmup}, log records every {LOG_EVERY}. "
        f"{READY} By hand and Lightning gather batches on the device."
    )
    columns |= {"ready s": ".1f", "graphs": ""}
    return Section(title, columns, how, contestants, ("steps/s", "× by hand"), lambda _: BY_HAND)


def device_words() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "the CPU"
