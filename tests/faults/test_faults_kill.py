"""`kill -9` at any moment, then `etude resume`: the run ends with the very bytes of one that was never killed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults_runs import wait_for


class Victim:
    """A run that is started, killed and resumed again and again."""

    def __init__(self, etude, experiment, folder: Path, *overrides: str) -> None:
        self.etude, self.experiment, self.folder, self.overrides = etude, experiment, folder, overrides
        self.kills = 0
        self.saves_hit = 0

    def start(self, **request):
        """Start the run, or go on with it; a folder without a config was killed before there was a run."""
        if (self.folder / "config.yaml").exists():
            return self.etude.start("resume", self.folder, **request)
        return self.etude.start("train", self.experiment, *self.overrides, "--run-dir", self.folder, **request)

    def kill(self, process) -> None:
        code = process.kill()
        assert code in (0, -signal.SIGKILL), process.err
        self.kills += code != 0
        self.saves_hit += bool(self.unfinished_saves())

    def finish(self) -> None:
        if not self.is_finished:
            process = self.start()
            assert process.wait() == 0, process.err

    @property
    def is_finished(self) -> bool:
        return (self.folder / "result.json").exists()

    def unfinished_saves(self) -> list[Path]:
        return list((self.folder / "checkpoints").glob(".tmp-*"))


@pytest.fixture
def victim(etude, experiment, tmp_path):
    return Victim(etude, experiment, tmp_path / "run")


@pytest.fixture
def background_victim(etude, experiment, tmp_path):
    """A run whose checkpoints are written by a thread; it leaves what the others leave."""
    return Victim(etude, experiment, tmp_path / "run", "training.async_save=true")


def kill_at_random(victim: Victim, seconds: float, seed: int, times: int) -> None:
    rng = random.Random(seed)
    for _ in range(times):
        if victim.is_finished:
            break
        process = victim.start()
        time.sleep(rng.uniform(0, 1.1) * seconds)
        victim.kill(process)


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_a_random_moment(victim, reference, assert_same_run, seed):
    kill_at_random(victim, reference.seconds, seed, times=1 + seed % 2)
    victim.finish()
    assert_same_run(victim.folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_killed_at_many_random_moments(victim, reference, assert_same_run, seed):
    kill_at_random(victim, reference.seconds, seed, times=1 + seed % 4)
    victim.finish()
    assert_same_run(victim.folder)


def kill_while_saving(victim: Victim, rng: random.Random, times: int) -> None:
    needed = victim.saves_hit + times
    for _ in range(40 * times):
        if victim.is_finished:  # its last saves were too short to be seen: begin with another run
            shutil.rmtree(victim.folder)
        before = set(victim.unfinished_saves())
        process = victim.start()
        wait_for(lambda: set(victim.unfinished_saves()) - before or victim.is_finished, process)
        time.sleep(rng.uniform(0, 0.003))
        victim.kill(process)
        if victim.saves_hit >= needed:
            return
    raise AssertionError("the kills never hit a save")


def test_killed_while_saving(victim, assert_same_run):
    kill_while_saving(victim, random.Random(1), times=3)
    victim.finish()
    assert_same_run(victim.folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_while_saving_many_times(victim, assert_same_run, seed):
    kill_while_saving(victim, random.Random(seed), times=5)
    victim.finish()
    assert_same_run(victim.folder)


@pytest.mark.parametrize("seed", range(2))
def test_killed_while_a_thread_saves(background_victim, reference, assert_same_run, seed):
    kill_at_random(background_victim, reference.seconds, seed, times=1 + seed)
    kill_while_saving(background_victim, random.Random(seed), times=1 + seed)
    background_victim.finish()
    assert_same_run(background_victim.folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 240))
def test_killed_many_times_while_a_thread_saves(background_victim, reference, assert_same_run, seed):
    kill_at_random(background_victim, reference.seconds, seed, times=1 + seed % 3)
    kill_while_saving(background_victim, random.Random(seed), times=2)
    background_victim.finish()
    assert_same_run(background_victim.folder)


@pytest.fixture(scope="session")
def num_operations(etude, experiment, tmp_path_factory):
    """How often a whole run changes the disk."""
    folder = tmp_path_factory.mktemp("counted") / "run"
    code, process = etude.run("train", experiment, "--run-dir", folder, lives=1_000_000)
    assert code == 0, process.err
    return int(process.out.split()[-1])


def killed_before_operations(victim: Victim, lives: list[int], assert_same_run) -> None:
    for count in lives:
        process = victim.start(lives=count)
        assert process.wait() == -signal.SIGKILL, process.err
        victim.finish()
        assert_same_run(victim.folder)
        shutil.rmtree(victim.folder)


def test_killed_before_some_operations_on_files(victim, assert_same_run, num_operations):
    lives = random.Random(3).sample(range(num_operations), 4)
    after_the_last_save = [num_operations - left for left in (1, 8, 18)]
    killed_before_operations(victim, [*lives, *after_the_last_save], assert_same_run)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_killed_before_every_operation_on_files(victim, assert_same_run, num_operations, part):
    killed_before_operations(victim, list(range(part, num_operations, 8)), assert_same_run)


def test_killed_before_the_first_checkpoint(victim, assert_same_run, resume):
    process = victim.start()
    wait_for((victim.folder / "config.yaml").exists, process)
    victim.kill(process)
    assert not list((victim.folder / "checkpoints").glob("step-*"))
    assert "no checkpoint yet: starting from the beginning" in resume(victim.folder)
    assert_same_run(victim.folder)


def test_killed_between_the_last_checkpoint_and_the_result(etude, reference, assert_same_run, resume, tmp_path):
    """Nothing is left to train: the result is written from the checkpoint, and the checkpoint stays as it is."""
    folder = tmp_path / "run"
    subprocess.run(["cp", "-a", reference.folder, folder], check=True)
    (folder / "result.json").unlink()
    before = (folder / "checkpoints" / "last" / "manifest.json").read_bytes()
    resume(folder)
    assert (folder / "checkpoints" / "last" / "manifest.json").read_bytes() == before
    assert_same_run(folder)


def test_a_resume_that_makes_a_finished_run_longer_can_be_killed(etude, reference, resume, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        subprocess.run(["cp", "-a", reference.folder, folder], check=True)
    longer = "training.epochs=6"
    code, process = etude.run("resume", straight, longer)
    assert code == 0, process.err
    process = etude.start("resume", killed, longer)
    wait_for((killed / "checkpoints" / "step-00000042").exists, process)
    process.kill()
    resume(killed)
    weights = [(folder / "checkpoints/last/model.safetensors").read_bytes() for folder in (straight, killed)]
    assert weights[0] == weights[1]
    assert (killed / "checkpoints" / "last").readlink().name == "step-00000072"


def test_a_real_process_killed_and_resumed(experiment, assert_same_run, tmp_path):
    """The same with `python -m etude`: a fresh interpreter gives the bytes of a fork of another one."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "etude"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "train", str(experiment), "--run-dir", str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for((folder / "checkpoints" / "step-00000009").exists)
    finally:
        process.kill()
        process.communicate()
    done = subprocess.run([*command, "resume", str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("etude: running ")  # the module that its config imports
    assert_same_run(folder)
