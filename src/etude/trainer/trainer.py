"""`Trainer`: the object most Python users hold. It puts the parts of a run together and runs the loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from etude.callbacks import LRSchedule
from etude.checkpoint import Checkpoint, errors_of, read_checkpoint
from etude.core import Clock, ConfigError, Loader, Task, TrainingError
from etude.distributed import World, wrap_data_parallel
from etude.engine.accumulation import GradientAccumulator
from etude.engine.callback import Callback, CallbackList, RunInfo, RunParts
from etude.engine.evaluation import evaluate
from etude.engine.interrupt import Interrupts
from etude.engine.loop import Loop, Plan
from etude.engine.recompute import repeated_blocks
from etude.engine.state import TrainState
from etude.engine.step import Step
from etude.engine.step_log import StepLog
from etude.engine.update import Updater
from etude.losses import LossStrategy
from etude.monitor import RunFolder
from etude.trainer.arguments import Section, as_callbacks, as_config, as_epochs, check_names, make_task
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine
from etude.trainer.optimization import OptimizerLike, RunRate, SchedulerLike, make_optimizer
from etude.trainer.output import Output
from etude.trainer.sanity_check import check_validation


class Trainer:
    """Trains any `nn.Module`: `Trainer(model, train_loader, val_loader, config={"epochs": 3}).train()`.

    Batches may be tensors, tuples, mappings or `DataBatch`es; model outputs tensors, tuples, mappings or objects
    with `logits`. The run is reproducible: the same config gives the same weights, stopped and resumed or not.
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: Any = None,
        val_loader: Any = None,
        *,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        optimizer: OptimizerLike = None,
        scheduler: SchedulerLike = None,
        loss: LossStrategy | nn.Module | Callable[..., Any] | Section | None = None,
        task: Task | None = None,
        curriculum: Any | Sequence[Any] | None = None,
        callbacks: Callback | Section | Iterable[Callback | Section] = (),
        device: str | torch.device | None = None,
        output_dir: str | Path | RunFolder | None = None,
        overwrite: bool = False,
        resume: bool = False,
        use_amp: bool | None = None,
        compile_model: bool | None = None,
        progress: bool = True,
        name: str = "run",
        world: World | None = None,
        meta: Mapping[str, Any] | None = None,
        whole_config: Mapping[str, Any] | None = None,
        **modalities: Any,
    ) -> None:
        """Put a run together; nothing is trained and nothing written yet.

        Args:
            model: any module; it is moved to the device.
            train_loader: an etude or torch DataLoader, a Dataset, a tensor or pair of tensors or NumPy arrays, or any
                iterable of batches.
            val_loader: the same, for validation.
            config: a `TrainerConfig`, or its keys as a mapping.
            optimizer: an optimizer, a function of the parameters, or the name of one; AdamW by default. Optimizer,
                scheduler, loss and callbacks may be named as in a config file: "sgd", {"name": "sgd", "lr": 0.1}.
            scheduler: a function of the step that gives a factor of the learning rate, or a torch scheduler
                (stepped once per optimizer step; use the `LRSchedule` callback to step it per epoch). Without one,
                `warmup_steps`, `scheduler_type` and `use_scheduler` of the config make one as long as the run.
            loss: a `LossStrategy`, a torch loss or a function of (predictions, labels); found from the shapes of
                the first batch if left out.
            task: replaces `loss` by full control over how model and batch become loss terms.
            curriculum: phases that switch the tasks of `task`, a `MultiTask`, on and off as the run goes on: short for
                a `CurriculumCallback` that stands first.
            callbacks: one, or several, called in this order.
            device: overrides `config.device`.
            output_dir: the run folder; without one, nothing is written. One folder is one run: `train` refuses a
                folder that holds another one.
            overwrite: remove the run that is in `output_dir` when training starts.
            resume: load the newest intact checkpoint of `output_dir`, if there is one yet, and go on from it.
            use_amp: overrides `config.precision`: True is bf16 (fp16 where bf16 is missing), False is fp32.
            compile_model: overrides `config.compile_model`.
            progress: show a live display.
            name: shown in the display.
            world: the processes of the run; found from torchrun's variables by default.
            meta: facts to keep in every checkpoint's `meta.json`.
            whole_config: what the run can be built from again: the run folder's `config.yaml`, and `run-config.yaml`
                of every checkpoint; the trainer's own config by default.
            modalities: for tokens of several modalities, instead of `loss`: `vocab`, a `VocabSpec`, and `codebooks` by
                modality (or `image_codebook`, `spectrum_codebook`, `scalar_centers`) make the loss `MeaningfulLoss`,
                with the settings of `config.meaningful_loss`; `edges` are those of the bins of scalars, by modality;
                `use_ce=False` leaves out its cross entropy.
        """
        check_names(model, name, meta)
        self.config = as_config(config, device=device, use_amp=use_amp, compile_model=compile_model)
        self.machine = machine = Machine.from_config(self.config, world)
        self.model = model
        self.task = make_task(type(self), loss, task, self.config, modalities, (train_loader, val_loader))
        self.step = self._make_step(optimizer)
        self.optimizer = self.step.updater.optimizer
        self.loaders = Loaders(train_loader, val_loader, config=self.config, machine=machine, model=model)
        self.accumulator = GradientAccumulator(self.optimizer, self.config.grad_accum_steps)
        self.task.check_loader(self.loaders.sources[0], self.accumulator.steps_at(0))
        self.learning_rate = RunRate(self.optimizer, scheduler, self.config)
        if train_loader is not None and (scheduler is not None or self.total_steps is None):
            self._follow_plan()  # a schedule that cannot be made is refused now
        listed = [*as_callbacks(callbacks, curriculum), *self.learning_rate.callbacks]
        self.output = Output(output_dir, self.config, machine, name, progress, overwrite, resume, whole_config)
        self.callbacks = CallbackList([*listed, *self.output.callbacks])
        self.callbacks.bind(self._parts())
        self.meta = {**(meta or {}), **self._facts()}
        self.state = TrainState(
            model,
            self.optimizer,
            machine.precision,
            Clock(),
            StepLog(machine.world),
            self.callbacks,
            machine.world,
            self.config.seed,
            self.task,
        )
        self._interrupts: Interrupts | None = None  # those of the training under way or last
        self._is_training = False
        if resume and (path := self.output.path) is not None and self.output.has_checkpoints():
            self.load_checkpoint(path)

    # ------------------------------------------------------------------------------------------------ doors

    def train(self, num_epochs: int | None = None) -> dict[str, float]:
        """Train to the end of the plan, from the loaded checkpoint if there is one; return the last numbers.

        `num_epochs` counts from the start of the run, not from the checkpoint. It takes the place of `config.epochs`: a
        schedule of the config is stretched to the new length. If nothing is left to train, these are the numbers that
        the run has ended with. After Ctrl-C the run is saved, the result has an entry `interrupted` and
        `callbacks.control.reason` names the signal.
        """
        if self._is_training:
            raise TrainingError("train() was called inside train(), by a callback; wait until it has returned")
        if self.loaders.train is None:
            raise ConfigError("there is nothing to train on: give the Trainer a train_loader")
        if num_epochs is not None:
            self.config = self.config.model_copy(update={"epochs": as_epochs(num_epochs)})
        self.callbacks.control.begin()
        self._follow_plan()
        state, output = self.state, self.output
        with (
            output.held(state.clock, self.config),
            self.machine.training(
                grad_accum_steps=self.accumulator.steps_at(state.clock.epoch),
                can_recompute=self.config.recomputed_blocks is None and bool(repeated_blocks(self.model)),
            ),
            state.random.running(),
            Interrupts(output.say) as self._interrupts,
        ):
            result = self._run(self._loop(self.loaders.train, self._interrupts))
            output.finish(state.clock, self.callbacks, result)
        return {**result, "interrupted": 1.0} if self.was_interrupted else result

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal, such as Ctrl-C, ended the last training early."""
        return self.callbacks.control.interrupted

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Return the mean loss and metrics over a loader (the validation loader by default)."""
        source = self.loaders.validation if loader is None else self.loaders.make(loader, training=False)
        if source is None:
            raise ConfigError("there is nothing to evaluate on: give a loader")
        precision, world = self.machine.precision, self.machine.world
        with self.machine.validating():
            return evaluate(
                self.model, self.task, source, precision=precision, world=world, interrupts=self._interrupts
            )

    def load_checkpoint(self, path: str | Path, *, keep_hyperparameters: bool = False) -> None:
        """Restore a checkpoint folder, or the newest intact checkpoint of a run folder; `train` goes on from it.

        `keep_hyperparameters` keeps learning rate, weight decay and so on as the optimizer has them now.
        """
        mine = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        rates = [(one, one.base_rates) for one in self.callbacks if isinstance(one, LRSchedule)]
        checkpoint = self._read(self.output.locate(Path(path)))
        metrics = checkpoint.metrics  # before anything changes: they may not be numbers
        self.state.restore(checkpoint)
        self.output.loaded(checkpoint.path, metrics)
        if keep_hyperparameters:
            for group, settings in zip(self.optimizer.param_groups, mine, strict=True):
                group.pop("initial_lr", None)  # that of the checkpoint
                group.update(settings)
            for schedule, base in rates:
                schedule.rebase(base)

    def check_facts(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if a checkpoint is of something else, such as another vocabulary."""
        self.task.check_facts(checkpoint.meta, checkpoint.path)
        self.callbacks.check_facts(checkpoint.meta, checkpoint.path)

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> Path | None:
        """Write a checkpoint of this moment into the run folder and return its path."""
        saver = self.output.saver(self.state, self.config, self.meta, again=True)
        if saver is None:
            raise ConfigError("there is nowhere to save: give the Trainer an output_dir")
        with self.output.held(self.state.clock, self.config):
            return saver.save(metrics or {})

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if the loader has no length and max_steps is not set."""
        return self.loaders.total_steps(self.config)

    # ------------------------------------------------------------------------------------------------ parts

    def _make_step(self, optimizer: OptimizerLike) -> Step:
        """Move the model to the device, make its optimizer, and return the step that trains it."""
        config, machine, model, task = self.config, self.machine, self.model, self.task
        unused = config.find_unused_parameters or not task.uses_all_parameters
        task.join(model)
        with machine.making_model():
            machine.place(model, config)
            made = make_optimizer(optimizer, model, config)
            task.extend(made)
            wrapped = wrap_data_parallel(model, made, machine.world, machine.device, find_unused_parameters=unused)
        updater = Updater(
            made,
            clip_norm=config.gradient_clip_norm,
            clip_value=config.gradient_clip_value,
            precision=machine.precision,
        )
        return Step(
            wrapped,
            task,
            updater,
            machine.precision,
            world=machine.world,
            metrics=config.train_metrics,
        )

    def _follow_plan(self) -> None:
        """Give the schedule the length of the run."""
        self.learning_rate.follow(self.total_steps, self.loaders.steps_per_epoch(self.config))

    def _facts(self) -> dict[str, Any]:
        """Return what checkpoints keep of the task and the callbacks beside their state."""
        return {**self.callbacks.facts(), **self.task.facts()}

    def _read(self, path: Path) -> Checkpoint:
        """Read a checkpoint on every rank; raise CheckpointError if its facts contradict those of this run."""
        checkpoint = self.machine.world.attempt(lambda: read_checkpoint(path))
        assert checkpoint is not None
        with errors_of(path, "meta"):
            self.check_facts(checkpoint)
        return checkpoint

    def _loop(self, loader: Loader, interrupts: Interrupts) -> Loop:
        config = self.config
        plan = Plan(
            epochs=config.num_epochs,
            max_steps=config.max_steps,
            log_interval=config.log_interval,
            validate_interval=config.validate_interval,
            checkpoint_interval=config.checkpoint_interval,
            validate_every_steps=config.validate_every_steps,
            save_every_steps=config.save_every_steps,
            max_skipped_steps=config.max_skipped_steps,
        )
        loop = Loop(
            self.state,
            self.step,
            loader,
            plan,
            learning_rate=self.learning_rate,
            accumulator=self.accumulator,
            callbacks=self.callbacks,
            validate=self.evaluate if self.loaders.validation is not None else None,
            saver=self.output.saver(self.state, config, self.meta),
            interrupts=interrupts,
        )
        loop.logs = dict(self.output.metrics)  # the result if nothing is left to train
        return loop

    def _run(self, loop: Loop) -> dict[str, float]:
        """Run the loop between the callbacks' first and last hook; return the last numbers."""
        self.model.train()
        self._is_training = True
        try:
            self.callbacks.on_train_begin(self._info())
            if self.loaders.validation is not None and self.config.sanity_val_batches:
                check_validation(
                    self.model,
                    self.task,
                    self.loaders.validation,
                    self.config.sanity_val_batches,
                    self.machine,
                    loop.interrupts,
                )
            result = loop.run()
            self.callbacks.on_train_end(result)
        except BaseException as error:
            self.callbacks.on_exception(error)
            raise
        finally:
            self._is_training = False
        return dict(result)

    def _parts(self) -> RunParts:
        train, validation = self.loaders.sources
        rate = self.learning_rate
        return RunParts(self.model, self.task, train, validation, rate, has_schedule=rate.has_schedule)

    def _info(self) -> RunInfo:
        return RunInfo(
            name=self.output.name,
            model=self.model,
            optimizer=self.optimizer,
            clock=self.state.clock,
            device=self.machine.device,
            total_epochs=self.config.num_epochs,
            total_steps=self.total_steps,
            steps_per_epoch=self.loaders.steps_per_epoch(self.config),
            run_dir=self.output.path,
            is_main=self.machine.world.is_main,
            resumed=self.output.is_resumed,
        )
