"""`Trainer`: the main class for Python users. It assembles a run and runs the loop."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from etude.callbacks.ema import take_averages
from etude.callbacks.swapped import OptimizerWeights
from etude.checkpoint import load_model_state
from etude.core import Clock, ConfigError, Loader, Task, TrainingError
from etude.core.loader import StatefulLoader
from etude.core.model_record import model_record
from etude.core.monitor import odd_mode
from etude.data.sources.adapters import ForeignLoader
from etude.distributed import World
from etude.distributed.agreement import check_same
from etude.distributed.settings import ParallelConfig
from etude.distributed.shards import has_shards
from etude.distributed.watchdog import Watchdog
from etude.engine.callback import RunInfo, RunParts
from etude.engine.callback_list import CallbackList
from etude.engine.compiled import saves_time
from etude.engine.loop import Loop
from etude.engine.state import TrainState
from etude.engine.step_log import StepLog
from etude.engine.stopping import Interrupts
from etude.optim.schedule_free import with_modes
from etude.trainer.arguments import (
    CallbacksLike,
    ConfigLike,
    LossLike,
    MetricsLike,
    as_callbacks,
    as_config,
    as_epochs,
    as_parallel,
    check_divided,
    check_judge,
    check_model,
    expect,
    make_task,
    measure,
    plain_task,
    shared_settings,
)
from etude.trainer.example import keeping_example
from etude.trainer.find_lr import RateSearch, range_test
from etude.trainer.fit import fit_to_memory, recorded_sizes, with_sizes
from etude.trainer.kept_settings import hyperparameters
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine
from etude.trainer.optimization import OptimizerLike, compile_step, left_out, make_step
from etude.trainer.output import Folder, Output
from etude.trainer.recipe import recipe_of
from etude.trainer.sanity_check import check_validation
from etude.trainer.schedule import RunRate, SchedulerLike

logger = logging.getLogger("etude")
SAME = "start all processes with the same settings and the same data"


class Trainer:
    """Trains any `nn.Module`: `Trainer(model, train_loader, val_loader, config={"epochs": 3}).train()`.

    Batches may be tensors, tuples, mappings or `DataBatch`es; model outputs tensors, tuples, mappings or objects with
    `logits`. The run is reproducible: the same config gives the same weights, whether or not it was stopped and
    resumed.
    """

    _interrupts: Interrupts | None = None
    """Those of the current or last training."""
    _is_training = False
    _raw: dict[str, Any] | None = None
    """The state of the model to train on with, if the loaded checkpoint has an average that this run lacks."""

    def __init__(
        self,
        model: torch.nn.Module,
        train_loader: Any = None,
        val_loader: Any = None,
        *,
        config: ConfigLike = None,
        optimizer: OptimizerLike = None,
        scheduler: SchedulerLike = None,
        loss: LossLike = None,
        val_loss: LossLike = None,
        task: Task | None = None,
        metrics: MetricsLike = (),
        curriculum: Any = None,
        callbacks: CallbacksLike = (),
        device: str | torch.device | None = None,
        output_dir: Folder = None,
        overwrite: bool = False,
        resume: bool = False,
        use_amp: bool | None = None,
        compile_model: bool | None = None,
        progress: bool = True,
        name: str = "run",
        world: World | None = None,
        parallel: ParallelConfig | Mapping[str, Any] | str | None = None,
        meta: Mapping[str, Any] | None = None,
        whole_config: Mapping[str, Any] | None = None,
        **modalities: Any,
    ) -> None:
        """Assemble a run; nothing is trained or written yet.

        Args:
            model: any module; it is moved to the device.
            train_loader: an etude or torch DataLoader, a Dataset, data or a pair of data and labels (tensors, NumPy
                arrays, tables of pandas), or any iterable of batches.
            val_loader: the same, for validation.
            config: a `TrainerConfig`, or its keys as a mapping.
            optimizer: an optimizer, a function of the parameters, or the name of one; AdamW by default. A list of
                optimizers that share no parameter is stepped, saved and resumed as one. Optimizer, scheduler, loss and
                callbacks may be named as in a config file: "sgd", {"name": "sgd", "lr": 0.1}.
            scheduler: a function of the step that gives a factor of the learning rate, a torch scheduler
                (stepped once per optimizer step; use the `LRSchedule` callback to step it per epoch), or one of timm.
                Without one,
                `warmup_steps`, `scheduler_type` and `use_scheduler` of the config make one as long as the run.
            loss: a `LossStrategy`, a torch loss or a function of (predictions, labels), or of (output, batch) under
                that name; "model" is the loss that the model computes itself. By default chosen from the first batch.
            val_loss: another loss for validation and `evaluate`.
            task: replaces `loss` by full control over how model and batch become loss terms.
            metrics: one, or several: names as in a config file ("f1", {"name": "accuracy", "k": 5}), objects of
                `etude.metrics` or torchmetrics, functions of (predictions, labels), or a mapping of names to these.
                They are measured in validation (`val_f1` …), and in training too if `config.train_metrics` says so, or
                if there is no validation data.
            curriculum: phases that switch the tasks of `task`, a `MultiTask`, on and off during the run: short for
                a `CurriculumCallback` that comes first.
            callbacks: one, or several, called in this order.
            device: overrides `config.device`.
            output_dir: the run folder; without one, nothing is written. One folder is one run: `train` refuses a
                folder that holds another one.
            overwrite: remove the existing run in `output_dir` when training starts.
            resume: load the newest intact checkpoint of `output_dir`, if there is one, and continue from it.
            use_amp: overrides `config.precision`: True is bf16 (fp16 where bf16 is missing), False is fp32.
            compile_model: overrides `config.compile`: True is "step", False is "off".
            progress: show a live display.
            name: shown in the display.
            world: the processes of the run; found from torchrun's variables by default.
            parallel: how the processes divide data and model: the keys of `ParallelConfig`, or "ddp" (the default),
                "fsdp" or "auto".
            meta: data to keep in every checkpoint's `meta.json`.
            whole_config: what the run can be rebuilt from: the run folder's `config.yaml`, and `run-config.yaml`
                of every checkpoint; the trainer's own config by default.
            modalities: for tokens of several modalities, instead of `loss`: `vocab`, a `VocabSpec`, and `codebooks` by
                modality (or `image_codebook`, `spectrum_codebook`, `scalar_centers`) make the loss `MeaningfulLoss`,
                with the settings of `config.meaningful_loss`; `edges` are those of the bins of scalars, by modality;
                `use_ce=False` omits its cross entropy.
        """
        self.model = check_model(model)
        expect("name", name, isinstance(name, str), "text")
        for argument, value in (("meta", meta), ("whole_config", whole_config)):
            expect(argument, value, isinstance(value, Mapping | None), "a mapping")
        self.config = as_config(config, device=device, use_amp=use_amp, compile_model=compile_model)
        self.config = recorded_sizes(self.config, output_dir, resume=resume)
        self.machine = Machine.from_config(self.config, world)
        self.machine.arrange(settings := as_parallel(parallel), model)
        record = model_record(self.model)  # before it is divided, which changes its class
        self.task = make_task(loss, task, self.config, modalities, of=type(self))
        self.val_task = self.task if val_loss is None else plain_task(val_loss, None)
        """The task of validation and `evaluate`."""
        self._begin_tasks()
        measure(self.task, metrics, self.config.train_metrics, validates=val_loader is not None)
        if val_loss is not None:
            self.val_task.measure(self.task.measures)
        own = as_callbacks(callbacks, curriculum, self.config)
        for one in own:
            one.prepare(model)
        others = {"task": task, "metrics": metrics, "curriculum": curriculum, "callbacks": callbacks, **modalities}
        chosen = {"optimizer": optimizer, "scheduler": scheduler, "loss": loss, "val_loss": val_loss}
        loaders = {"train_loader": train_loader, "val_loader": val_loader}
        given = {**loaders, **chosen, **others, "parallel": settings.model_dump(exclude_defaults=True)}
        recipe = recipe_of(model, self.config, given) if output_dir is not None and whole_config is None else None
        uses_all = self.task.uses_all_parameters and all(one.uses_all_parameters for one in own)
        self.step = make_step(model, self.task, optimizer, self.config, self.machine, uses_all_parameters=uses_all)
        self.optimizer = self.step.updater.optimizer
        self._left_out = left_out(model, self.optimizer)
        self.config, self._fitted = fit_to_memory(self.config, self.step, train_loader, self.machine, model)
        if self._fitted:
            self.machine.resize(self.config.first_batch_size)
            self.step.splitter.set(self.config.micro_batch_size)
            whole_config = with_sizes(whole_config, self.config)
        self.loaders = Loaders(train_loader, val_loader, config=self.config, machine=self.machine, model=model)
        check_same(self.machine.world, {**shared_settings(self.config), **self.loaders.sizes()}, SAME)
        self.loaders.choose_all()
        self.task.check_loader(self.loaders.sources[0], self.loaders.accumulator.steps_at(0))
        self.compiled = compile_step(self.step, self.config, self.machine, self.loaders)
        self.learning_rate = RunRate(self.optimizer, scheduler, self.config, self.loaders)
        self.output = Output(
            output_dir, self.config, self.machine, name, progress, overwrite, resume, whole_config, recipe
        )
        modes = [OptimizerWeights()] if with_modes(self.optimizer) else []
        listed = *own, *modes, *self.learning_rate.callbacks, *self.output.callbacks
        self.callbacks = CallbackList(listed)
        self.callbacks.bind(self._parts())
        if self.machine.layout.sizes.divides_model:
            check_divided(self.config, self.callbacks)
        self.meta = {"model": record, **(meta or {}), **self.callbacks.facts(), **self.task.facts()}
        if self.loaders.train is not None:  # without training data nothing is judged
            check_judge(self.config, has_validation=self.loaders.validation is not None)
        self.state = self._new_state()
        if self.config.restore_best:
            self.output.judge.load_best = partial(self.output.load_best, self.model, self.state.clock)
        if resume and (path := self.output.to_resume()) is not None:
            self.load_checkpoint(path)

    # ------------------------------------------------------------------------------------------------ public methods

    def train(self, num_epochs: int | None = None) -> dict[str, float]:
        """Train to the end of the plan, from the loaded checkpoint if there is one; return the last metrics.

        Afterwards the model is in evaluation mode; with `restore_best` it has its best weights, else its last ones.
        `num_epochs` counts from the start of the run, not from the checkpoint. It overrides `config.epochs`: a
        schedule of the config gets the new length. If nothing is left to train, the result is the final metrics of
        the run. After Ctrl-C the run is saved, the result has an entry `interrupted` and `callbacks.control.reason`
        names the signal.
        """
        if self._is_training:
            raise TrainingError("train() was called inside train(), by a callback; wait until it has returned")
        if self.loaders.train is None:
            raise ConfigError("there is no training data; pass the Trainer a train_loader")
        if num_epochs is not None:
            self.config = self.config.model_copy(update={"epochs": as_epochs(num_epochs)})
        self._take_back()
        self.machine.set_process()  # another trainer may have been made since
        self.callbacks.control.begin()
        self.learning_rate.follow(self.config, self.state.clock)
        self.learning_rate.advise(self.config, self.callbacks, self.state.clock)
        self.output.unload_best(self.model)
        if self._raw is not None:
            load_model_state(self.model, self._raw)
            self._raw = None
        clock = self.state.clock
        if clock.step == 0:
            self._begin_tasks()
        accumulated = self.loaders.accumulator.steps_at(clock.epoch)
        recomputable = self.model if self.config.recomputed_blocks is None else None
        with (
            self.output.held(clock, self.config),
            self.machine.training(accumulated, recomputable, splits=self.step.splitter.recovers),
            self.state.random.running(),
            Interrupts(self.output.say) as self._interrupts,
            Watchdog(
                self.machine.world,
                clock,
                self.config.collective_timeout_s,
                self.output.path,
                self.callbacks.on_exception,
            ),
        ):
            loader = keeping_example(self.loaders.train, self.task, self.output.folder, self.machine.world, clock)
            result = self._run(self._loop(loader, self._interrupts))
            self.output.finish(clock, self.callbacks, result, self.task.files())
        return {**result, "interrupted": 1.0} if self.was_interrupted else result

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal, such as Ctrl-C, ended the last training early."""
        return self.callbacks.control.interrupted

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Return the mean loss and metrics over a loader (the validation loader by default)."""
        source = self.loaders.validation if loader is None else self.loaders.make(loader, training=False)
        if source is None:
            raise ConfigError("there is no evaluation data; pass a loader")
        return self.machine.evaluate(self.model, self.val_task, source, self._interrupts)

    def predict(self, data: Any) -> Any:
        """Return the model's outputs for all samples, in the order of the data, on the CPU; labels are not used.

        `data` is anything that the Trainer takes for validation; a loader that shuffles is read in order. The result
        is a tensor with a row per sample, or a tuple or mapping of them if the model returns one; a list of tensors
        where the samples of different batches have different shapes. All processes of a run return everything.
        """
        return self.machine.predict(self.model, self.task, self.loaders.in_order(data))

    def find_lr(self, min_lr: float = 1e-7, max_lr: float = 10.0, steps: int = 100) -> RateSearch:
        """Test learning rates: train `steps` steps with a rate that rises exponentially, and undo them.

        The run is as before afterwards, bit for bit. The result has the curve and `suggestion`, the rate to train with.
        Callbacks are not called, but a curriculum sets the tasks of its current phase. Raises ConfigError without
        training data, or if it can be read only once.
        """
        if self._is_training:
            raise TrainingError("find_lr() was called inside train(), by a callback; call it before")
        if self.loaders.train is None:
            raise ConfigError("there is no training data; pass the Trainer a train_loader")
        if isinstance(source := self.loaders.sources[0], ForeignLoader) and isinstance(source.source, Iterator):
            raise ConfigError(
                "the training data is an iterator, which can be read only once; pass a list, a DataLoader or a "
                "function that returns a new iterator"
            )
        if self.machine.layout.sizes.divides_model:
            raise ConfigError("find_lr does not support a model that processes divide; use parallel: ddp for it")
        self._take_back()
        parts = self.state, self.step, self.loaders.train, self.loaders.accumulator
        with self.machine.training(splits=self.step.splitter.recovers), ExitStack() as stack:
            for one in self.callbacks:
                stack.enter_context(one.trying(self.state.clock))
            return range_test(*parts, min_lr=min_lr, max_lr=max_lr, steps=steps)

    def load_checkpoint(self, path: str | Path, *, keep_hyperparameters: bool | None = None) -> None:
        """Restore a checkpoint folder, or the newest intact checkpoint of a run folder; `train` continues from it.

        `keep_hyperparameters` keeps the optimizer's current learning rate, weight decay and so on. By default they are
        those of the checkpoint, with a warning if they differ; False does not warn.
        """
        lazy = has_shards([*self.model.parameters()])
        checkpoint = self.output.read(Path(path), self.check_facts, lazy=lazy)
        metrics = checkpoint.metrics  # before anything changes, since they may be malformed
        raw = take_averages(checkpoint, self.callbacks.by_key(), warns=self.machine.world.is_main)
        self.callbacks.take_back(self._parts(), begins=True)
        keep = keep_hyperparameters if self.machine.world.is_main else bool(keep_hyperparameters)  # warns once
        with hyperparameters(self.optimizer, self.callbacks, keep=keep):
            self.state.restore(checkpoint)
        self.learning_rate.loaded()
        self.output.loaded(checkpoint.path, metrics)
        self._raw = raw

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if the data stored in the checkpoint at `place` belongs to another run."""
        self.task.check_facts(saved, place)
        self.callbacks.check_facts(saved, place)

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> Path | None:
        """Write a checkpoint of the current state into the run folder and return its path."""
        saver = self.output.saver(self.state, self.config, self.meta, again=True)
        if saver is None:
            raise ConfigError("checkpoints need a run folder; pass the Trainer an output_dir")
        self._take_back()
        self.machine.set_process()
        self.output.unload_best(self.model)
        with self.output.held(self.state.clock, self.config):
            path = saver.save(metrics or {})
            return path if path is not None else saver.settle()

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if the loader has no length and max_steps is not set."""
        return self.loaders.total_steps(self.config, self.state.clock)

    # ------------------------------------------------------------------------------------------------ internals

    def _take_back(self) -> None:
        """Take back callbacks that have been given to another trainer meanwhile, or refuse to."""
        self.callbacks.take_back(self._parts(), begins=self.state.clock.step == 0)

    def _begin_tasks(self) -> None:
        """Forget what an earlier run with the same loss or task, or an evaluation before this one, has decided."""
        for task in (self.task, self.val_task):
            task.begin_run()

    def _parts(self) -> RunParts:
        rate, (train, validation) = self.learning_rate, self.loaders.sources
        parts = self.model, self.task, train, validation, rate, rate.has_schedule
        return RunParts(*parts, self.step, dict(self.config))

    def _new_state(self) -> TrainState:
        world, train = self.machine.world, self.loaders.sources[0]
        return TrainState(
            model=self.model,
            optimizer=self.optimizer,
            precision=self.machine.precision,
            clock=Clock(),
            log=StepLog(self.machine.data_world),
            callbacks=self.callbacks,
            world=world,
            seed=self.config.seed,
            task=self.task,
            compiled=self.compiled,
            loader=train if isinstance(train, StatefulLoader) else None,
            splitter=self.step.splitter,
        )

    def _loop(self, loader: Loader, interrupts: Interrupts) -> Loop:
        config = self.config
        micro_batches = self.loaders.accumulator.steps_at(0)
        self.compiled.is_worthwhile = saves_time(self.total_steps, micro_batches, self.task.outputs)
        loop = Loop(
            self.state,
            self.step,
            loader,
            config.plan(),
            learning_rate=self.learning_rate,
            accumulator=self.loaders.accumulator,
            validate=self.evaluate if self.loaders.validation is not None else None,
            saver=self.output.saver(self.state, config, self.meta),
            interrupts=interrupts,
        )
        loop.logs = dict(self.output.metrics)  # the result if nothing is left to train
        return loop

    def _run(self, loop: Loop) -> dict[str, float]:
        """Run the loop between the first and the last hook of the callbacks; return the last metrics."""
        validation, trials = self.loaders.validation, self.config.sanity_val_batches
        self.model.train()
        self._is_training = True
        try:
            self.callbacks.on_train_begin(self._info())
            if self._fitted and self.machine.world.is_main:
                self.callbacks.on_notice(self._fitted, {"step": self.state.clock.step, "event": "execution"})
            for warning in self._warnings():
                self.callbacks.on_notice(warning, {"step": self.state.clock.step})
            if validation is not None and trials:
                check_validation(self.model, self.val_task, validation, trials, self.machine)
            result = loop.run()
            self.callbacks.on_train_end(result)
            self.model.eval()
        except BaseException as error:
            self.callbacks.on_exception(error)
            raise
        finally:
            self._is_training = False
        return dict(result)

    def _warnings(self) -> list[str]:
        """Return what the user may not intend, on the process that prints."""
        judge = self.output.judge.best
        found = [odd_mode(judge.name, judge.mode), self.machine.layout.warning()]
        if self.val_task is not self.task and self.loaders.validation is None:
            found.append("there is no validation data, so only `evaluate` uses the validation loss (val_loss)")
        if late := [name for name in left_out(self.model, self.optimizer) if name not in self._left_out]:
            more = f" and {len(late) - 3} more" if len(late) > 3 else ""
            found.append(
                f"{', '.join(late[:3])}{more} are not trained: they were unfrozen, or put into the model, after the "
                "optimizer was made; make a new Trainer"
            )
        return [one for one in found if one is not None and self.machine.world.is_main]

    def _info(self) -> RunInfo:
        return RunInfo(
            name=self.output.name,
            model=self.model,
            optimizer=self.optimizer,
            clock=self.state.clock,
            device=self.machine.device,
            total_epochs=self.config.num_epochs,
            total_steps=self.total_steps,
            steps_per_epoch=self.loaders.steps_per_epoch,
            run_dir=self.output.path,
            is_main=self.machine.world.is_main,
            resumed=self.output.is_resumed,
            processes=self.machine.world.size,
            best=self.output.judge.best,
            divides_model=self.machine.layout.sizes.divides_model,
        )
