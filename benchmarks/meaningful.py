"""The expected-value loss: fused against the plain formula, and what drawing only some positions saves and costs.

python -m benchmarks.meaningful [--device cpu|cuda] [--quick] [--json FILE]
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from benchmarks.memory import MB, in_own_process, memory, now, peak_memory
from benchmarks.table import Row, Table, median, progress, publish, quartiles, read_options, take_device
from etude.core import HeadOutput
from etude.losses import SupervisedTask
from etude.models import CausalTransformerLM
from etude.multimodal import MeaningfulLoss, build_vocab_spec
from etude.multimodal.loss import Reconstruction, make_reconstruction
from etude.multimodal.loss.fused import LossPart, expected_value_sums

POSITIONS, WIDTH, CODES, VALUES = 4096, 256, 8192, 64
KINDS = ("mse", "huber", "wasserstein", "hl_gauss")
TYPES = {"float32": nullcontext, "bf16 autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16)}
ROUNDS = 15
SMALL = 128
"""The last row is about a modality with so many times fewer codes than the vocabulary."""
BATCH, LENGTH = 64, 256
SAMPLED = (64, 256, 1024, 4096)
DRAWS, LEARNING_STEPS, STEP_ROUNDS = 4, 10, 5


def main() -> None:
    device, rest = take_device(None)
    options = read_options(__doc__ or "", rest)
    quick = options.quick
    sizes = (256, 16, 512, 4) if quick else (POSITIONS, WIDTH, CODES, VALUES)
    fused = fused_table(device, sizes, quick)
    drawn = sampling_table(device, (4, 64) if quick else (BATCH, LENGTH), quick)
    progress("")
    publish("meaningful", [fused, drawn], options, device=str(device))


class Problem:
    """Hidden states, an output layer and the values of its first tokens, whichever way the loss is computed."""

    def __init__(
        self, device: torch.device, sizes: tuple[int, int, int, int], kind: str, codes: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        positions, width, tokens, values = sizes
        self.codes = codes
        self.hidden = torch.randn(positions, width, device=device).to(dtype).requires_grad_()
        self.weight = torch.randn(tokens, width, device=device).mul_(width**-0.5).requires_grad_()
        self.values = torch.randn(codes, values, device=device)
        self.targets = torch.randint(codes, (positions,), device=device)
        self.row_weights = torch.ones(positions, device=device)
        self.reconstruction: Reconstruction = make_reconstruction(kind, self.values)
        self.table = self.reconstruction.on(device, torch.float32)

    def plain(self, rows: int) -> Tensor:
        """The formula as one would write it down: a model's logits, and of them those of the modality."""
        logits = (self.hidden[:rows] @ self.weight.t())[:, : self.codes]
        return self.table.row_losses(logits.float(), self.targets[:rows]).sum()

    def fused(self, rows: int) -> Tensor:
        """What `MeaningfulLoss` does."""
        own = slice(0, self.codes)
        part = LossPart(self.reconstruction, own, None, self.targets[:rows], self.row_weights[:rows])
        sums, _ = expected_value_sums(HeadOutput(self.hidden[:rows], self.weight), [part])
        return sums[0]

    def step(self, way: str, context: AbstractContextManager[object], rows: int | None = None) -> float:
        """Run forward and backward and return the time."""
        self.hidden.grad = self.weight.grad = None
        device = self.hidden.device
        start = now(device)
        with context:
            loss = {"plain formula": self.plain, "fused": self.fused}[way](rows or len(self.hidden))
        loss.backward()
        return now(device) - start


def peak(
    way: str, type_name: str, kind: str, codes: int, device: torch.device, sizes: tuple[int, int, int, int]
) -> dict[str, float]:
    """Return the peak memory of one pass, above inputs and gradients, and with them."""
    context: AbstractContextManager[object] = TYPES[type_name](device.type)
    problem = Problem(device, sizes, kind, codes, torch.float32 if type_name == "float32" else torch.bfloat16)
    problem.step(way, context, 2)  # loads the libraries
    problem.hidden.grad = problem.weight.grad = None
    inputs = memory(device)
    problem.step(way, context)
    used = peak_memory(device) - inputs
    held = problem.hidden.nbytes + problem.weight.nbytes
    return {"extra": (used - held) / MB, "total": (used + held) / MB}


def fused_table(device: torch.device, sizes: tuple[int, int, int, int], quick: bool) -> Table:
    rows: list[Row] = []
    tokens = sizes[2]
    cases = [("float32", kind, tokens) for kind in KINDS]
    for case in [*cases, ("bf16 autocast", "mse", tokens), ("float32", "mse", tokens // SMALL)]:
        progress(", ".join(map(str, case)))
        rows += compare(device, sizes, *case, quick)
    columns = {"way": "", "extra MB": ".1f", "× less": ".1f", "total MB": ".0f", "× less in all": ".1f"}
    title = "Expected-value loss, forward and backward: {:,} positions, {} wide, {:,} codes of {} values".format(
        *sizes
    )
    how = (
        f"On {device_name(device)}. Time: both in turns in one process, medians of {3 if quick else ROUNDS} rounds, "
        f"quartiles of the ratio. Memory: peak of one pass in a process of its own; extra is above inputs and "
        f"gradients."
    )
    return Table(title, {**columns, "ms": ".1f", "× faster": ".2f", "quartiles": ""}, how, rows)


def compare(
    device: torch.device, sizes: tuple[int, int, int, int], type_name: str, kind: str, codes: int, quick: bool
) -> list[Row]:
    """Return a row for the plain formula and one for the fused way."""
    ways = ("plain formula", "fused")
    found = {way: in_own_process(peak, way, type_name, kind, codes, device, sizes) for way in ways}
    problem = Problem(device, sizes, kind, codes, torch.float32 if type_name == "float32" else torch.bfloat16)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-1, 3 if quick else ROUNDS):
        for way in ways:
            context: AbstractContextManager[object] = TYPES[type_name](device.type)
            took = problem.step(way, context)
            if turn >= 0:
                times[way].append(took)
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    low, middle, high = quartiles(ratios)
    plain = found["plain formula"]
    rows: list[Row] = []
    for way in ways:
        mine, fused = found[way], way == "fused"
        rows.append(
            {
                "way": f"{way}, {kind}, {type_name}" + (f", {codes:,} of the codes" if codes < sizes[2] else ""),
                "extra MB": mine["extra"],
                "× less": plain["extra"] / max(mine["extra"], 1e-3),
                "total MB": mine["total"],
                "× less in all": plain["total"] / mine["total"],
                "ms": 1e3 * (median(times[way]) or 0.0),
                "× faster": middle if fused else 1.0,
                "quartiles": f"{low:.2f}–{high:.2f}" if fused else None,
            }
        )
    return rows


class Training:
    """A small transformer that has begun to learn three modalities of one slowly moving number, and one batch of it."""

    def __init__(self, device: torch.device, batch: int, length: int, steps: int, quick: bool) -> None:
        torch.manual_seed(0)
        sizes = (
            {"image": 64, "scalar": 16, "spectrum": 32} if quick else {"image": 2048, "scalar": 512, "spectrum": 1024}
        )
        self.device = device
        self.vocab = build_vocab_spec(modalities=sizes)
        self.codebooks = {
            "image": waves(sizes["image"], 32),
            "scalar": torch.linspace(-1.7, 1.7, sizes["scalar"]),
            "spectrum": waves(sizes["spectrum"], 16),
        }
        self.model = CausalTransformerLM(
            self.vocab.vocab_size,
            d_model=32 if quick else 128,
            n_layers=2,
            n_heads=4,
            max_len=length,
            dropout=0.0,
        ).to(device)
        self._tasks: dict[tuple[int | None, bool], SupervisedTask] = {}
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(steps):
            self.batch = self.draw(batch, length)
            self.gradients(None, use_ce=True)
            optimizer.step()
        self.batch = self.draw(batch, length)

    def draw(self, batch: int, length: int) -> dict[str, Tensor]:
        """Return tokens of the three modalities in turn, all about a number between 0 and 1 that wanders."""
        steps = torch.randn(batch, length + 1).mul_(0.03)
        place = (steps.cumsum(1) + torch.rand(batch, 1)).remainder_(2.0).sub_(1.0).abs_().clamp_(0.0, 0.9999)
        ranges = list(self.vocab.modalities.values())
        chosen = torch.arange(length + 1) % len(ranges)
        low, size = (torch.tensor([getattr(one, key) for one in ranges])[chosen] for key in ("base", "size"))
        return {"tokens": (low + (place * size).long()).to(self.device)}

    def gradients(self, sample_k: int | None, *, use_ce: bool) -> tuple[Tensor, float]:
        """Return the gradient of a step as one vector, and the time of forward and backward."""
        task = self.task(sample_k, use_ce)
        self.model.zero_grad()
        start = now(self.device)
        terms = task(self.model, self.batch, metrics=False)
        torch.stack([term.sum / term.count * term.weight for term in terms.values()]).sum().backward()
        took = now(self.device) - start
        return nn.utils.parameters_to_vector([p.grad for p in self.model.parameters() if p.grad is not None]), took

    def task(self, sample_k: int | None, use_ce: bool) -> SupervisedTask:
        """Return the task that draws so many positions; made once, as a trainer does."""
        if (sample_k, use_ce) not in self._tasks:
            loss = MeaningfulLoss(self.vocab, self.codebooks, sample_k=sample_k, use_ce=use_ce)
            self._tasks[sample_k, use_ce] = SupervisedTask(loss)
        return self._tasks[sample_k, use_ce]


def waves(size: int, values: int) -> Tensor:
    """Return vectors that change smoothly with the code, of a mean square near 1."""
    codes = torch.linspace(0.0, 1.0, size)[:, None]
    return 1.4 * torch.cos(torch.pi * torch.arange(1, values + 1) * codes)


def sampling_table(device: torch.device, shape: tuple[int, int], quick: bool) -> Table:
    steps, draws = (2, 2) if quick else (LEARNING_STEPS, DRAWS)
    training = Training(device, *shape, steps, quick)
    sampled = (8, 32) if quick else SAMPLED
    rounds = 2 if quick else STEP_ROUNDS
    choices: list[int | None] = [None, *sampled]
    times = in_turns(training, choices, rounds, use_ce=False), in_turns(training, choices, rounds, use_ce=True)
    rows: list[Row] = []
    for k in choices:
        progress(f"k = {k}")
        row = {
            "positions of each modality": "all" if k is None else f"{k:,}",
            "share": min(1.0, (k or 10**9) / (shape[0] * shape[1] / 3)),
            "ms, meaningful": 1e3 * (median(times[0][k]) or 0.0),
            "× of all": ratio(times[0], k),
            "ms, with CE": 1e3 * (median(times[1][k]) or 0.0),
            "× of all, with CE": ratio(times[1], k),
        }
        if k is not None:
            row |= errors(training, k, draws)
        rows.append(row)
    columns = {
        "positions of each modality": "",
        "share": ".1%",
        "ms, meaningful": ".0f",
        "× of all": ".2f",
        "ms, with CE": ".0f",
        "× of all, with CE": ".2f",
        "gradient error": ".3f",
        "cosine": ".4f",
        "gradient error, with CE": ".4f",
    }
    batch, length = shape
    title = f"Drawing k positions of each modality: a step of a small transformer on {batch} × {length} tokens"
    how = (
        f"On {device_name(device)}. Forward and backward of the whole model ({training.model.num_parameters():,} "
        f"parameters, {training.vocab.vocab_size:,} tokens, weights of 0.1), fused, after {steps} steps of training. "
        f"All k in turns, medians of {rounds} rounds, ratios within a round. Gradient error: |drawn - all| / |all| "
        f"over all parameters, mean of {draws} draws; with CE of the whole objective."
    )
    return Table(title, columns, how, rows)


def in_turns(
    training: Training, choices: list[int | None], rounds: int, *, use_ce: bool
) -> dict[int | None, list[float]]:
    """Return the times of a step for every k, one round after the other."""
    times: dict[int | None, list[float]] = {k: [] for k in choices}
    for turn in range(-1, rounds):
        for k in choices:
            _, took = training.gradients(k, use_ce=use_ce)
            if turn >= 0:
                times[k].append(took)
    return times


def ratio(times: dict[int | None, list[float]], k: int | None) -> float:
    return median([a / b for a, b in zip(times[k], times[None], strict=True)]) or 0.0


def errors(training: Training, k: int, draws: int) -> dict[str, float]:
    """Return how far the gradients of drawn positions are from those of all."""
    found: dict[str, float] = {}
    for use_ce, name in ((False, "gradient error"), (True, "gradient error, with CE")):
        whole = training.gradients(None, use_ce=use_ce)[0].double()
        drawn = [training.gradients(k, use_ce=use_ce)[0].double() for _ in range(draws)]
        found[name] = sum(float((one - whole).norm() / whole.norm()) for one in drawn) / draws
        if not use_ce:
            found["cosine"] = sum(float(one @ whole / (one.norm() * whole.norm())) for one in drawn) / draws
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name()})"
    return f"{device} ({torch.get_num_threads()} thread(s))"


if __name__ == "__main__":
    main()
