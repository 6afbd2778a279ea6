"""Saving as a phase of the loop: every rank takes part, one writes, and all of them learn of a failure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.checkpoint import CheckpointManager, folder_name
from etude.engine.state import TrainState


class Saver:
    """Writes the state of a run through a `CheckpointManager`, at most once per step."""

    def __init__(
        self,
        manager: CheckpointManager,
        state: TrainState,
        meta: Mapping[str, Any] | None = None,
        *,
        is_saved: bool = False,
    ) -> None:
        """`is_saved` says that the state is that of the newest checkpoint, as after a resume."""
        self.manager = manager
        self._state = state
        self._meta = dict(meta or {})
        self._saved_at = (state.clock.step, state.clock.epoch) if is_saved else None

    def save(self, metrics: Mapping[str, float]) -> Path | None:
        """Write a checkpoint and return its folder; None if this very moment is saved already.

        Raises CheckpointError on every rank if the writing rank cannot write; earlier checkpoints stay intact.
        """
        clock, world = self._state.clock, self._state.world
        moment = (clock.step, clock.epoch)
        if moment == self._saved_at:
            return None
        model_state, rest = self._state.capture()
        meta = {**self._meta, "epoch": clock.epoch, "position": clock.position}
        world.attempt(
            lambda: self.manager.save(
                clock.step, model_state=model_state, state=rest, metrics=dict(metrics), meta=meta
            ),
            here=world.is_main,
        )
        self._saved_at = moment
        return self.manager.root / folder_name(clock.step)
