"""A program with persistent workers at module level; it prints their process ids and then ends in some way."""

import multiprocessing
import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader as TorchLoader, Dataset

from etude import Callback, DataLoader, Trainer


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(4), index % 2


class Ending(Callback):
    """Does something to the program in its first step."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def on_step_end(self, report):
        action, self.action = self.action, None
        if action is not None:
            if action == "wait":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
            ENDINGS[action]()


def fail():
    raise RuntimeError("as asked")


ENDINGS = {
    "normal": lambda: None,
    "exception": fail,
    "exit": lambda: sys.exit(0),
    "interrupt": lambda: os.killpg(0, signal.SIGINT),
    "terminate": lambda: os.killpg(0, signal.SIGTERM),
    "hangup": lambda: os.killpg(0, signal.SIGHUP),
    "wait": lambda: time.sleep(600),
}


def num_workers(method):
    return 2 if method == "fork" else 1  # each imports torch again


if __name__ == "__main__":
    kind, method, ending = sys.argv[1:]
    multiprocessing.set_start_method(method)
    if kind == "etude":
        loader = DataLoader(Numbers(), batch_size=4, num_workers=num_workers(method), persistent_workers=True)
    else:
        loader = TorchLoader(Numbers(), 4, num_workers=num_workers(method), persistent_workers=True)
    config = {"epochs": 2, "device": "cpu", "num_threads": 1}
    trainer = Trainer(torch.nn.Linear(4, 2), loader, config=config, callbacks=[Ending(ending)], progress=False)
    trainer.train()
    print(trainer.state.clock.step, trainer.callbacks.control.reason, flush=True)
