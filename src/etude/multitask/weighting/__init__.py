"""Weightings of the losses of several tasks. They are independent of the engine and never synchronise.

Tasks have a fixed order, and everything is a vector over them: `losses` are the tasks' mean losses in this step, and
`scale` is a factor for each task from outside: the static weight, times the ramp of a curriculum, times 0 if the task
is not trained now or has no labels in this batch. Losses whose scale is 0 are ignored.

The objective is `(coefficients · losses).sum() + penalty`: the coefficients go into `LossTerm.weight`, the penalty is
a separate term. If `known_ahead` is true, the coefficients do not depend on this step's losses, so that the
micro-batches of a step can be weighted one by one. `Weighting.needs` is what a step must pass to a weighting:

| name | class | needs |
|---|---|---|
| static | `StaticWeights` | nothing |
| uncertainty | `UncertaintyWeighting` | nothing; its parameters in the optimizer, without weight decay |
| imtl_l | `ImpartialLosses` | the same |
| dwa | `DynamicWeightAverage` | nothing; mean losses of every epoch (`end_epoch`) |
| famo | `FAMO` | updates: losses before and after every update, of the same batch (`after_update`) |
| gradnorm | `GradNorm` | layer_gradients: each task's gradients of the last shared parameters (`observe`) |
| pcgrad | `PCGrad` | gradients: each task's gradients of all shared parameters (`combine`) |
| those of torchjd | `TorchjdAggregator` | gradients |
| | `TorchjdScalarizer` | losses of the step, for `coefficients` |

In a hand-written loop `scale` may be omitted, and `combine` is `merge` for gradients that are not scaled yet:

    weighting(losses, scale).backward()
    if weighting.needs == "gradients":
        merged = weighting.combine(rows, step=step, scale=scale)   # rows: (tasks, elements), a gradient for each loss
        assign_gradients(merged, shared)                           # heads keep the gradients of the plain sum
    optimizer.step()

State is buffers and parameters: `state_dict` holds tensors only, and `to(device)` moves it. With several processes
all of them must receive the same, reduced losses and gradients; then their weightings stay in sync.
"""

from etude.multitask.weighting.base import (
    Needs as Needs,
    Weighting as Weighting,
    assign_gradients as assign_gradients,
)
from etude.multitask.weighting.losses import (
    DynamicWeightAverage as DynamicWeightAverage,
    ImpartialLosses as ImpartialLosses,
    StaticWeights as StaticWeights,
    UncertaintyWeighting as UncertaintyWeighting,
)
from etude.multitask.weighting.steps import FAMO as FAMO, GradNorm as GradNorm, PCGrad as PCGrad
from etude.multitask.weighting.torchjd_adapter import (
    TorchjdAggregator as TorchjdAggregator,
    TorchjdScalarizer as TorchjdScalarizer,
)
