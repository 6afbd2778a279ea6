"""Updates that were not finite: a warning for each epoch that had some, an error when nothing can be learned."""

from etude.core import TrainingError
from etude.engine.step import Step
from etude.engine.step_log import StepLog, Tally

REMEDIES = "To go on, lower the learning rate, clip by training.gradient_clip_norm, or look for NaN in the data"
FINDER = "the callback find_nonfinite names the samples and the first layer"
USUAL_SHARE = 0.1
"""Share of the updates that a loss scale may skip while it finds its size, before it is worth a word."""


class FiniteCheck:
    """Judges the skipped updates of a run at the moments when its step log has been read."""

    def __init__(self, log: StepLog, step: Step, max_skipped_steps: int) -> None:
        self._log = log
        self._step = step
        self._is_scaled = step.precision.scaler is not None
        self._limit = max_skipped_steps

    def streak(self, step: int) -> None:
        """Raise TrainingError after too many updates in a row that were not finite."""
        if (streak := self._log.bad_streak) >= self._limit:
            raise TrainingError(
                f"the loss or its gradients were not finite in the last {streak} steps, up to step {step}; "
                f"{self._weights()}. {REMEDIES}; {FINDER} (training.max_skipped_steps={self._limit})"
            )

    def epoch(self, tally: Tally, epoch: int) -> str:
        """Return what to warn of after an epoch, counted from 1, or nothing.

        Raises TrainingError if all of its updates were skipped. With a loss scale, which the next epochs may still
        fit, that is a warning.
        """
        if not tally.skipped:
            return _of_losses(tally, epoch)
        if tally.skipped == tally.steps and not self._is_scaled:
            self._raise(f"nothing was learned in epoch {epoch}", f"its {tally.steps} steps")
        if self._is_scaled and not tally.bad_losses and tally.skipped < tally.steps * USUAL_SHARE:
            return ""
        why = "the loss was" if tally.bad_losses else "gradients were"
        return (
            f"{_share(tally.skipped, tally.steps)} updates of epoch {epoch} were skipped because {why} not finite"
            f"{_place(tally)}; {FINDER}"
        )

    def run(self, steps: int) -> None:
        """Raise TrainingError at the end of a run of which no update was finite."""
        if steps and self._log.bad_streak >= steps:
            self._raise("nothing was learned", f"the {steps} steps of the run")

    def _raise(self, what: str, where: str) -> None:
        raise TrainingError(
            f"{what}: the loss or its gradients were not finite in all of {where}; {self._weights()}. "
            f"{REMEDIES}; {FINDER}"
        )

    def _weights(self) -> str:
        weights = dict(self._step.model.named_parameters())  # frozen ones too
        known = {id(param) for param in weights.values()}
        others = [param for param in self._step.updater.params if id(param) not in known]
        weights |= {f"parameter {place} of the optimizer": param for place, param in enumerate(others)}
        bad = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
        if not bad:
            return "the updates were skipped, so the weights are intact"
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"weights themselves are not finite ({bad[0]}{more}), so go back to an earlier checkpoint or model"


def _of_losses(tally: Tally, epoch: int) -> str:
    if tally.bad_losses:
        return (
            f"the loss was not finite in {_share(tally.bad_losses, tally.steps)} steps of epoch {epoch}, though its "
            f"gradients were; averages leave these steps out"
        )
    if tally.counts and not any(tally.counts.values()):
        return f"nothing was learned in epoch {epoch}: all of its labels are padding, masked or missing"
    return ""


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({count / total:.0%})"


def _place(tally: Tally) -> str:
    if tally.first_skipped is None:
        return ""
    step, start, end = tally.first_skipped
    return f", first in step {step} with samples {start} to {end - 1} of the epoch's order"
