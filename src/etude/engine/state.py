"""Everything a run is: what a checkpoint holds, and what must be put back for a resumed run to be the same run."""

import json
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import safetensors.torch
import torch
from torch import Tensor, nn

from etude.checkpoint import (
    Checkpoint,
    clean_state_dict,
    load_model_state,
    load_optimizer_state,
    optimizer_state,
    pack,
    unpack,
)
from etude.core import Clock
from etude.core.random import RunRandom, aside, mix
from etude.distributed import World
from etude.engine.callback import CallbackList
from etude.engine.ledger import Ledger
from etude.engine.precision import Precision

logger = logging.getLogger("etude")


@dataclass(slots=True)
class TrainState:
    """Model, optimizer, loss scale, clock, numbers in flight, callbacks and every random generator of every rank.

    The learning rate and the order of the data are functions of the clock, so they need no state of their own.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    clock: Clock
    ledger: Ledger
    callbacks: CallbackList
    world: World
    seed: int = 0
    random: RunRandom = field(init=False)

    def __post_init__(self) -> None:
        self.random = RunRandom(mix(self.seed, self.world.rank))

    def aside(self, hook: str) -> AbstractContextManager[None]:
        """Return a context in which a hook that is no part of a step draws numbers of its own, again on a resume."""
        moments = {"on_train_begin": 0, "on_epoch_begin": self.clock.epoch}
        return aside(mix(self.seed, crc32(hook.encode()), moments.get(hook, self.clock.step)))

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the model's tensors and the tree of all the rest. Every rank must call this together."""
        return clean_state_dict(self.model), {
            "clock": self.clock.state_dict(),
            "optimizer": optimizer_state(self.optimizer, self.model),
            "precision": self.precision.state_dict(),
            "ledger": self.ledger.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "rng": self.world.gather_bytes(_encode(self.random.state())),
            "seed": self.seed,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put back what `capture` returned.

        Raises CheckpointError, with parameter names and shapes, if the model or optimizer is a different one.
        """
        load_model_state(self.model, checkpoint.model_state)
        state = checkpoint.state
        load_optimizer_state(self.optimizer, self.model, state["optimizer"])
        self.clock.load_state_dict(state["clock"])
        self.precision.load_state_dict(state["precision"])
        self.ledger.load_state_dict(state["ledger"])
        self.callbacks.load_state_dict(state["callbacks"])
        self._restore_rng(state["rng"])

    def _restore_rng(self, states: list[Tensor]) -> None:
        if len(states) == self.world.size:
            self.random.load(_decode(states[self.world.rank]))
            return
        # Another number of ranks cannot continue the same random streams: begin new ones, the same at every resume.
        self.random = RunRandom(mix(self.seed, self.clock.step, self.world.rank))
        if self.world.is_main:
            logger.warning(
                "the checkpoint was saved by %d processes and is resumed by %d: the order of the data is the same, "
                "random numbers (dropout) are not",
                len(states),
                self.world.size,
            )


def _encode(tree: dict[str, Any]) -> Tensor:
    tensors, structure = pack(tree)
    data = safetensors.torch.save(tensors, metadata={"structure": json.dumps(structure)})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    raw = data.cpu().numpy().tobytes()
    header_size = int.from_bytes(raw[:8], "little")
    structure = json.loads(json.loads(raw[8 : 8 + header_size])["__metadata__"]["structure"])
    return unpack(safetensors.torch.load(raw), structure)
