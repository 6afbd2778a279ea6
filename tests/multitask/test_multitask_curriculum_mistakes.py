"""What a curriculum cannot do is refused before the first step."""

import pytest
import torch
from curriculum_runs import Model, loader, tasks, trainer
from torch import nn

from etude import Callback, Trainer
from etude.core import ConfigError, DataError
from etude.multitask.curriculum import Phase
from etude.optim import SGD


def started(curriculum, **arguments):
    """Begin a run that must not take a step."""

    class NoStep(Callback):
        def on_step_end(self, report):
            raise AssertionError("a step was taken")

    trainer(None, curriculum=curriculum, callbacks=[NoStep()], **arguments).train()


@pytest.mark.parametrize(
    ("late", "error", "words"),
    [
        ({"mixture": {"a": 1, "x": 1}}, DataError, "phase 'late': .*'x'"),
        ({"mixture": {"b": 1}, "tasks": ["first"]}, DataError, "phase 'late': "),
        ({"sequence_length": 7}, DataError, "phase 'late': sequence_length 7 is more than the 6 tokens"),
        ({"variants": {"last": "full"}}, ConfigError, "phase 'late': the task 'last' has no variant 'full'"),
    ],
)
def test_what_a_late_phase_cannot_do_is_said_before_the_first_step(late, error, words):
    with pytest.raises(error, match=words):
        started([Phase("a", 1, ["first"]), Phase("late", 3, **{"tasks": "all"} | late)])


@pytest.mark.parametrize("setting", [{"mixture": {"a": 1.0}}, {"sequence_length": 4}])
def test_data_without_streams_cannot_follow_a_mixture_or_a_length(setting):
    batches = list(loader().iterate(0))
    with pytest.raises(
        ConfigError, match=f"phase 'late' sets {next(iter(setting))}, but the training data has no streams"
    ):
        started([Phase("a", 1, ["first"]), Phase("late", 3, "all", **setting)], data=batches)


def test_a_rate_that_a_torch_scheduler_sets_cannot_be_scaled():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=0.1)
    model = Model()
    optimizer.add_param_group({"params": list(model.parameters())})
    built = Trainer(
        model, loader(), task=tasks(), optimizer=optimizer, config={"device": "cpu"}, progress=False,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3),
        curriculum=[Phase("a", 1, ["first"]), Phase("late", 2, "all", lr_scale=0.5)],
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"phase 'late' has lr_scale 0.5, but a torch scheduler sets the learning rate"
    ):
        built.train()


def test_a_curriculum_needs_several_tasks():
    x = torch.zeros(8, 3)
    with pytest.raises(ConfigError, match=r"SupervisedTask.*task=MultiTask"):
        Trainer(nn.Linear(3, 2), (x, x[:, 0].long()), curriculum=[Phase("a", 1, ["first"])], progress=False)


def test_a_task_that_is_not_defined_is_named():
    with pytest.raises(
        ConfigError, match="phase 'a' names the task 'frist', which is not defined; did you mean 'first'"
    ):
        trainer(None, curriculum=[Phase("a", 1, ["frist"])])
