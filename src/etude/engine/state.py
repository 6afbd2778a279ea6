"""The complete state of a run: what a checkpoint holds and a resume restores."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NotRequired, get_type_hints
from zlib import crc32

import safetensors.torch
import torch
from annotated_types import Ge, Lt, MinLen
from torch import Tensor, nn

from etude.checkpoint import Checkpoint, CheckpointManager, check_kind, load_model_state, pack, record_of, unpack
from etude.checkpoint.background import BackgroundWriter
from etude.checkpoint.contents import Contents
from etude.checkpoint.frozen import FrozenParams
from etude.checkpoint.match import check_model_state
from etude.checkpoint.optimizer import check_optimizer, load_optimizer_state, optimizer_state
from etude.checkpoint.saved_tensor import has_tensors, whole, whole_tree
from etude.checkpoint.trust import errors_of
from etude.core import CheckpointError, Clock, Task
from etude.core.loader import StatefulLoader
from etude.core.model import clean_state_dict
from etude.core.random import RunRandom, aside, check_rng_state, mix
from etude.core.run_layout import folder_name
from etude.distributed import World
from etude.engine.callback_list import CallbackList
from etude.engine.compiled import DECISIONS, CompiledTask
from etude.engine.precision import MixedPrecision
from etude.engine.splitter import MicroBatchSplitter
from etude.engine.step_log import RunningSums, StepLog

logger = logging.getLogger("etude")

Count = Annotated[int, Ge(0), Lt(2**63)]
ADDED = ("phase", "validation_due")
"""Counters that older checkpoints lack."""
CLOCK = record_of(
    "Clock",
    {one.name: NotRequired[Count] if one.name in ADDED else Count for one in fields(Clock)},
)
TALLY = record_of("RunningSums", {**get_type_hints(RunningSums), "forward_flops": float}, total=False)
"""Older checkpoints also counted FLOPs; `RunningSums.of` drops them."""
LEDGER = record_of(
    "Ledger", {"window": TALLY, "epoch": TALLY, "tokens": NotRequired[Annotated[float, Ge(0)]], "bad_streak": Count}
)
STATE = record_of(
    "State",
    {
        "clock": dict[str, Any],
        "optimizer": dict[str, Any],
        "precision": dict[str, Any],
        "ledger": dict[str, Any],  # the step log; the key is kept for older checkpoints
        "callbacks": dict[str, dict[str | int, Any]],
        "rng": Annotated[list[Tensor], MinLen(1)],
        "seed": int,
        "loss": NotRequired[dict[str, Any]],  # only if it has decided something
        "compile": NotRequired[record_of("Compile", DECISIONS)],
        "micro_batches": NotRequired[record_of("MicroBatches", {"size": Annotated[int, Ge(1)], "given": Count})],
        "metrics": NotRequired[Annotated[list[Tensor], MinLen(1)]],  # only if some are measured in training
        "data": NotRequired[Annotated[list[Tensor], MinLen(1)]],  # only if the loader keeps a state of its own
    },
)
"""What `TrainState.capture` returns beside the model."""


@dataclass(slots=True)
class TrainState:
    """Model, optimizer, loss scale, clock, running sums, callbacks and every random generator of every rank.

    Learning rate and data order are functions of the clock, so they need no state. A third-party loader may have its
    own state, so that a resume need not read earlier batches again.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: MixedPrecision
    clock: Clock
    log: StepLog
    callbacks: CallbackList
    world: World
    seed: int = 0
    task: Task = field(default_factory=Task)
    """Its decisions on the first batches are saved."""
    compiled: CompiledTask | None = None
    """Its decisions are saved too."""
    loader: StatefulLoader | None = None
    splitter: MicroBatchSplitter = field(default_factory=MicroBatchSplitter)
    """The size of micro-batches that fits into memory is saved if it had to be found."""
    random: RunRandom = field(init=False)

    def __post_init__(self) -> None:
        self.random = RunRandom(mix(self.seed, self.log.world.rank))

    def aside(self, hook: str) -> AbstractContextManager[None]:
        """Return a context in which a hook outside a step draws from its own generator, the same after a resume."""
        moments = {"on_train_begin": 0, "on_epoch_begin": self.clock.epoch}
        return aside(mix(self.seed, crc32(hook.encode()), moments.get(hook, self.clock.step)))

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the model's tensors and the tree of everything else. All ranks must call this together."""
        compiled = {} if self.compiled is None else self.compiled.decisions()
        sizes = self.splitter.state_dict()
        decided = {"loss": self.task.decisions(), "compile": compiled, "micro_batches": sizes}
        return clean_state_dict(self.model), {
            "clock": self.clock.state_dict(),
            "optimizer": optimizer_state(self.optimizer, self.model),
            "precision": self.precision.state_dict(),
            "ledger": self.log.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "rng": self.world.gather_bytes(_encode(self.random.state())),
            "seed": self.seed,
            **{name: made for name, made in decided.items() if made},
            **self._metrics(),
            **self._data(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore what `capture` returned. All ranks must call this together.

        Raises CheckpointError with the checkpoint and the part. All parts are checked before the first one changes,
        and callbacks, which may still refuse theirs, are restored before model and optimizer.
        """
        saved = self.world.attempt(lambda: self._checked(checkpoint))
        self.world.attempt(lambda: self._change(checkpoint, saved))
        before = checkpoint.state["seed"]
        if self.world.is_main and before != self.seed:
            logger.warning(
                "the checkpoint has seed %d, this run has %d: random numbers (dropout), and the order of data that is "
                "shuffled by the seed, are others from here on%s",
                before,
                self.seed,
                ", so that some samples of this epoch come twice and others not at all" * bool(self.clock.position),
            )
        elif self.world.is_main and len(checkpoint.state["rng"]) != self.world.size:
            logger.warning(
                "the checkpoint was saved by %s and is resumed by %d: the order of the data is the same, "
                "random numbers (dropout) are not",
                "1 process" if (before := len(checkpoint.state["rng"])) == 1 else f"{before} processes",
                self.world.size,
            )
        saved = checkpoint.state["callbacks"].items()
        left = [key for key, state in saved if key not in self.callbacks.by_key() and has_tensors(state)]
        if self.world.is_main and left:
            logger.warning("the checkpoint has tensors of callbacks that this run lacks: %s", ", ".join(left))
        compiled = checkpoint.state.get("compile", {})
        if self.world.is_main and self.compiled is not None and (words := self.compiled.difference(compiled)):
            logger.warning(words)

    def _checked(self, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Raise CheckpointError unless the checkpoint fits; return the state of this rank's random generators."""
        state = checkpoint.state
        with errors_of(checkpoint.path):
            check_kind(STATE, state, "state")
            for tally in state["ledger"].values():
                if isinstance(tally, dict):
                    tally.pop("forward_flops", None)  # older versions saved it
            check_kind(CLOCK, state["clock"], "clock")
            check_kind(LEDGER, state["ledger"], "ledger")
            for name in ("window", "epoch"):
                tally = RunningSums.of(state["ledger"][name])
                if tally.sums.keys() != tally.counts.keys():
                    raise CheckpointError(f"ledger.{name}: the names of sums and counts differ")
        with errors_of(checkpoint.path, "model"):
            check_model_state(self.model, checkpoint.model_state)
        with errors_of(checkpoint.path, "optimizer"):
            check_optimizer(self.optimizer, self.model, state["optimizer"])
        with errors_of(checkpoint.path, "precision"):
            self.precision.check(state["precision"])
        with errors_of(checkpoint.path, "rng"):
            if state["seed"] != self.seed or len(state["rng"]) != self.world.size:  # they cannot be continued
                return None
            saved = _decode(state["rng"][self.world.rank])
            check_rng_state(saved)
            return saved

    def _change(self, checkpoint: Checkpoint, random: dict[str, Any] | None) -> None:
        state = checkpoint.state
        with errors_of(checkpoint.path, "loss"):
            self.task.decide(state.get("loss", {}))
            self.splitter.load_state_dict(state.get("micro_batches", {}))
            if self.compiled is not None:
                self.compiled.decide(state.get("compile", {}))
        with _rates_kept(self.optimizer):
            for key, callback in self.callbacks.by_key().items():
                if saved := state["callbacks"].get(key):
                    with errors_of(checkpoint.path, f"callbacks.{key}"):
                        callback.load_state_dict(saved if callback.loads_shards else whole_tree(saved))
            with errors_of(checkpoint.path, "metrics"):
                saved = state.get("metrics", [])[self.log.world.rank :: self.log.world.size]
                self.task.measures.load_state_dict(*map(_decode, saved))
            with errors_of(checkpoint.path, "data"):
                self._load_data(state.get("data", []))
        with errors_of(checkpoint.path, "model"):
            load_model_state(self.model, checkpoint.model_state)
        with errors_of(checkpoint.path, "optimizer"):
            load_optimizer_state(self.optimizer, self.model, state["optimizer"])
        with errors_of(checkpoint.path):
            self.clock.load_state_dict(state["clock"])
            self.precision.load_state_dict(state["precision"])
            self.log.load_state_dict(state["ledger"])
        if random is not None:
            self.random.load(random)
        else:  # new random states, the same at every resume
            self.random = RunRandom(mix(self.seed, self.clock.step, self.log.world.rank))

    def _metrics(self) -> dict[str, list[Tensor]]:
        """Return what every rank has measured in the current epoch."""
        measures = self.task.measures
        if not measures.wants(training=True):
            return {}
        return {"metrics": self.log.world.gather_bytes(_encode(measures.state_dict()))}

    def _data(self) -> dict[str, list[Tensor]]:
        """Return the loader's state on every rank; a rank whose state is not plain data warns and saves none."""
        if self.loader is None:
            return {}
        try:
            saved = _encode(self.loader.state_dict())
        except CheckpointError as error:
            saved = _encode({})
            _warn_once(f"the training loader's own state is not saved, so a resume reads its batches again: {error}")
        found = self.world.gather_bytes(saved)
        return {"data": found} if any(_decode(one) for one in found) else {}

    def _load_data(self, saved: list[Tensor]) -> None:
        if self.loader is not None:
            self.loader.load_state_dict(_decode(saved[self.world.rank]) if len(saved) == self.world.size else {})


def callbacks_in(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the saved states of callbacks; raise CheckpointError if the checkpoint has none."""
    with errors_of(checkpoint.path):
        check_kind(STATE, checkpoint.state, "state")
    saved: dict[str, dict[str, Any]] = checkpoint.state["callbacks"]
    return saved


@contextmanager
def _rates_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo what a callback that was restored did to the learning rates if another one refuses its state."""
    groups = optimizer.param_groups
    rates = [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in groups]
    try:
        yield
    except BaseException:
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        raise


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _encode(tree: dict[str, Any]) -> Tensor:
    tensors, structure = pack(tree)
    data = safetensors.torch.save(tensors, metadata={"structure": json.dumps(structure)})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode(data: Tensor) -> dict[str, Any]:
    raw = whole(data).cpu().numpy().tobytes()
    header_size = int.from_bytes(raw[:8], "little")
    structure = json.loads(json.loads(raw[8 : 8 + header_size])["__metadata__"]["structure"])
    tree: dict[str, Any] = unpack(safetensors.torch.load(raw), structure)
    return tree


class Saver:
    """Writes the state of a run through a `CheckpointManager`, at most once per step.

    With a `BackgroundWriter` a save returns as soon as the state is copied; `settle` waits for its files.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        state: TrainState,
        meta: Mapping[str, Any] | None = None,
        *,
        resumed: Mapping[str, float] | None = None,
        config: str = "",
        trainable_only: bool | None = None,
        background: BackgroundWriter | None = None,
    ) -> None:
        """Make a saver.

        `resumed` holds the metrics of the checkpoint that was resumed, if it belongs to this run. `config` is the
        run's config as text, kept in every checkpoint. `trainable_only` is explained in `FrozenParams.of`.
        """
        self.manager = manager
        self._state = state
        self._meta = dict(meta or {})
        self._config = config
        self._frozen = FrozenParams.of(state.model, state.optimizer, manager.root, trainable_only)
        self._resumed_at = None if resumed is None else self._moment()
        self._saved_at, self._has_metrics = self._resumed_at, bool(resumed)
        self._background = background
        self._pending: Path | None = None

    @property
    def pending(self) -> Path | None:
        """The checkpoint that `settle` waits for; the same on all ranks."""
        return self._pending

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes in the background."""
        return self._background is not None and self._background.is_busy

    def save(self, metrics: Mapping[str, float]) -> Path | None:
        """Write a checkpoint and return its folder; None if this state is saved already, or `pending`.

        Raises CheckpointError on every rank if a rank cannot write; earlier checkpoints stay intact.
        """
        self.settle()
        clock, world = self._state.clock, self._state.world
        if self._moment() == self._saved_at and (self._has_metrics or not metrics):
            if self._saved_at == self._resumed_at:
                world.attempt(lambda: self.manager.finish(clock.step), here=world.is_main)
            return None
        path = self.manager.root / folder_name(clock.step)
        with self._state.callbacks.saving():
            contents = self._contents(dict(metrics))
            here = world.is_main or contents.is_sharded
            if self._background is None:
                world.attempt(lambda: self.manager.write(clock.step, contents, world), here=here)
            else:
                # Its own group: collectives of a thread and of training would meet in any order.
                apart = world.apart() if contents.is_sharded else replace(world, size=1)
                write = partial(self.manager.write, clock.step, world=apart)
                start = self._background.start
                world.attempt(lambda: start(contents, lambda copy: write(contents=copy)), here=here)
                self._pending = path
        self._saved_at, self._has_metrics = self._moment(), bool(metrics)
        return path if self._pending is None else None

    def settle(self) -> Path | None:
        """Wait for the checkpoint that is written in the background and return its folder; None if there is none.

        Raises CheckpointError on every rank if a rank could not write it. All ranks call this together.
        """
        path, self._pending = self._pending, None
        if path is not None and self._background is not None:
            self._state.world.attempt(self._background.wait)
        return path

    def join(self) -> None:
        """Wait until this rank writes nothing, whatever became of it: for the end of a run that failed."""
        if self._background is not None:
            self._background.join()

    def _contents(self, metrics: dict[str, float]) -> Contents:
        clock, world = self._state.clock, self._state.world
        model_state, rest = self._state.capture()
        meta = {**self._meta, "epoch": clock.epoch, "position": clock.position}
        if self._frozen is not None:
            frozen = self._frozen
            replaced = world.attempt(lambda: frozen.replaced(model_state), here=world.is_main)
            model_state = model_state if replaced is None else replaced
        facts = self.manager.facts(clock.step, metrics, meta)
        return Contents.of(model_state, rest, facts, self._config, world)

    def _moment(self) -> tuple[int, int]:
        return self._state.clock.step, self._state.clock.epoch
