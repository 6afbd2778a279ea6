"""A run that compiles nothing does not import torch's compiler, which takes longer than many a run."""

from forked_python import run_python

TRAIN = """
import sys, torch
from torch import nn
import etude
from etude import Trainer
from etude.engine.compiled import CompiledTask, saves_time
from etude.losses import BinaryLoss, ClassificationLoss
from etude.models import MLP
from etude.multitask import MultiTask, MultiTaskModel, TaskSpec
from etude.multitask.heads import LinearHead
from etude.multitask.weighting import UncertaintyWeighting
from etude.optim.eager import take_step
from etude.optim.pieces import InPieces

def check(what):
    assert not {"torch._dynamo", "sympy", "torch._inductor"} & set(sys.modules), what

def train(name, model, data, **arguments):
    for resume, steps in ((False, 3), (True, 5)):
        config = {"max_steps": steps, "gradient_clip_norm": 0.5, "batch_size": 4, **arguments.get("config", {})}
        folder = f"{sys.argv[1]}/{name}"
        given = {**arguments, "config": config, "output_dir": folder, "resume": resume, "progress": False}
        trainer = Trainer(model(), data, data, **given)
        trainer.train()
        assert trainer.state.clock.step == steps, name
    check(name)

x, y = torch.randn(16, 6), torch.randint(3, (16,))
makers = {name: one for name, one in vars(torch.optim).items() if isinstance(one, type) and name[0].isupper()}
for left_out in ("Optimizer", "LBFGS", "SparseAdam"):  # no optimizer, one of closures, one of sparse gradients
    del makers[left_out]
assert len(makers) > 10
for name, make in makers.items():
    train(name, lambda: nn.Linear(6, 3, bias=False), (x, y), optimizer=make)
train("function", lambda: nn.Linear(6, 3), (x, y), optimizer=lambda params: torch.optim.Adagrad(params, lr=0.1))
for name in ("sgd", "adam", "adamw", "rmsprop"):
    train(name, lambda: nn.Linear(6, 3), (x, y), optimizer=name, config={"precision": "bf16", "warmup_steps": 2})

model = nn.Linear(6, 3)
own = etude.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train("own", lambda: model, (x, y), optimizer=own, config={"accumulation_steps": 2, "gradient_clip_value": 0.1})

class Tasks:
    labels = {"kind": ClassificationLoss(), "sign": BinaryLoss()}
    data = {"input": x, "kind": y, "sign": (x.sum(1) > 0).float()}

    def model(self):
        heads = {"kind": LinearHead(3, in_features=8), "sign": LinearHead(1, in_features=8)}
        return MultiTaskModel(MLP(6, [8], 1), heads)

    def task(self):
        specs = {name: TaskSpec(name, loss, labels=name) for name, loss in self.labels.items()}
        return MultiTask(specs, UncertaintyWeighting(list(specs)))

tasks = Tasks()
for optimizer in (None, torch.optim.Adam):
    loader = etude.DataLoader(tasks.data, batch_size=4)
    given = {"task": tasks.task(), "optimizer": optimizer, "config": {"max_steps": 3}, "progress": False}
    Trainer(tasks.model(), loader, loader, **given).train()
check("several tasks")

task = etude.losses.SupervisedTask()  # as on a GPU, where it is left open whether to compile
compiled = CompiledTask(task, mode="auto", notice=print, warn=print)
compiled.is_worthwhile = saves_time(14_000, 1, task.outputs)
compiled(etude.LeNet5(), (torch.rand(64, 1, 28, 28), torch.randint(10, (64,))), metrics=None)
assert compiled.refused
check("a run that is too short to be compiled")

layer = nn.Linear(100, 70)
layer(torch.ones(2, 100)).sum().backward()
with InPieces():
    take_step(etude.optim.SGD(layer.parameters(), lr=0.1))
check("an update that is recorded")
print("fine")
"""


def test_a_run_in_python_imports_no_compiler_with_any_optimizer(tmp_path):
    done = run_python("-W", "error", "-c", TRAIN, tmp_path)
    assert done.stdout == "fine\n", done.stderr
