"""Optimizers with the fastest kernels, schedules as functions of the step, clipping."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import CosineAnnealingLR

    from etude.optim.clipping import clip_gradients, clip_gradients_by_value, global_norm
    from etude.optim.cooldowns import cooldown, wsd
    from etude.optim.device import Adafactor, DeviceOptimizer, Lion
    from etude.optim.groups import group_parameters
    from etude.optim.kernels import get_lr, set_lr
    from etude.optim.muon import Muon
    from etude.optim.optimizers import (
        SGD,
        Adagrad,
        Adam,
        AdamW,
        NAdam,
        RAdam,
        RMSprop,
        decay_groups,
    )
    from etude.optim.schedule_free import ScheduleFreeAdamW
    from etude.optim.scheduled import Schedule, Schedules
    from etude.optim.schedules import (
        constant,
        cosine,
        cosine_restarts,
        cosine_schedule_with_warmup,
        exponential,
        inverse_sqrt,
        linear,
        multistep,
        one_cycle,
        polynomial,
        product,
        sequence,
        step_decay,
        warmup,
        warmup_cosine,
    )
    from etude.optim.settings import by_setting, per_group
    from etude.optim.several import Optimizers, Perturbed
    from etude.optim.wrappers import SAM, Lookahead

__all__ = [
    "SAM",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "CosineAnnealingLR",
    "DeviceOptimizer",
    "Lion",
    "Lookahead",
    "Muon",
    "NAdam",
    "Optimizers",
    "Perturbed",
    "RAdam",
    "RMSprop",
    "Schedule",
    "ScheduleFreeAdamW",
    "Schedules",
    "by_setting",
    "clip_gradients",
    "clip_gradients_by_value",
    "constant",
    "cooldown",
    "cosine",
    "cosine_restarts",
    "cosine_schedule_with_warmup",
    "decay_groups",
    "exponential",
    "get_lr",
    "global_norm",
    "group_parameters",
    "inverse_sqrt",
    "linear",
    "multistep",
    "one_cycle",
    "per_group",
    "polynomial",
    "product",
    "sequence",
    "set_lr",
    "step_decay",
    "warmup",
    "warmup_cosine",
    "wsd",
]

__getattr__ = load_late(__name__, __file__)
