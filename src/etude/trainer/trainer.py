"""`Trainer`: the object most Python users hold. It puts the parts of a run together and runs the loop."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from etude.callbacks import LRSchedule, ProgressDisplay, RunRecorder
from etude.checkpoint import Checkpoint, explained, folder_name, read_checkpoint
from etude.core import Clock, ConfigError, DataError, Loader, Task, TrainingError
from etude.core.terms import SeveralTasks
from etude.data import explain_worker_failure
from etude.distributed import World, join_world, wrap_data_parallel
from etude.engine.accumulation import GradientAccumulator
from etude.engine.callback import Callback, CallbackList, RunInfo
from etude.engine.evaluation import evaluate
from etude.engine.flops import ForwardFlops
from etude.engine.interrupt import Interrupts
from etude.engine.ledger import Ledger
from etude.engine.loop import Loop, Plan
from etude.engine.precision import Precision
from etude.engine.recompute import recompute_activations, repeated_blocks
from etude.engine.recovery import (
    explain_out_of_memory,
    explain_out_of_memory_in_validation,
    explain_out_of_memory_of_model,
    explain_single_sample,
)
from etude.engine.saving import Saver
from etude.engine.schedule import LearningRate
from etude.engine.state import TrainState
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import LossStrategy, SupervisedTask
from etude.monitor import RunFolder
from etude.multitask.curriculum import Curriculum, Phase
from etude.multitask.training import check_data, join_weighting, train_weighting
from etude.optim import Schedule
from etude.trainer.arguments import Section, as_callbacks, as_epochs, as_tensors, check_model, check_names, make_task
from etude.trainer.assembly import (
    PlannedSchedule,
    TorchScheduler,
    as_config,
    blocks_to_recompute,
    curriculum_callback,
    make_optimizer,
    plan_schedule,
    planned_steps,
    warn_of_loader,
)
from etude.trainer.callback_checks import check_callbacks, check_rates
from etude.trainer.config import TrainerConfig
from etude.trainer.device import configure_cuda_performance, make_deterministic, on_device, resolve_device
from etude.trainer.feeding import make_loader, num_batches
from etude.trainer.output import Output
from etude.trainer.sanity_check import check_validation

logger = logging.getLogger("etude")


class Trainer:
    """Trains any `nn.Module`: `Trainer(model, train_loader, val_loader, config={"epochs": 3}).train()`.

    Batches may be tensors, tuples, mappings or `DataBatch`es; model outputs tensors, tuples, mappings or objects
    with `logits`. The run is reproducible: the same config gives the same weights, stopped and resumed or not.
    """

    def __init__(  # noqa: C901
        self,
        model: nn.Module,
        train_loader: Any = None,
        val_loader: Any = None,
        *,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        optimizer: torch.optim.Optimizer
        | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
        | Section
        | None = None,
        scheduler: Schedule | TorchScheduler | PlannedSchedule | Section | None = None,
        loss: LossStrategy | nn.Module | Callable[..., Any] | Section | None = None,
        task: Task | None = None,
        curriculum: Curriculum | Sequence[Phase] | None = None,
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
            curriculum: phases that switch the tasks of `task`, a `MultiTask`, on and off as the run goes on.
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
            whole_config: what every checkpoint keeps as `run-config.yaml`; the trainer's own config by default.
            modalities: for tokens of several modalities, instead of `loss`: `vocab`, a `VocabSpec`, and `codebooks` by
                modality (or `image_codebook`, `spectrum_codebook`, `scalar_centers`) make the loss `MeaningfulLoss`,
                with the settings of `config.meaningful_loss`; `edges` are those of the bins of scalars, by modality;
                `use_ce=False` leaves out its cross entropy.
        """
        check_model(model)
        check_names(name, meta)
        self.config = as_config(config, device=device, use_amp=use_amp, compile_model=compile_model)
        config = self.config
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if world is None:
            world = join_world(resolve_device(config.device).type)
        self.world = world
        self.device = resolve_device(config.device, world.local_rank)
        if config.deterministic:
            make_deterministic()
        elif self.device.type == "cuda" and config.resolved_precision != "fp32":
            configure_cuda_performance()
        self.name = name
        self.task = make_task(type(self), loss, task, config, modalities, (train_loader, val_loader))
        join_weighting(model, self.task)
        # A batch for some of the tasks leaves the heads of the others without gradients.
        unused = config.find_unused_parameters or isinstance(self.task, SeveralTasks)
        with explain_out_of_memory_of_model(self.device):
            self.model = model.to(self.device)
            if config.activation_checkpointing is not False:
                recompute_activations(self.model, **blocks_to_recompute(config.activation_checkpointing))
            if config.compile_model:
                self.model.compile()  # in place: names of parameters stay as they are
            self.optimizer = make_optimizer(optimizer, self.model, config)
            train_weighting(self.optimizer, self.task)
            wrapped = wrap_data_parallel(
                self.model, self.optimizer, world, self.device, find_unused_parameters=unused
            )
        self.train_loader = self._loader(train_loader, training=True)
        warn_of_loader(train_loader, config, world)
        self.val_loader = self._loader(val_loader, training=False)
        self.accumulator = GradientAccumulator(self.optimizer, config.grad_accum_steps)
        check_data(self.task, self.train_loader, self.accumulator)
        self.precision = Precision(
            config.resolved_precision, self.device, loss_scale=config.loss_scale, summands=config.batch_size
        )
        updater = Updater(
            self.optimizer,
            clip_norm=config.gradient_clip_norm,
            clip_value=config.gradient_clip_value,
            precision=self.precision,
        )
        self.step = Step(
            wrapped,
            self.task,
            updater,
            self.precision,
            world=world,
            metrics=config.train_metrics,
            flops=ForwardFlops(self.model, self.task.outputs if isinstance(self.task, SeveralTasks) else None),
        )
        self._schedule = plan_schedule(scheduler, config)
        fixed = None if isinstance(scheduler, (TorchScheduler, PlannedSchedule, str, Mapping)) else scheduler
        self.learning_rate = LearningRate(self.optimizer, fixed)
        if train_loader is not None and (scheduler is not None or self.total_steps is None):
            self._follow_plan()  # what cannot be made is refused now
        listed = as_callbacks(callbacks)
        if isinstance(scheduler, TorchScheduler):
            listed.append(LRSchedule(scheduler, interval="step"))
        if curriculum is not None:
            loaders = (self.train_loader, self.val_loader)
            listed.insert(0, curriculum_callback(curriculum, self.task, *loaders, self.learning_rate))
        self.callbacks = CallbackList(listed)
        check_callbacks(self.callbacks, self.task, self.model)
        if self._schedule is not None or fixed is not None:
            check_rates(self.callbacks)
        self.output = Output(
            output_dir, overwrite=overwrite, resume=resume, world=world, checkpoint_dir=config.checkpoint_dir
        )
        self._display = ProgressDisplay() if progress and world.is_main else None
        if world.is_main:
            if self.output.folder is not None:
                self.callbacks.append(RunRecorder(self.output.folder))
            if self._display is not None:
                self.callbacks.append(self._display)
        self.state = TrainState(
            self.model,
            self.optimizer,
            self.precision,
            Clock(),
            Ledger(world),
            self.callbacks,
            world,
            config.seed,
            self.task,
        )
        self.meta = {**(meta or {}), **self.callbacks.facts()}
        if isinstance(self.task, SupervisedTask):
            self.meta |= self.task.facts()
        self._whole_config = whole_config
        self._resumed = False
        self._interrupts: Interrupts | None = None  # those of the training under way or last
        self._restored_from: Path | None = None
        self._restored_metrics: dict[str, float] = {}
        self._is_training = False
        if resume and self.output.has_checkpoints():
            assert self.output.path is not None
            self.load_checkpoint(self.output.path)

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
        if self.train_loader is None:
            raise ConfigError("there is nothing to train on: give the Trainer a train_loader")
        if num_epochs is not None:
            self.config = self.config.model_copy(update={"epochs": as_epochs(num_epochs)})
        self.callbacks.control.begin()
        config = self.config
        self._follow_plan()
        with (
            self.output.held(self.state.clock),
            on_device(self.device),
            self.state.random.running(),
            Interrupts(self._say) as interrupts,
            explain_worker_failure(),
            explain_single_sample(),
            explain_out_of_memory(
                batch_size=config.batch_size,
                grad_accum_steps=self.accumulator.steps_at(self.state.clock.epoch),
                precision=self.precision.name,
                device=self.device,
                can_recompute=config.activation_checkpointing is False and bool(repeated_blocks(self.model)),
            ),
        ):
            self._interrupts = interrupts
            loop = self._loop(interrupts)
            self.model.train()
            self._is_training = True
            try:
                self.callbacks.on_train_begin(self._info())
                self._try_validation(interrupts)
                result = loop.run()
                self.callbacks.on_train_end(result)
            except BaseException as error:
                self.callbacks.on_exception(error)
                raise
            finally:
                self._is_training = False
        # The loop has saved its end: if nothing is left to train, that is not saved again.
        saved = None if loop.saver is None else loop.saver.manager.root / folder_name(self.state.clock.step)
        self._resumed, self._restored_from, self._restored_metrics = True, saved, dict(result)
        return {**result, "interrupted": 1.0} if self.was_interrupted else dict(result)

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal, such as Ctrl-C, ended the last training early."""
        return self.callbacks.control.interrupted

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Return the mean loss and metrics over a loader (the validation loader by default)."""
        source = self.val_loader if loader is None else self._loader(loader, training=False)
        if source is None:
            raise ConfigError("there is nothing to evaluate on: give a loader")
        with on_device(self.device), explain_worker_failure(), self._explain_memory_in_validation():
            return evaluate(
                self.model,
                self.task,
                source,
                precision=self.precision,
                world=self.world,
                interrupts=self._interrupts,
            )

    def load_checkpoint(self, path: str | Path, *, keep_hyperparameters: bool = False) -> None:
        """Restore a checkpoint folder, or the newest intact checkpoint of a run folder; `train` goes on from it.

        `keep_hyperparameters` keeps learning rate, weight decay and so on as the optimizer has them now.
        """
        found = self.world.attempt(lambda: self.output.locate(Path(path)), here=self.world.is_main)
        path = Path(self.world.share_text(str(found)))  # all ranks load the same one
        mine = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        rates = [(one, one.base_rates) for one in self.callbacks if isinstance(one, LRSchedule)]
        checkpoint = self._read(path)
        metrics = checkpoint.metrics  # before anything changes: they may not be numbers
        self.state.restore(checkpoint)
        self.output.loaded(checkpoint.path)
        self._restored_from = checkpoint.path
        self._restored_metrics = metrics
        if keep_hyperparameters:
            for group, settings in zip(self.optimizer.param_groups, mine, strict=True):
                group.pop("initial_lr", None)  # that of the checkpoint
                group.update(settings)
            for schedule, base in rates:
                schedule.rebase(base)
        self._resumed = True

    def _read(self, path: Path) -> Checkpoint:
        """Read a checkpoint on every rank; raise CheckpointError if its facts contradict those of this run."""
        checkpoint = self.world.attempt(lambda: read_checkpoint(path))
        assert checkpoint is not None
        with explained(path, "meta"):
            self.check_facts(checkpoint)
        return checkpoint

    def check_facts(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if a checkpoint is of something else, such as another vocabulary."""
        if isinstance(self.task, SupervisedTask):
            self.task.check_facts(checkpoint.meta, checkpoint.path)
        self.callbacks.check_facts(checkpoint.meta, checkpoint.path)

    def save_checkpoint(self, metrics: Mapping[str, float] | None = None) -> Path | None:
        """Write a checkpoint of this moment into the run folder and return its path."""
        saver = self._saver()
        if saver is None:
            raise ConfigError("there is nowhere to save: give the Trainer an output_dir")
        with self.output.held(self.state.clock):
            return saver.save(metrics or {})

    # ------------------------------------------------------------------------------------------------ parts

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if the loader has no length and max_steps is not set."""
        return planned_steps(self.config, self._num_batches())

    @property
    def _steps_per_epoch(self) -> int | None:
        batches = self._num_batches()
        return None if batches is None else self.accumulator.num_steps(batches, range(1))

    def _follow_plan(self) -> None:
        """Give the schedule the length of the run."""
        if self._schedule is not None:
            self.learning_rate.schedule = self._schedule.for_plan(self.total_steps, self._steps_per_epoch)

    def _num_batches(self) -> int | None:
        return None if self.train_loader is None else num_batches(self.train_loader)

    def _loader(self, source: Any, *, training: bool) -> Loader | None:
        if source is None:
            return None
        try:
            source = as_tensors(source, self.model)
            return make_loader(source, self.config, self.device, self.world, training=training)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{'train_loader' if training else 'val_loader'}: {error}") from error

    def _saver(self, *, resumed: Mapping[str, float] | None = None) -> Saver | None:
        manager = self.output.manager(self.config.keep_best)
        if manager is None or not self.config.save_checkpoints:
            return None
        return Saver(manager, self.state, self.meta, resumed=resumed, config=self._config_text())

    def _config_text(self) -> str:
        from etude.config import dump_yaml, plain

        own = {"name": self.name, "training": plain(self.config)}
        return dump_yaml(dict(self._whole_config) if self._whole_config is not None else own)

    def _is_saved(self) -> bool:
        """Whether the state is, unchanged, that of a checkpoint in the run folder."""
        return self._restored_from is not None and self.output.holds(self._restored_from)

    def _try_validation(self, interrupts: Interrupts) -> None:
        if self.val_loader is not None and self.config.sanity_val_batches:
            check_validation(
                self.model,
                self.task,
                self.val_loader,
                self.config.sanity_val_batches,
                precision=self.precision,
                world=self.world,
                explain=self._explain_memory_in_validation(),
                interrupts=interrupts,
            )

    def _explain_memory_in_validation(self) -> AbstractContextManager[None]:
        size, precision = self.config.batch_size, self.precision.name
        return explain_out_of_memory_in_validation(batch_size=size, precision=precision, device=self.device)

    def _loop(self, interrupts: Interrupts) -> Loop:
        assert self.train_loader is not None
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
            self.train_loader,
            plan,
            learning_rate=self.learning_rate,
            accumulator=self.accumulator,
            callbacks=self.callbacks,
            validate=self.evaluate if self.val_loader is not None else None,
            saver=self._saver(resumed=self._restored_metrics if self._is_saved() else None),
            interrupts=interrupts,
        )
        loop.logs = dict(self._restored_metrics)  # the result if nothing is left to train
        return loop

    def _info(self) -> RunInfo:
        return RunInfo(
            name=self.name,
            model=self.model,
            optimizer=self.optimizer,
            clock=self.state.clock,
            device=self.device,
            total_epochs=self.config.num_epochs,
            total_steps=self.total_steps,
            steps_per_epoch=self._steps_per_epoch,
            run_dir=self.output.path,
            is_main=self.world.is_main,
            resumed=self._resumed,
        )

    def _say(self, sentence: str) -> None:
        if self._display is not None:
            self._display.note(sentence)
        elif self.world.is_main:
            logger.warning(sentence)
