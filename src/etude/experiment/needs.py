"""What a dry run found out: the needs of a run, in bytes and in words."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from etude.distributed.settings import Sizes

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(slots=True)
class DryRun:
    """What a run needs. Sizes are bytes of one process; None where they are unknown."""

    name: str
    world: int
    parameters: int = 0
    trained: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    weights: int = 0
    """Parameters and buffers, or the shard of them."""
    gradients: int = 0
    buckets: int = 0
    """What DistributedDataParallel needs to all-reduce the gradients."""
    gathered: int = 0
    """The two largest blocks, which FSDP2 gathers: one at work and the next one."""
    optimizer: int | None = None
    average: int = 0
    """The moving average of the weights (`training.ema`, or the callback)."""
    checkpoint: int | None = None
    """The size of a checkpoint, over all processes."""
    activations: int | None = None
    """What the forward pass of the model keeps for the backward pass, in float32 and without recomputation."""
    no_activations: str = ""
    """Why the activations are unknown."""
    micro_batch: int = 0
    """The most samples of one process in a forward pass."""
    batch_size: int | None = None
    samples: dict[str, int] = field(default_factory=dict)
    """Samples by split."""
    shares: Counter[int] = field(default_factory=Counter)
    """Samples of a process in a full batch → how many processes have so many."""
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def memory(self) -> int | None:
        """The memory of a process, as far as it is known."""
        parts = (self.weights, self.gradients, self.buckets, self.gathered, self.average)
        if self.optimizer is None or self.activations is None:
            return None
        return sum(parts) + self.optimizer + self.activations

    def lines(self) -> Iterator[str]:
        """Return it in words."""
        many = f"{self.world:,} process{'es' * (self.world != 1)}"
        yield f"{self.name} on {many}; nothing is trained or written"
        if self.sizes.divides_model:
            one = self.sizes
            yield _row("parallel", f"data {one.data:,} x shard {one.shard:,} x tensor {one.tensor:,}")
        yield _row("parameters", f"{self.parameters:,}, {self.trained:,} of them trained")
        yield _row("samples", ", ".join(f"{count:,} {name}" for name, count in self.samples.items()) or "unknown")
        if self.shares:
            sizes = " or ".join(f"{size:,}" for size in sorted(self.shares))
            each = "each" if self.sizes.tensor == 1 else f"each group of {self.sizes.tensor} (parallel.tensor)"
            yield _row("batch", f"{self.batch_size:,} samples over all processes, {sizes} on {each}")
        steps = "unknown" if self.steps_per_epoch is None else f"{self.steps_per_epoch:,} steps"
        total = "no end" if self.total_steps is None else f"{self.total_steps:,} steps"
        yield _row("epoch, run", f"{steps}, {total}")
        yield "memory of each process"
        yield _row("weights", size_in_words(self.weights))
        yield _row("gradients", size_in_words(self.gradients))
        if self.buckets:
            yield _row("gradient buckets", size_in_words(self.buckets))
        if self.gathered:
            yield _row("gathered blocks", size_in_words(self.gathered))
        yield _row("optimizer", size_in_words(self.optimizer))
        if self.average:
            yield _row("average (ema)", size_in_words(self.average))
        known = f"{size_in_words(self.activations)} for {self.micro_batch:,} samples (float32, forward of the model)"
        yield _row("activations", f"unknown: {self.no_activations}" if self.activations is None else known)
        if self.memory is not None:
            yield _row("sum", size_in_words(self.memory))
        yield _row("checkpoint", size_in_words(self.checkpoint))
        yield from (f"note: {line}" for line in self.warnings)


def size_in_words(count: int | None) -> str:
    """Return a size in its largest unit.

    >>> size_in_words(999), size_in_words(5 * 2**20), size_in_words(None)
    ('999 B', '5.0 MiB', 'unknown')
    """
    if count is None:
        return "unknown"
    place = min(max(0, (count.bit_length() - 1) // 10), len(UNITS) - 1)
    return f"{count:,} B" if place == 0 else f"{count / 2 ** (10 * place):,.1f} {UNITS[place]}"


def _row(name: str, words: str) -> str:
    return f"  {name:<17} {words}"
