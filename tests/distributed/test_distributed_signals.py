"""SIGTERM to some processes of a run: all of them stop at the same step, save, and the run is resumed exactly."""

import pytest
from distributed_runs import HERE, Runs

from run_files import records, weights

pytestmark = pytest.mark.distributed

IMPORTS = [str(HERE / "distributed_toy.py"), str(HERE / "distributed_hangs.py")]
TRAINING = {"epochs": 2, "log_interval": 2}
MOMENTS = {  # the call of the loss that is interrupted, and the step after which the run has stopped
    "the first step": ({"call": 1}, [1]),
    "the sanity check": ({"call": 1, "training": False}, [0]),
    "validation": ({"call": 1, "training": False}, [7]),
    "a later step": ({"call": 9}, range(9, 15)),
}


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory):
    runs = Runs(server, tmp_path_factory.mktemp("straight"))
    folder, ended = runs.train(2, runs.write("straight", TRAINING, imports=IMPORTS, loss={"name": "toy_terms"}))
    ended.ok()
    return folder


@pytest.mark.parametrize("ranks", [[1], pytest.param([0], marks=pytest.mark.slow), [0, 1]], ids=str)
@pytest.mark.parametrize("moment", MOMENTS)
def test_stopped_at_any_moment_and_resumed(runs, straight, moment, ranks):
    settings, steps = MOMENTS[moment]
    training = {**TRAINING, "sanity_val_batches": 2 if moment == "the sanity check" else 0}
    loss = {"name": "toy_signal_loss", "ranks": ranks, **settings}
    folder, ended = runs.train(2, runs.write("run", training, imports=IMPORTS, loss=loss))
    assert ended.codes == [130, 130], ended
    assert not ended.err[1]
    (step,) = {int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")} - {7} or {7}
    assert step in steps
    assert ended.out[0].startswith(f"stopped at step {step} and saved; ")
    resumed = runs.resume(2, folder, "loss=toy_terms")
    assert resumed.codes == [0, 0]
    assert [line.partition(" than")[0] for line in resumed.said] == ["etude: the loss is another one"]
    assert weights(folder) == weights(straight)
    assert records(folder) == records(straight)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_the_data_is_made(runs, rank):
    """There is nothing to save yet: the process ends at once, and the others with it."""
    config = runs.write("run", TRAINING, imports=IMPORTS, data={"name": "toy_signal_data", "rank": rank})
    folder, ended = runs.train(2, config)
    assert ended.codes[rank] == -15
    assert ended.codes[1 - rank] == 2
    (line,) = ended.said
    assert "lost the connection to another process" in line
    assert not (folder / "checkpoints").exists() or not list((folder / "checkpoints").iterdir())
