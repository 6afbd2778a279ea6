"""An exponential moving average of the weights beside the trained ones."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from etude.callbacks.swapped import SwappedWeights
from etude.checkpoint import Checkpoint, check_kind, record_of
from etude.checkpoint.saved_tensor import fill
from etude.checkpoint.trust import check_tensor, errors_of
from etude.config.registry import register
from etude.core import CheckpointError, ConfigError
from etude.core.arguments import checked
from etude.core.model import clean_name, unwrap
from etude.distributed.shards import local_of, model_param, sharded_like
from etude.engine.callback import RunInfo, RunParts
from etude.optim.averaging import WeightAverage

logger = logging.getLogger("etude")

_STATE = record_of("EMA", {"count": Tensor, "weights": dict[str, Any], "is_swapped": bool})


@register("callback", "ema")
class EMA(SwappedWeights):
    """Averages the trained weights after every update; the average is what is validated, saved and left in the model.

    A checkpoint holds both: the averages as the model, so that everything that loads a model gets what was validated,
    and the raw weights, from which training continues. With `validate=False` it is the other way round. Buffers, such
    as batch norm statistics, are not averaged. An update that is skipped because it is not finite does not count. In
    a captured step the average is part of the graph.

    The numbers are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`.
    """

    needs_model = True
    loads_shards = True

    @checked
    def __init__(
        self,
        decay: Annotated[float, Gt(0), Lt(1)] = 0.999,
        start: Annotated[int, Ge(0)] = 0,
        every: Annotated[int, Ge(1)] = 1,
        validate: bool = True,
    ) -> None:
        """Average from update `start` on, every `every` updates; before that the average is a copy of the weights."""
        super().__init__()
        self.decay, self.start, self.every, self.validate = decay, start, every, validate
        self.average: WeightAverage | None = None
        self._named: dict[str, nn.Parameter] = {}
        self._loaded: dict[str, Any] = {}
        """A state that was loaded before the model was known."""

    def acts_in_steps(self) -> bool:
        """Return that it needs training steps."""
        return True

    def swaps(self) -> bool:
        """Return whether the average is validated."""
        return self.validate

    def bind(self, parts: RunParts) -> None:
        """Copy the weights that the optimizer trains."""
        super().bind(parts)
        optimizer = None if parts.learning_rate is None else parts.learning_rate.optimizer
        trained = (
            None
            if optimizer is None
            else {id(model_param(one)) for group in optimizer.param_groups for one in group["params"]}
        )
        assert parts.model is not None
        self._begin(parts.model, trained)

    def _begin(self, model: nn.Module, trained: set[int] | None) -> None:
        named = {
            clean_name(name): param
            for name, param in unwrap(model).named_parameters()
            if (param.requires_grad if trained is None else id(param) in trained)
            and (is_lazy(param) or param.is_floating_point())
        }
        if lazy := [name for name, param in named.items() if is_lazy(param)]:
            raise ConfigError(f"EMA: {lazy[0]} has no shape yet; run the model on a batch before training")
        shards = list(map(local_of, named.values()))  # of parameters that are divided among ranks
        if self.average is not None and list(map(id, self.average.params)) == list(map(id, shards)):
            return
        self._named, self.is_swapped = named, False
        self.average = WeightAverage(shards, self.decay, self.start, self.every) if named else None
        if self._loaded:
            self.load_state_dict(self._loaded)
        if any(param.itemsize < 4 for param in named.values()):
            self.notify(
                "EMA averages 16-bit weights, which are too coarse for small changes; keep weights in float32"
            )

    def device_update(self) -> Callable[[Tensor], None] | None:
        """Return the update of the average, which is part of every step."""
        return None if self.average is None else self.average.update

    def weights(self) -> dict[str, Tensor]:
        """Return the averages by the name of their parameter."""
        assert self.average is not None
        return dict(zip(self._named, self.average.params if self.is_swapped else self.average.average, strict=True))

    # --- when the model holds which weights

    def on_train_begin(self, run: RunInfo) -> None:
        """Put the raw weights back; an average that has not begun is a copy of them, also if they were loaded."""
        mine = {id(local_of(param)) for param in unwrap(run.model).parameters()}
        if self.average is None or not mine.issuperset(map(id, self.average.params)):  # of no model, or of another
            self._begin(run.model, None)
        super().on_train_begin(run)
        if self.average is not None and not int(self.average.count):
            with torch.no_grad():
                torch._foreach_copy_(self.average.average, self.average.params)

    def trained(self) -> Sequence[Tensor]:
        """Return the parameters that are averaged."""
        return [] if self.average is None else [*map(local_of, self._named.values())]

    def begin_again(self) -> None:
        """Begin a new average with the weights that the model holds."""
        self.is_swapped = False
        if self.average is not None:
            self.average.count.zero_()

    def hold(self, *, raw: bool) -> None:
        """Swap the averages and the raw weights, unless the model already holds the right ones.

        Without `validate` it holds averages only if a checkpoint of a run that validates them has been loaded.
        """
        if self.average is not None and (self.validate or raw) and self.is_swapped == raw:
            self.average.swap()
            self.is_swapped = not raw

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that the model does not hold, and the number of updates."""
        if self.average is None:
            return self._loaded
        pairs = zip(self._named.items(), self.average.average, strict=True)
        weights = {name: sharded_like(param, own) for (name, param), own in pairs}
        return {"count": self.average.count, "weights": weights, "is_swapped": self.is_swapped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; the model is restored by itself."""
        check_kind(_STATE, state, "state")
        self._left = None
        if self.average is None:
            self._loaded = state
            return
        saved: Mapping[str, Any] = state["weights"]
        if saved.keys() != self._named.keys():
            different = next(iter(saved.keys() ^ self._named.keys()))
            raise CheckpointError(
                f"the averages are those of other parameters; {different} is only in one of the two"
            )
        for name, param in self._named.items():
            check_tensor(saved[name], param, f"weights.{name}")
        check_tensor(state["count"], self.average.count, "count")
        with torch.no_grad():
            for (name, param), own in zip(self._named.items(), self.average.average, strict=True):
                fill(sharded_like(param, own), saved[name])
            self.average.count.copy_(state["count"])
        self.is_swapped, self._loaded = state["is_swapped"], {}


def take_averages(checkpoint: Checkpoint, keys: Collection[str], *, warns: bool) -> dict[str, Any] | None:
    """Take the states of averages out of a checkpoint whose run has no callbacks for them, of all its `keys`.

    Returns the state of the model to train on with: the raw weights in place of the averages. None if there are none.
    With `warns` the user is told.
    """
    saved = checkpoint.state.get("callbacks") if isinstance(checkpoint.state, dict) else None
    if not isinstance(saved, dict):  # restoring it will say what is wrong
        return None
    found = {key: saved.pop(key) for key in list(saved) if key.startswith("EMA.") and key not in keys}
    model = dict(checkpoint.model_state)
    for key, state in found.items():
        with errors_of(checkpoint.path, f"callbacks.{key}"):
            check_kind(_STATE, state, "state")
            for name, raw in state["weights"].items() if state["is_swapped"] else ():
                check_tensor(raw, checkpoint.model_state[name], f"weights.{name}")
                average = checkpoint.model_state[name]
                model |= {other: raw for other, one in checkpoint.model_state.items() if one is average}
    if found and warns:
        logger.warning(
            "%s has a moving average of the weights, but this run has no ema: it is evaluated, but training "
            "continues from the raw weights and drops it; set training.ema to continue it",
            checkpoint.path,
        )
    return model if found else None
