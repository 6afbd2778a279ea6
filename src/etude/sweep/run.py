"""Running a sweep: trials are asked of optuna, trained in processes of their own, watched, and reported back."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from etude.core.errors import ConfigError, RunFolderError, TrainingError
from etude.core.files import FolderLock, LockHeld
from etude.core.monitor import odd_mode
from etude.launched import is_first
from etude.monitor.reading import CONFIG
from etude.sweep.folder import SweepFolder, import_optuna
from etude.sweep.launch import devices_of, start_run, start_server, wait_for
from etude.sweep.spec import SPEC, SweepSpec, overrides_of, read_document, validated
from etude.sweep.trials_file import TrialsFile
from etude.sweep.watch import INTERRUPTED, MetricMissing, RunningTrial

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

    from etude.engine.stopping import Interrupts
    from etude.experiment import ExperimentConfig

POLL_S = 0.2
"""How often metrics are read while nothing ends."""
MAX_FAILURES = 3
"""Trials that may fail before one succeeds."""
MAX_KILLS = 3
"""How often a run is started whose process is killed, for example because memory ran out."""
Say = Callable[[str], None]


@dataclass(slots=True)
class SweepOutcome:
    """How a sweep ended."""

    path: Path
    status: str
    """finished, interrupted, or waiting: other processes still run trials of it."""
    study: "Study"
    command: str
    """The command to continue."""


def run_sweep(
    source: str | Path,
    words: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    storage: str | None = None,
    options: Mapping[str, Any] | None = None,
    say: Say = lambda _line: None,
) -> SweepOutcome:
    """Run a sweep until its trials are done, or join one that other processes run.

    Arguments:
        source: a sweep file, an experiment, or the folder of a sweep to continue.
        words: `key=1,2,3` and `key=1e-4..1e-1:log` add to the space, `key=value` sets a key for all trials.
        run_dir: the folder of the sweep [default: runs/sweeps/EXPERIMENT/TIME].
        storage: URL of a database for optuna, instead of a file in the folder.
        options: keys of a sweep file, such as `trials`, that replace those of the file.

    In a script, call it below `if __name__ == "__main__":`, since it starts processes.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":  # its trials would join each other
        error = ConfigError(
            "a sweep starts the processes of its trials by itself, with --nproc; start it without torchrun"
        )
        error.reported_elsewhere = not is_first("failed")
        raise error
    import_optuna()
    is_folder = (Path(source) / SPEC).is_file()
    if is_folder and run_dir is not None:
        raise ConfigError(f"{source} is the folder of a sweep, which continues there; leave out --dir")
    document = read_document(str(source), words, options)
    spec = validated(document)
    if spec.nproc == 1:
        start_server()  # it imports torch while this process does
    from etude.monitor import default_run_dir
    from etude.sweep.check import check_sweep, judged_by
    from etude.sweep.space import pruner_of

    config = check_sweep(spec, document)
    spec.experiment = str(config.path.resolve()) if config.path else spec.experiment
    spec.metric, spec.mode = judged_by(spec, config, document)
    pruner = pruner_of(spec)
    path = Path(source) if is_folder else Path(run_dir or default_run_dir(f"sweeps/{config.name}"))
    folder = SweepFolder(path, storage)
    folder.begin(spec, config.to_yaml())
    study = folder.study(spec.mode)
    folder.check_study(study, spec, config.name)
    study.pruner = pruner
    if odd := odd_mode(spec.metric, spec.mode):
        say(odd)
    say(f"sweep of {config.name}: {spec.num_trials} trials for {spec.metric}; folder {path}")
    return _Sweep(folder, spec, study, config, say).run()


class _Sweep:
    """The loop of a sweep, in one process."""

    def __init__(
        self, folder: SweepFolder, spec: SweepSpec, study: "Study", config: "ExperimentConfig", say: Say
    ) -> None:
        self.folder, self.spec, self.study, self.config, self.say = folder, spec, study, config, say
        self.running: list[RunningTrial] = []
        self.failures = 0
        self.trials_file = TrialsFile(folder, spec, study, config.name)
        self.prunes = spec.pruner is not None and spec.pruner.component.name != "none"
        self.num_devices = _num_devices(config.training.device)

    def run(self) -> SweepOutcome:
        """Run trials until there are no more."""
        from optuna.exceptions import StorageInternalError

        from etude.engine.stopping import Interrupts

        said = "stopping: running trials save what they have; press Ctrl-C again to stop at once"
        try:
            self.trials_file.write(ended=True)
            with Interrupts(lambda _words: self.say(said)) as interrupts:
                while not interrupts.requested and (self._fill() or self.running):
                    self._wait()
                    for one in [*self.running]:
                        self._look(one)
                    self.trials_file.write()
                self._stop()
                self.trials_file.write(ended=True)
        except (OSError, StorageInternalError) as error:
            if isinstance(error, RunFolderError | BrokenPipeError):
                raise
            where = "the database" if isinstance(error, StorageInternalError) else self.folder.path
            raise RunFolderError(
                f"cannot write {where}: {getattr(error, 'strerror', None) or error}; when that is solved, continue "
                f"with: {self._command()}"
            ) from error
        except KeyboardInterrupt as stop:
            stop.add_note(f"earlier checkpoints are intact; continue with: {self._command()}")
            raise
        finally:
            for one in [*self.running]:
                if one.process is not None:
                    one.process.kill()
                self._release(one)
        return self._outcome(interrupts)

    def _outcome(self, interrupts: "Interrupts") -> SweepOutcome:
        from optuna.trial import TrialState

        trials = self._trials()
        if not interrupts.requested and trials and all(trial.state == TrialState.FAIL for trial in trials):
            last = trials[-1].user_attrs.get("error", "")
            raise TrainingError(f"all trials failed ({len(trials)}), so there is no best one; the last: {last}")
        elsewhere = any(trial.state == TrialState.RUNNING for trial in trials)
        status = "interrupted" if interrupts.requested else "waiting" if elsewhere else "finished"
        return SweepOutcome(self.folder.path, status, self.study, self._command())

    def _command(self) -> str:
        option = " --storage URL" if self.folder.storage else ""  # it may hold a password
        return f"etude sweep {quote(str(self.folder.path))}{option}"

    def _stop(self) -> None:
        """Ask the running trials to save, and wait until they have."""
        for one in self.running:
            if one.process is not None:
                one.process.terminate()
        while any(one.process is not None and one.process.poll() is None for one in self.running):
            self._wait()

    def _wait(self) -> None:
        processes = [one.process for one in self.running if one.process is not None]
        wait_for(processes, POLL_S)

    def _trials(self) -> "list[FrozenTrial]":
        return self.study.get_trials(deepcopy=False)

    def _fill(self) -> bool:
        """Start trials in the free slots; return whether one was started."""
        started = False
        while len(self.running) < self.spec.workers and (taken := self._take()) is not None:
            trial, lock = taken
            slot = min(set(range(self.spec.workers)) - {one.slot for one in self.running})
            runs = self.folder.runs(trial.number, self.spec.seeds)
            assert self.spec.metric is not None
            assert self.spec.mode is not None
            self.running.append(RunningTrial(trial, runs, lock, slot, self.spec.metric, self.spec.mode))
            self._start(self.running[-1])
            started = True
        return started

    def _take(self) -> "tuple[Trial, FolderLock] | None":
        """Take a trial that nobody runs any more, or a new one."""
        from optuna.trial import TrialState

        from etude.sweep.space import ask, continued

        with self.folder.locked():
            trials, mine = self._trials(), {one.trial.number for one in self.running}
            for left in trials:
                if left.state != TrialState.RUNNING or left.number in mine or not self.folder.has(left.number):
                    continue
                if lock := self.folder.own(left.number):
                    self.say(f"trial {left.number} is continued from its last checkpoint")
                    return continued(self.study, self.spec, left), lock
            if sum(trial.state != TrialState.WAITING for trial in trials) >= self.spec.num_trials:
                return None
            self.folder.check_new(len(trials), self.spec.seeds)
            trial = ask(self.study, self.spec)
            lock = self.folder.own(trial.number)
            assert lock is not None, "a new trial belongs to nobody"
            return trial, lock

    def _start(self, one: RunningTrial) -> None:
        """Start the next run of a trial; later, if an earlier process has not left its folder yet."""
        one.run.mkdir(parents=True, exist_ok=True)
        try:
            with FolderLock(one.run / ".lock"):
                pass
        except LockHeld:
            if not one.waits:
                self.say(f"trial {one.trial.number} still runs in an earlier process; waiting for it")
            one.waits = True
            return
        one.waits = False
        if not one.is_finished:
            self._check_experiment(one)
            devices = devices_of(one.slot, self.spec.nproc, self.num_devices)
            overrides = self._overrides(one)
            one.process = start_run(self.spec.experiment, overrides, one.run, nproc=self.spec.nproc, devices=devices)

    def _check_experiment(self, one: RunningTrial) -> None:
        """Stop the sweep if a new run would read another experiment than earlier ones: its file was edited."""
        from etude.experiment import load_experiment_config

        if (one.run / CONFIG).exists():  # it is resumed with its own config
            return
        try:
            config = load_experiment_config(self.spec.experiment, overrides=overrides_of(self.spec.overrides))
            self.folder.check_experiment(self.spec, config.to_yaml())
        except (ConfigError, RunFolderError):
            self._stop()
            raise

    def _overrides(self, one: RunningTrial) -> list[str]:
        from etude.sweep.space import values_of

        values: dict[str, Any] = {}
        if self.spec.seeds > 1:
            values["training.seed"] = self.config.training.seed + len(one.results)
        threads = max(1, (os.cpu_count() or 1) // (self.spec.workers * self.spec.nproc))
        if self.spec.workers > 1 and self.config.training.num_threads is None and "OMP_NUM_THREADS" not in os.environ:
            values["training.num_threads"] = threads
        return overrides_of({**self.spec.overrides, **values, **values_of(self.spec, one.trial.params)})

    def _look(self, one: RunningTrial) -> None:
        """Report the values of a trial, and what became of it if its process has ended."""
        try:
            self._look_at(one)
        except MetricMissing as error:
            if not self._has_success():  # no other trial has it either
                raise
            if one.process is not None:
                one.process.terminate()
            self._end(one, failed=str(error))

    def _look_at(self, one: RunningTrial) -> None:
        code = None if one.process is None else one.process.poll()
        one.report()
        if one.is_finished and (one.process is None or code is not None):
            problem = one.finish_run()
            if problem:
                self._end(one, failed=problem)
            elif len(one.results) == len(one.runs):
                self._end(one)
            else:
                self._start(one)
        elif one.process is None:
            self._start(one)
        elif code is not None:
            self._look_at_end(one, code)

    def _look_at_end(self, one: RunningTrial, code: int) -> None:
        """Decide about a process that ended before its run was finished."""
        one.kills += 1
        if one.is_pruned:
            self._end(one)
        elif (code < 0 or code == INTERRUPTED) and one.kills < MAX_KILLS:
            one.process = None
            self._start(one)
            if not one.waits:
                self.say(f"trial {one.trial.number}: its process was killed; continuing from its last checkpoint")
        else:
            words = one.last_words(code)
            if os.strerror(errno.ENOSPC) in words or self.folder.is_full():  # not the fault of the trial
                self._stop()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end(one, failed=words)

    def _end(self, one: RunningTrial, failed: str = "") -> None:
        from optuna.trial import TrialState

        from etude.sweep.table import line_of

        if failed:
            one.trial.set_user_attr("error", failed)
            state, value = TrialState.FAIL, None
        elif len(one.results) < len(one.runs):
            state, value = TrialState.PRUNED, None
        else:
            state, value = TrialState.COMPLETE, sum(one.results) / len(one.results)
        ended = self.study.tell(one.trial, value, state)
        self._release(one)
        self.trials_file.write(ended=True)
        self.say(line_of(ended, self.study, self.spec))
        if self.prunes and state == TrialState.COMPLETE and len(ended.intermediate_values) == 1:
            self.prunes = False
            self.say(f"pruner: a run has one value of {self.spec.metric}, at its end, so no trial can be pruned")
        self.failures += bool(failed)
        if self.failures >= MAX_FAILURES and not self._has_success():
            self._stop()
            raise TrainingError(f"the first {self.failures} trials failed, so the sweep ends; the last: {failed}")

    def _has_success(self) -> bool:
        """Whether a trial has a value, also in an earlier part, or in another process."""
        from optuna.trial import TrialState

        return any(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in self._trials())

    def _release(self, one: RunningTrial) -> None:
        self.running.remove(one)
        one.lock.__exit__(None, None, None)


def _num_devices(device: str) -> int:
    """Return the number of CUDA devices that trials may use."""
    import torch

    return torch.cuda.device_count() if device in ("auto", "cuda") else 0
