"""Freeze parameters by name, and unfreeze them at the beginning of epochs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from etude.config.registry import register
from etude.core import ConfigError
from etude.core.model import clean_name, unwrap
from etude.core.spelling import as_patterns, names_matching
from etude.distributed.parallel import reshard
from etude.engine.callback import Callback, RunInfo, RunParts

Patterns = str | Sequence[str]


@register("callback", "freeze")
class Freeze(Callback):
    """Freezes the parameters whose names match a pattern; `unfreeze` trains some of them from an epoch on.

    Epochs are counted from zero. Which parameters are frozen depends on the epoch alone, so a resumed run trains what
    an uninterrupted one does. Parameters that are never unfrozen are left out of the optimizer; the others are in it
    from the start, without a gradient. A module all of whose parameters are frozen is in eval mode, so that its batch
    norms keep their statistics and its dropout is off, unless `eval_mode` is false.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> freeze = Freeze("0.*", unfreeze={3: "0.bias"})
    >>> freeze.prepare(model)
    >>> [name for name, param in model.named_parameters() if param.requires_grad]
    ['0.bias', '1.weight', '1.bias']
    """

    needs_model = True

    def __init__(
        self, params: Patterns, unfreeze: Mapping[int, Patterns] | None = None, eval_mode: bool = True
    ) -> None:
        """Patterns are those of parameters, such as `backbone.*.bias`, or of modules, such as `backbone`."""
        super().__init__()
        self.patterns = as_patterns(params, "freeze")
        self.unfreeze = _by_epoch({} if unfreeze is None else unfreeze)
        self.eval_mode = eval_mode
        self.uses_all_parameters = not self.unfreeze
        self._model: nn.Module | None = None
        self._begins: dict[str, float] = {}
        """The epoch from which a parameter is trained, infinite if never, by name."""
        self._trained: set[str] = set()
        self._in_eval: list[nn.Module] = []

    def prepare(self, model: nn.Module) -> None:
        """Freeze what is never unfrozen, so that the optimizer does not get it."""
        self._find(model)
        for name, param in self._named():
            if self._begins.get(name) == float("inf"):
                param.requires_grad_(False)

    def acts_in_steps(self) -> bool:
        """Return that it needs training steps."""
        return True

    def bind(self, parts: RunParts) -> None:
        """Freeze as in the first epoch; raise ConfigError if nothing is left to train."""
        assert parts.model is not None
        self._find(parts.model)
        self._apply(0)
        if not any(param.requires_grad for _, param in self._named()):
            raise ConfigError(f"freeze: {', '.join(self.patterns)} freezes all parameters: there is nothing to train")

    def on_train_begin(self, run: RunInfo) -> None:
        """Find the parameters, if that has not been done: a loop of your own may call only the hooks."""
        self._find(run.model)
        last = math.inf if run.total_epochs is None else run.total_epochs - 1
        if late := [epoch for epoch in self.unfreeze if epoch > last]:
            self.notify(f"unfreeze.{late[0]}: not in this run, whose last epoch is {last}")

    def on_epoch_begin(self, epoch: int) -> None:
        """Train the parameters whose epoch has come, and put modules that are still frozen into eval mode."""
        if self._model is not None and (changed := self._apply(epoch)):
            what = f"{changed} more parameter tensor{'s' * (changed != 1)}"
            self.notify(f"unfreeze.{epoch}: {what} trained from now on", event="unfreeze", epoch=epoch)

    def _find(self, model: nn.Module) -> None:
        """Find the epoch of every parameter that is frozen at first."""
        model = unwrap(model)
        if model is self._model:
            return
        self._in_eval, self._trained = [], set()
        names = [clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
        self._begins = dict.fromkeys(names_matching(self.patterns, names, "freeze"), float("inf"))
        for epoch, patterns in self.unfreeze.items():
            found = [name for name in names_matching(patterns, names, f"unfreeze.{epoch}") if name in self._begins]
            if not found:
                raise ConfigError(f"unfreeze.{epoch}: {', '.join(patterns)} matches no parameter that is frozen")
            for name in found:
                self._begins[name] = min(self._begins[name], epoch)
        self._model = model

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        assert self._model is not None
        return [(clean_name(name), param) for name, param in self._model.named_parameters(remove_duplicate=False)]

    def _apply(self, epoch: int) -> int:
        """Freeze and unfreeze as in an epoch; return the number of parameters that are trained and were not."""
        assert self._model is not None
        trained = {name for name, begin in self._begins.items() if begin <= epoch}
        reshard(self._model)  # the shards are trained, not the weights gathered from them
        for name, param in self._named():
            if name in self._begins:
                param.requires_grad_(name in trained)
        changed, self._trained = len(trained - self._trained), trained
        for module in self._in_eval:
            module.training = self._model.training
        self._in_eval = [*self._frozen_modules()] if self.eval_mode else []
        for module in self._in_eval:
            module.training = False
        return changed

    def _frozen_modules(self) -> list[nn.Module]:
        """Return the modules in training mode that are, or are inside, one whose parameters are all frozen."""
        assert self._model is not None
        found: dict[nn.Module, None] = {}
        own = {id(param) for name, param in self._named() if name in self._begins}
        for module in self._model.modules():
            params = list(module.parameters())
            if params and not any(param.requires_grad for param in params) and any(id(p) in own for p in params):
                found |= dict.fromkeys(one for one in module.modules() if one.training)
        return list(found)


def _by_epoch(unfreeze: Any) -> dict[int, list[str]]:
    """Return the patterns of every epoch, in order."""
    if not isinstance(unfreeze, Mapping):
        raise ConfigError(f"unfreeze is {unfreeze!r:.60}; it must map epochs to patterns: {{3: 'backbone'}}")
    for epoch in unfreeze:
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 1:
            raise ConfigError(
                f"unfreeze: {epoch!r} is not an epoch above 0; what is trained from the start is not frozen"
            )
    return {epoch: as_patterns(unfreeze[epoch], f"unfreeze.{epoch}") for epoch in sorted(unfreeze)}
