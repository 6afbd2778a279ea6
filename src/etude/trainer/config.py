"""`TrainerConfig`: the `training` section of an experiment, and the configuration of a `Trainer` in Python."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from etude.config import SectionModel
from etude.config.registry import Section
from etude.core.by_epoch import ByEpoch
from etude.core.errors import ConfigError
from etude.core.monitor import DEFAULT_MONITOR, Best, Mode, mode_of
from etude.engine.capture import CaptureMode
from etude.engine.compiled import CompileMode
from etude.engine.loop import Plan
from etude.engine.step import GradientAccumulator

Positive = Annotated[float, Field(gt=0)]
LARGEST = 10**12
"""Upper limit of steps, epochs and samples; still exact as a float."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountFrom0 = Annotated[int, Field(ge=0, le=LARGEST)]

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
_PRECISIONS: dict[str, PrecisionName] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
}


def _switch(on: str, words: Any) -> BeforeValidator:
    """Return a validator that accepts true for `on` and false for "off", because YAML parses these as booleans."""
    named = {True: on, False: "off"}
    return BeforeValidator(
        lambda value: named[value] if isinstance(value, bool) else value, json_schema_input_type=words | bool
    )


class ActivationCheckpointing(SectionModel):
    """Which blocks of a model recompute their activations."""

    blocks: str | None = None
    """Pattern of module names; by default the repeated blocks of the model."""
    every: Count = 1
    """Recompute every n-th of them."""


class AverageSettings(SectionModel):
    """A moving average of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the average that stays at an update."""
    start: CountFrom0 = 0
    """Updates before the average begins; until then it is a copy of the weights."""
    every: Count = 1
    """Follow every n-th update."""
    validate_average: bool = Field(default=True, validation_alias=AliasChoices("validate", "validate_average"))
    """Validate the average and save it as the model; false: validate and save the raw weights as the model."""


class TrainerConfig(SectionModel):
    """How long to train, how often to log, validate and save, and on which device.

    >>> TrainerConfig(epochs=3, batch_size=32).num_epochs
    3
    """

    model_config = ConfigDict(validate_assignment=True, use_attribute_docstrings=True, validate_by_name=True)

    epochs: Count | None = Field(default=None, validation_alias=AliasChoices("epochs", "num_epochs"))
    """Epochs of the whole run (10 if neither this nor max_steps is given)."""
    max_steps: Count | None = None
    """Stop after this many optimizer steps, even inside an epoch."""
    batch_size: Count | dict[int, Count] | Literal["auto"] = 64
    """Samples per batch, over all processes together; {epoch: samples} is a schedule; auto: as many as fit."""
    micro_batch_size: Count | Literal["auto"] | None = None
    """Samples at once, over all processes: larger batches are divided, with the same result; auto: as many as fit."""
    on_out_of_memory: Literal["error", "split"] | None = None
    """If a step runs out of memory: error, or split to do it again in smaller parts; split if a size is auto."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial weights, data order, dropout and everything else."""
    log_interval: Count = Field(default=100, validation_alias=AliasChoices("log_interval", "log_every"))
    """Steps between log records; the host reads the device only then."""
    validate_interval: CountFrom0 = 1
    """Epochs between validations; with 0 only the one at the end remains."""
    sanity_val_batches: CountFrom0 = 2
    """Validation batches that are tried before the first step, to find errors early; 0 tries none."""
    validate_every_steps: Count | None = None
    """Also validate every n steps."""
    save_checkpoints: bool = True
    """Write checkpoints into the run folder."""
    checkpoint_dir: str | None = None
    """Folder of the checkpoints, `checkpoints` by default. A relative path is inside the run folder."""
    checkpoint_interval: CountFrom0 = 1
    """Epochs between checkpoints; with 0 only the one at the end remains."""
    save_every_steps: Count | None = None
    """Also save every n steps."""
    async_save: bool = False
    """Write checkpoints in the background: training waits only for a copy of the state in host memory."""
    keep_best: CountFrom0 = 3
    """Number of best checkpoints, by `monitor`, that are kept beside the last one."""
    trainable_only: bool | None = None
    """Checkpoints hold trained parameters: true leaves the frozen ones out, false saves all; null saves them once."""
    monitor: str | None = None
    """The metric by which the run is judged, such as val_f1, or loss without validation; val_loss by default."""
    mode: Mode | None = None
    """Whether the smallest (min) or the largest (max) value is the best; known for usual metrics."""
    restore_best: bool = False
    """At the end, load the weights of the best value of `monitor` into the model."""
    grad_accum_steps: Count | dict[int, Count] = Field(
        default=1,
        validation_alias=AliasChoices("grad_accum_steps", "gradient_accumulation_steps", "accumulation_steps"),
    )
    """Batches per optimizer step; a mapping {epoch: steps} gives a schedule that starts at epoch 0."""
    gradient_clip_norm: Positive | None = Field(
        default=1.0, validation_alias=AliasChoices("gradient_clip_norm", "grad_clip", "max_grad_norm")
    )
    """Clip the global gradient norm to this; null turns clipping off."""
    gradient_clip_value: Positive | None = None
    """Clip every gradient element to ± this."""
    precision: PrecisionName = "auto"
    """Precision of the forward pass; auto is bf16 on CUDA and fp32 on the CPU."""
    loss_scale: Positive = 65536.0
    """Initial loss scale for fp16."""
    compile: Annotated[CompileMode, _switch("step", CompileMode)] = Field(
        default="auto", validation_alias=AliasChoices("compile", "compile_model")
    )
    """torch.compile: of the step (true), of the model alone, or off; auto compiles the step of long runs on CUDA."""
    capture: Annotated[CaptureMode, _switch("on", CaptureMode)] = "auto"
    """Replay whole steps as CUDA graphs: auto where they can be and memory allows; on always, or it is an error."""
    activation_checkpointing: bool | str | ActivationCheckpointing = Field(
        default=False, validation_alias=AliasChoices("activation_checkpointing", "gradient_checkpointing")
    )
    """Recompute activations in the backward pass to save memory: true, a pattern of module names, or {every: 2}."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto uses CUDA if available."""
    deterministic: bool = False
    """Use only deterministic kernels, so that CUDA runs are reproducible bit for bit too."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of torch; results are reproducible bit for bit only with the same number."""
    train_metrics: bool | list[str] | None = None
    """Compute metrics on training batches too: all, none, or those named; by default what costs next to nothing."""
    max_skipped_steps: Count = 20
    """Stop with an error after this many consecutive non-finite updates."""
    drop_last: bool = False
    """Drop the last, smaller batch of an epoch."""
    find_unused_parameters: bool = False
    """With several processes: allow parameters that are unused in the loss of a step; slightly slower."""

    freeze: str | list[str] | None = None
    """Patterns of parameters, such as `backbone.*.bias`, or of modules, such as `backbone`, that are not trained."""
    unfreeze: dict[Count, str | list[str]] | None = None
    """Patterns of frozen parameters that are trained from an epoch on, counted from zero: {3: ["backbone.layer4"]}."""
    frozen_eval: bool = True
    """Modules whose parameters are all frozen by `freeze` are in eval mode: fixed batch norm statistics, no dropout."""
    ema: Annotated[float, Field(gt=0, lt=1)] | AverageSettings | None = None
    """Moving average of the weights, which is validated and saved: its decay, or {decay, start, every, validate}."""
    batch_transform: Annotated[Any, Section("batch_transform", frozenset({"num_classes"}))] | None = None
    """Changes training batches on their device: mixup, cutmix, mixup_cutmix or your own; see fine-tuning."""

    learning_rate: Positive | None = None
    """Learning rate, for configs that set it here instead of in optimizer.lr."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay, for configs that set it here instead of in optimizer.weight_decay."""
    warmup_steps: CountFrom0 | None = None
    """Without a scheduler section: linear warm-up over this many steps, then cosine decay to 10 %."""
    use_scheduler: bool | None = None
    """false disables the scheduler; true uses `scheduler_type`, or warmup_cosine."""
    scheduler_type: str | None = None
    """Name of the schedule, for configs that set it here instead of in scheduler.name."""
    use_mixed_precision: bool | None = None
    """true: `precision_dtype`, or bf16; false: fp32. The key `precision` replaces both."""
    precision_dtype: Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | None = None
    """Precision, unless use_mixed_precision is false."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Worker processes that load samples of a Dataset or decode images; not needed for tensors in memory."""
    pin_memory: bool = True
    """Page-locked host memory for asynchronous copies to CUDA."""
    persistent_workers: bool = False
    """Keep worker processes across epochs."""
    prefetch_factor: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Batches that each worker prefetches."""
    prefetch: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Batches of tensors or tokens that a thread prefetches, copies to CUDA included; 0 prepares them when needed."""
    meaningful_loss: dict[str, Any] | None = None
    """Settings of the loss `meaningful`, for models over tokens of several modalities."""

    @model_validator(mode="after")
    def _unfreeze_what_is_frozen(self) -> "TrainerConfig":
        if self.unfreeze and not self.freeze:
            raise ValueError("unfreeze is given, but nothing is frozen; list patterns of parameters under freeze")
        if not self.frozen_eval and not self.freeze:
            raise ValueError("frozen_eval is false, but nothing is frozen; list patterns of parameters under freeze")
        return self

    @field_validator("batch_size")
    @classmethod
    def _size_of_the_first_epoch(cls, value: Any) -> Any:
        if isinstance(value, dict):
            ByEpoch("batch_size", value)
        return value

    @property
    def first_batch_size(self) -> int | None:
        """`batch_size` of the first epoch; None if it is auto."""
        return None if self.batch_size == "auto" else ByEpoch("batch_size", self.batch_size).at(0)

    @property
    def implies_splitting(self) -> bool:
        """Whether a step that runs out of memory is split because a size is auto and nothing else is said."""
        return self.on_out_of_memory is None and "auto" in (self.batch_size, self.micro_batch_size)

    @field_validator("grad_accum_steps")
    @classmethod
    def _from_the_first_epoch(cls, value: int | dict[int, int]) -> int | dict[int, int]:
        GradientAccumulator(accumulation_steps=value)
        return value

    @model_validator(mode="after")
    def _judges(self) -> "TrainerConfig":
        self.judge()
        if self.restore_best and self.keep_best == 0:
            raise ValueError("restore_best needs a best checkpoint, but keep_best is 0; set keep_best to 1 or more")
        return self

    def plan(self) -> Plan:
        """Return how long the loop runs, and what it does how often."""
        return Plan(
            epochs=self.num_epochs,
            max_steps=self.max_steps,
            log_interval=self.log_interval,
            validate_interval=self.validate_interval,
            checkpoint_interval=self.checkpoint_interval,
            validate_every_steps=self.validate_every_steps,
            save_every_steps=self.save_every_steps,
            max_skipped_steps=self.max_skipped_steps,
        )

    def judge(self) -> Best:
        """Return the metric by which a run is judged, without values; raise ValueError if its mode is unknown."""
        name = DEFAULT_MONITOR if self.monitor is None else self.monitor
        try:
            return Best(name, mode_of(name, self.mode, f"monitor is {name}"))
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _one_precision(self) -> "TrainerConfig":
        if self.precision not in ("auto", self.resolved_precision):
            raise ValueError(
                f"precision is {self.precision}, but use_mixed_precision and precision_dtype say "
                f"{self.resolved_precision}; keep one of them"
            )
        return self

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return the settings among these that were given and differ from the default.

        >>> TrainerConfig(epochs=3, keep_best=3, seed=7).changed(("keep_best", "seed", "batch_size"))
        ['seed']
        """
        fields = type(self).model_fields
        return [one for one in names if one in self.model_fields_set and getattr(self, one) != fields[one].default]

    @property
    def num_epochs(self) -> int | None:
        """Epochs of the whole run; None if only max_steps ends it."""
        return 10 if self.epochs is None and self.max_steps is None else self.epochs

    @property
    def recomputed_blocks(self) -> dict[str, Any] | None:
        """`activation_checkpointing` as arguments of `recompute_activations`; None if disabled."""
        setting = self.activation_checkpointing
        if isinstance(setting, ActivationCheckpointing):
            return {"blocks": setting.blocks, "every": setting.every}
        return {"blocks": setting} if isinstance(setting, str) else {} if setting else None

    @property
    def resolved_precision(self) -> PrecisionName:
        """`precision`, combined with use_mixed_precision and precision_dtype."""
        if self.use_mixed_precision is None and self.precision_dtype is None:
            return self.precision
        if self.use_mixed_precision is False:
            return "fp32"
        return _PRECISIONS[self.precision_dtype or "bf16"]


TRAINING_ALIASES = {
    alias: name
    for name, field in TrainerConfig.model_fields.items()
    if isinstance(field.validation_alias, AliasChoices)
    for alias in map(str, field.validation_alias.choices)
    if alias != name
}
"""Other spellings of keys of the `training` section: {"log_every": "log_interval", …}."""
