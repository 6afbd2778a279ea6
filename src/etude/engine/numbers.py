"""The numbers of a log point or an epoch, made from the sums of its steps."""

import torch

from etude.core.terms import SeveralTasks, derive
from etude.engine.flops import STEP_PER_FORWARD
from etude.engine.ledger import Ledger, Tally
from etude.engine.peak import peak_flops
from etude.engine.step import Step

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Numbers:
    """Averages, what the task derives from them, gradient norms and rates; for tokens their total and the MFU."""

    def __init__(self, step: Step, ledger: Ledger) -> None:
        self._step = step
        self._ledger = ledger
        self._peak: float | None = None

    def of(self, tally: Tally) -> dict[str, float]:
        """Return the numbers of these steps, in the form that callbacks receive."""
        logs = derive(self._step.tasks, tally.means()) | tally.rates()
        if isinstance(self._step.tasks, SeveralTasks):
            logs |= self._step.tasks.numbers()
        if tally.forward_flops and tally.seconds > 0:
            logs["mfu"] = STEP_PER_FORWARD * tally.forward_flops / (tally.seconds * self._peak_flops())
        if self._ledger.tokens:
            logs["tokens"] = int(self._ledger.tokens)
        return logs

    def _peak_flops(self) -> float:
        """Return what all ranks together could do in a second, if nothing but large matrix products were asked for."""
        if self._peak is None:
            step = self._step
            dtype = DTYPES.get(step.precision.name, next(step.model.parameters()).dtype)
            self._peak = step.world.size * peak_flops(step.updater.device, dtype)
            self._ledger.restart_timer()  # measuring is no part of a step
        return self._peak
