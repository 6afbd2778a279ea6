"""Advice that follows from a profile: what to change, and the most it can save."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from etude.callbacks.profiling.profile import Advice, Profile

Source = Literal["dataset", "memory", "torch", "other"]

WAIT, PERIODIC, KERNELS = 0.05, 0.03, 0.1
"""Shares of a step that are worth advice: waiting; logging and saving; kinds of kernels."""
FEWER = 10
"""How many times more rarely to log and save."""
HALF = 0.5
"""Share of an update that fused kernels save; share of matrix products in TF32 that bf16 saves."""
TENSOR_CORES = 0.9
"""Share of matrix products in full float32 that bf16 saves on GPUs of data centres: 0.87 of a step on an H200."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What advice depends on besides the profile."""

    is_cuda: bool = False
    precision: str = "fp32"
    has_bf16: bool = False
    is_compiled: bool = False
    is_tf32: bool = True
    """Whether matrix products in float32 use tensor cores, with fewer digits."""
    capture: str = "auto"
    source: Source = "other"
    """Who makes the batches: Etude from a dataset, or from memory or files; a torch DataLoader; or something else."""
    num_workers: int = 0
    prefetch: int = 0
    pin_memory: bool = True
    batch_size: int | None = None
    """None if a loader of the user makes the batches."""
    can_fuse: bool = False
    """Whether the optimizer has fused kernels that it does not use."""
    cores: int = 1
    threads: int = 1
    """CPU cores of the machine, and threads of torch."""
    free_memory: float = 0.0
    """Share of the device's memory that is free."""
    save_every_steps: int | None = None
    checkpoint_interval: int = 1


def advise(profile: Profile, facts: Facts) -> list[Advice]:
    """Return the advice that is due, the largest saving first."""
    found = [one for rule in _RULES if (one := rule(profile, facts)) is not None and one.saves >= PERIODIC / 2]
    return sorted(found, key=lambda one: -one.saves)


def _data(profile: Profile, facts: Facts) -> Advice | None:
    wait, share = profile.parts.get("data", 0.0), profile.share("data")
    # on the CPU, batches and steps share the cores: a step takes at least its work on all of them
    least = 0.0 if facts.is_cuda else profile.step_ms * min(profile.busy_cores / facts.cores, 1.0)
    if share < WAIT or profile.step_ms - least < KERNELS * profile.step_ms:
        return None
    work = max(profile.step_ms - wait, 1e-9)
    why = f"data wait is {share:.0%} of a step"
    if facts.source == "memory":
        if facts.prefetch:
            return None
        return Advice(why, "training.prefetch=2", (profile.step_ms - max(work, wait, least)) / profile.step_ms)
    # so many that batches come as fast as steps: what is made beside the steps takes `now` times as long as a step
    now = max(facts.num_workers, 1)
    makes = wait if facts.num_workers == facts.prefetch == 0 else now * profile.step_ms
    workers = min(math.ceil(makes / work), facts.cores)
    if workers <= facts.num_workers or facts.source == "other":
        return None
    setting = f"num_workers={workers}"
    # Workers that are started again for every epoch would cost what they save if epochs are short.
    ours = f"training.{setting} training.persistent_workers=true"
    change = ours if facts.source == "dataset" else f"{setting}, persistent_workers=True of the DataLoader"
    return Advice(why, change, (profile.step_ms - max(work, makes / workers, least)) / profile.step_ms)


def _transfer(profile: Profile, facts: Facts) -> Advice | None:
    share = profile.share("transfer")
    if not facts.is_cuda or share < WAIT:
        return None
    why = f"waiting for copies to the device is {share:.0%} of a step"
    if not facts.pin_memory:
        return Advice(why, "training.pin_memory=true", share)
    return None if facts.prefetch or facts.source == "other" else Advice(why, "training.prefetch=2", share)


def _idle(profile: Profile, facts: Facts) -> Advice | None:
    if not facts.is_cuda:
        return None
    idle = profile.idle - profile.share("data", "transfer", "logging", "saving")  # these have advice of their own
    if idle < KERNELS:
        return None
    why = f"the GPU is idle in {idle:.0%} of a step, because the host launches kernels too slowly"
    if facts.capture == "off":
        return Advice(why, "training.capture=auto", idle)
    if facts.batch_size is None or facts.free_memory < HALF:
        return None
    return Advice(f"{why}, and {facts.free_memory:.0%} of its memory is free", _larger(facts.batch_size), idle)


def _larger(batch_size: int) -> str:
    return f"training.batch_size={2 * batch_size} (another training: more samples per step)"


def _precision(profile: Profile, facts: Facts) -> Advice | None:
    share = profile.matrix_ms / max(profile.step_ms, 1e-9)
    if not (facts.is_cuda and facts.precision == "fp32" and facts.has_bf16) or share < KERNELS:
        return None
    why = f"matrix products in float32 are {share:.0%} of a step, and this GPU has tensor cores"
    tf32 = "" if facts.is_tf32 else " (or TF32: torch.set_float32_matmul_precision('high') in your program)"
    return Advice(why, f"training.precision=bf16{tf32}", share * (HALF if facts.is_tf32 else TENSOR_CORES))


def _compile(profile: Profile, facts: Facts) -> Advice | None:
    share = profile.other_ms / max(profile.step_ms, 1e-9)
    if not facts.is_cuda or facts.is_compiled or share < 2 * KERNELS:
        return None
    return Advice(f"kernels other than matrix products are {share:.0%} of a step", "training.compile=step", share)


def _optimizer(profile: Profile, facts: Facts) -> Advice | None:
    share = profile.share("optimizer")
    if not facts.can_fuse or share < KERNELS:
        return None
    why = f"the optimizer is {share:.0%} of a step and does not use its fused kernel"
    return Advice(why, "optimizer.kernel=fused (fused=True in Python)", share * HALF)


def _threads(profile: Profile, facts: Facts) -> Advice | None:
    share = profile.share("forward", "backward", "optimizer")
    if facts.is_cuda or facts.threads >= facts.cores or profile.busy_cores < 0.8 * facts.threads:
        return None
    why = f"steps keep {profile.busy_cores:.1f} of {facts.cores} CPU cores busy"
    return Advice(why, f"training.num_threads={facts.cores}", share * (1 - facts.threads / facts.cores))


def _logging(profile: Profile, facts: Facts) -> Advice | None:  # noqa: ARG001
    share = profile.share("logging")
    if share < PERIODIC:
        return None
    interval = round(profile.intervals["logging"])
    often = f"{interval} steps" if interval > 1 else "step"
    return Advice(
        f"logging every {often} costs {share:.0%}",
        f"training.log_interval={interval * FEWER}",
        share * (1 - 1 / FEWER),
    )


def _saving(profile: Profile, facts: Facts) -> Advice | None:
    share = profile.share("saving")
    if share < PERIODIC:
        return None
    every, interval = facts.save_every_steps, profile.intervals["saving"]
    by_steps = 0.0 if every is None else interval / every
    """Share of the checkpoints that are made every N steps; the others are made at the end of epochs."""
    if every is not None and by_steps >= HALF:
        change, rarer = f"training.save_every_steps={every * FEWER}", by_steps
    else:
        change, rarer = f"training.checkpoint_interval={facts.checkpoint_interval * FEWER}", 1 - by_steps
    return Advice(f"saving every {interval:,.4g} steps costs {share:.0%}", change, share * rarer * (1 - 1 / FEWER))


_RULES: tuple[Callable[[Profile, Facts], Advice | None], ...] = (
    _data,
    _transfer,
    _idle,
    _precision,
    _compile,
    _optimizer,
    _threads,
    _logging,
    _saving,
)
