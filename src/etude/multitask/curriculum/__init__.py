"""Curricula: which tasks are trained when, and with what weight. Pure functions of epoch, step and state.

Epochs are counted from 1, and `Clock.epoch` is one less. A fraction is the progress within an epoch: 11.5 is the
middle of epoch 11. Steps are optimizer steps taken so far, as in `Clock.step`: 0 before the first.
"""

from etude.multitask.curriculum.curriculum import Begun as Begun, Curriculum as Curriculum, PhaseStart as PhaseStart
from etude.multitask.curriculum.defaults import (
    DEFAULT_PHASES as DEFAULT_PHASES,
    DEFAULT_TASKS as DEFAULT_TASKS,
    active_tasks as active_tasks,
    current_phase as current_phase,
    loss_weights as loss_weights,
)
from etude.multitask.curriculum.phase import ALL as ALL, Phase as Phase, Ramp as Ramp, Start as Start
