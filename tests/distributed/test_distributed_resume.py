"""Stopped, killed, resumed: runs of several processes end with the very bytes of a run that was never stopped."""

import json

import pytest
import torch
from safetensors.torch import load

from run_files import records, weights

pytestmark = pytest.mark.distributed

# Dropout draws from a generator of each process, batch norm keeps buffers, and the layers are registered in another
# order than they are used, so that torch would sort their gradients again after the first step.
NET = {"name": "toy_net", "width": 40, "dropout": 0.3, "batch_norm": True}
TRAINING = {"epochs": 3, "drop_last": True, "batch_size": 12, "log_interval": 2}  # 4 steps per epoch


def signal_at(step, rank, name):
    return [{"name": "toy_signal", "step": step, "rank": rank, "signal_name": name}]


def stopped_at(folder):
    clocks = [json.loads(path.read_text())["step"] for path in (folder / "checkpoints").glob("step-*/meta.json")]
    return max(clocks)


@pytest.mark.parametrize(("size", "name"), [(2, "SIGTERM"), (3, "SIGINT")])
def test_a_signal_to_one_process_stops_all_after_the_same_step_and_resuming_is_exact(runs, size, name):
    training, metrics = (
        TRAINING | {"train_metrics": True},
        ["f1", "auroc", "perplexity"],
    )  # in flight in the checkpoint
    straight, ended = runs.train(size, runs.write("straight", training, model=NET, metrics=metrics))
    ended.ok()
    config = runs.write("stopped", training, model=NET, metrics=metrics, callbacks=signal_at(5, size - 1, name))
    folder, ended = runs.train(size, config)
    assert ended.codes == [130] * size
    step = stopped_at(folder)
    assert 5 <= step <= 10
    command = f"torchrun --nproc-per-node {size} -m etude resume {folder}"
    assert ended.out[0] == f"stopped at step {step} and saved; continue with: {command}\n"
    assert not any(ended.out[1:])
    assert not (folder / "result.json").exists()
    runs.resume(size, folder).ok()
    assert weights(folder) == weights(straight)
    assert records(folder) == records(straight)


@pytest.mark.parametrize("rank", [0, 2])
def test_kill_9_of_one_process_and_resuming_is_exact(runs, rank):
    training = TRAINING | {"save_every_steps": 3}
    straight, ended = runs.train(3, runs.write("straight", training, model=NET))
    ended.ok()
    config = runs.write("killed", training, model=NET, callbacks=signal_at(8, rank, "SIGKILL"))
    folder, ended = runs.train(3, config)
    assert ended.codes[rank] == -9
    assert stopped_at(folder) == 6
    runs.resume(3, folder, "callbacks.0.step=10000").ok()
    assert weights(folder) == weights(straight)
    assert records(folder) == records(straight)


@pytest.mark.parametrize("kills", [4, pytest.param(15, marks=pytest.mark.slow)])
def test_killed_again_and_again(runs, kills):
    training = TRAINING | {"save_every_steps": 1, "grad_accum_steps": 2, "drop_last": False, "epochs": 6}
    net = NET | {"batch_norm": False}
    straight, ended = runs.train(2, runs.write("straight", training, model=net))
    ended.ok()
    config = runs.write("killed", training, model=net, callbacks=signal_at(1, 0, "SIGKILL"))
    folder, ended = runs.train(2, config)
    for step in range(2, 2 + kills):
        ended = runs.resume(2, folder, f"callbacks.0.step={step}", f"callbacks.0.rank={step % 2}")
        assert -9 in ended.codes
    runs.resume(2, folder, "callbacks.0.step=10000").ok()
    assert weights(folder) == weights(straight)
    assert records(folder) == records(straight)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_with_another_number_of_processes_the_data_goes_on_in_the_same_order(runs, before, after):
    training = {"epochs": 2, "save_every_steps": 1}
    straight, ended = runs.train(1, runs.write("straight", training))
    ended.ok()
    folder, ended = runs.train(before, runs.write("stopped", training, callbacks=signal_at(3, 0, "SIGTERM")))
    assert set(ended.codes) == {130}
    ended = runs.resume(after, folder)
    assert set(ended.codes) == {0}
    assert len(ended.said) == 1
    assert f"saved by {before} process{'es' * (before > 1)} and is resumed by {after}" in ended.said[0]
    for mine, theirs in zip(records(folder, "train"), records(straight, "train"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    for name, weight in load(weights(straight)).items():
        torch.testing.assert_close(load(weights(folder))[name], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_that_resume_go_on_together_with_those_that_train(runs, rank):
    """So it is on a cluster whose scripts resume a run if there is one, when a machine is lost and comes again."""
    straight, ended = runs.train(2, runs.write("straight", TRAINING, model=NET))
    ended.ok()
    config = runs.write("lost", TRAINING, model=NET, callbacks=["toy_kill"])
    folder, command = runs.root / "run", ["train", config, "-q", "--run-dir", runs.root / "run"]
    elastic = {"TORCHELASTIC_RUN_ID": "toy", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert -9 in runs.server.run(2, command, runs.root / "logs", elastic | {"TOY_KILL_AT": "9"}).codes
    env = elastic | {"TOY_FOLDER": str(folder), "TOY_CONFIG": str(config), "TOY_RESUMES": rank}
    ended = runs.call(2, "resumed_on_one_machine", env)
    assert ended.codes == [0, 0], ended
    assert weights(folder) == weights(straight)
    assert records(folder) == records(straight)


def test_processes_of_different_runs_are_refused(runs):
    config = runs.write("run", TRAINING | {"epochs": 1})
    folder, ended = runs.train(2, config)
    ended.ok()
    ended = runs.call(2, "resumed_elsewhere", {"TOY_FOLDER": str(folder), "TOY_CONFIG": str(config)})
    assert ended.codes == [0, 0], ended


def test_processes_draw_different_random_numbers(runs):
    """With dropout, two processes are not one twice: the comparison of resumed runs looks at two streams."""
    losses = []
    for size in (1, 2):
        folder, ended = runs.train(size, runs.write("run", TRAINING, model=NET | {"batch_norm": False}))
        ended.ok()
        losses.append([one["loss"] for one in records(folder, "train")])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
