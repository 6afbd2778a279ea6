"""Stands in for CUDA graphs where there is no GPU: it runs the function that is recorded, and undoes it."""

import torch

from etude.core.random import rng_state, set_rng_state
from etude.engine.update import state_tensors


class RunAgain:
    """Replays by calling the function again: right as long as it reads only what it was recorded with."""

    is_recording = False

    def __init__(self, step, share=1.0, room=True):
        self.step, self.share, self.room = step, share, room
        self.recorded, self.replayed, self.recovered = 0, 0, 0

    def record(self, function, random=None):
        self.recorded += 1
        tensors = [
            *self.step.model.parameters(),
            *self.step.model.buffers(),
            *state_tensors(self.step.updater.optimizer),
            *self.step.capture._others,
        ]
        kept, drawn = [tensor.detach().clone() for tensor in tensors], rng_state()
        RunAgain.is_recording = True
        try:
            result = function()
        finally:
            RunAgain.is_recording = False
        with torch.no_grad():
            for tensor, old in zip(tensors, kept, strict=True):
                tensor.copy_(old)
        set_rng_state(drawn)

        def replay():
            self.replayed += 1
            result.copy_(function())

        return result, replay

    def recover(self):
        self.recovered += 1

    def timed(self, function):
        return function(), self.share

    def has_room(self):
        return self.room
