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
        resumed: Mapping[str, float] | None = None,
        config: str = "",
    ) -> None:
        """Make a saver.

        `resumed` holds the metrics of the checkpoint that the state comes from, if it is of this run; `config` is the
        run's config as text, kept in every checkpoint.
        """
        self.manager = manager
        self._state = state
        self._meta = dict(meta or {})
        self._config = config
        self._resumed_at = None if resumed is None else self._moment()
        self._saved_at, self._has_metrics = self._resumed_at, bool(resumed)

    def save(self, metrics: Mapping[str, float]) -> Path | None:
        """Write a checkpoint and return its folder; None if this very moment is saved already.

        Raises CheckpointError on every rank if the writing rank cannot write; earlier checkpoints stay intact.
        """
        clock, world = self._state.clock, self._state.world
        if self._moment() == self._saved_at and (self._has_metrics or not metrics):
            if self._saved_at == self._resumed_at:
                world.attempt(lambda: self.manager.finish(clock.step), here=world.is_main)
            return None
        model_state, rest = self._state.capture()
        meta = {**self._meta, "epoch": clock.epoch, "position": clock.position}
        world.attempt(
            lambda: self.manager.save(
                clock.step,
                model_state=model_state,
                state=rest,
                metrics=dict(metrics),
                meta=meta,
                config=self._config,
            ),
            here=world.is_main,
        )
        self._saved_at, self._has_metrics = self._moment(), bool(metrics)
        return self.manager.root / folder_name(clock.step)

    def _moment(self) -> tuple[int, int]:
        return self._state.clock.step, self._state.clock.epoch
