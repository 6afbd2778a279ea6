"""Etude: exact, fast and clear training for PyTorch.

Names are loaded on first use, so that `import etude` and `etude --help` stay fast.
"""

from typing import TYPE_CHECKING, Any

from etude.lazy import drop_missing, load_late, package_version

if TYPE_CHECKING:
    from etude.callbacks import (
        CSVLogger,
        DeviceStats as DeviceStats,
        EarlyStopping,
        GradientMonitor,
        LearningRateMonitor as LearningRateMonitor,
        LRSchedule as LRSchedule,
        MLflowLogger as MLflowLogger,
        ModelCheckpoint,
        NaNDebugger as NaNDebugger,
        OpenTelemetryLogger as OpenTelemetryLogger,
        Profiler as Profiler,
        ProgressDisplay as ProgressDisplay,
        PrometheusExporter as PrometheusExporter,
        Telemetry as Telemetry,
        TensorBoardLogger as TensorBoardLogger,
        TrackioLogger as TrackioLogger,
        WandbLogger as WandbLogger,
    )
    from etude.checkpoint import CheckpointManager as CheckpointManager
    from etude.config import register
    from etude.core import (
        Batch as Batch,
        Clock as Clock,
        Control as Control,
        DataBatch as DataBatch,
        EtudeError,
        LossTerm,
        StepReport as StepReport,
        Task,
    )
    from etude.core.deferred import deferred_weights as deferred_weights
    from etude.core.random import set_seed
    from etude.data import (
        BatchSampler as BatchSampler,
        DataLoader,
        DataLoaderFactory as DataLoaderFactory,
        DataSplits,
        TensorData,
        TokenBlocks as TokenBlocks,
        collate as collate,
        prefetch_stream as prefetch_stream,
        read_dataset as read_dataset,
    )
    from etude.engine.alternating import AlternatingTask as AlternatingTask
    from etude.engine.callback import Callback
    from etude.engine.callback_list import CallbackList as CallbackList
    from etude.engine.step import GradientAccumulator as GradientAccumulator
    from etude.experiment import (
        create_model_config as create_model_config,
        create_trainer_config as create_trainer_config,
        find_lr,
        load_config as load_config,
        load_experiment_config,
        load_model,
        resume_run,
        train_experiment,
    )
    from etude.losses import (
        LanguageModelingLoss,
        LossStrategy as LossStrategy,
        SegmentationLoss as SegmentationLoss,
        TextClassificationLoss as TextClassificationLoss,
        VisionClassificationLoss as VisionClassificationLoss,
        binary_cross_entropy as binary_cross_entropy,
        cross_entropy as cross_entropy,
        cross_entropy_loss as cross_entropy_loss,
        multi_label_bce as multi_label_bce,
    )
    from etude.metrics import (
        F1,
        Accuracy,
        ConfusionMatrix as ConfusionMatrix,
        LossTracker as LossTracker,
        Precision as Precision,
        Recall as Recall,
        TrainingMetrics as TrainingMetrics,
    )
    from etude.models import MLP as MLP, CausalTransformerLM, LeNet5
    from etude.monitor import Monitor as Monitor
    from etude.multimodal.codebooks import load_codebook as load_codebook, load_npz_key as load_npz_key
    from etude.multimodal.loss import MeaningfulLoss, combined_loss as combined_loss
    from etude.multimodal.tokenizers.scalar import ScalarTokenizer as ScalarTokenizer
    from etude.multimodal.tokenizers.vector import VectorTokenizer as VectorTokenizer
    from etude.multimodal.vocab import VocabSpec as VocabSpec, build_vocab_spec as build_vocab_spec
    from etude.multitask.curriculum.defaults import active_tasks as active_tasks, loss_weights as loss_weights
    from etude.multitask.curriculum.phase import Phase
    from etude.multitask.functional import (
        default_weights as default_weights,
        multi_task_loss as multi_task_loss,
    )
    from etude.multitask.model import MultiTaskModel
    from etude.multitask.spec import TaskSpec
    from etude.multitask.task import MultiTask
    from etude.optim import (
        SGD as SGD,
        Adam as Adam,
        AdamW,
        CosineAnnealingLR as CosineAnnealingLR,
        RMSprop as RMSprop,
        cosine_schedule_with_warmup as cosine_schedule_with_warmup,
    )
    from etude.trainer import (
        BasicTrainingLoop,
        EpochResult as EpochResult,
        Trainer,
        TrainerConfig,
        TrainingLoop,
        ValidationLoop,
        configure_cuda_performance as configure_cuda_performance,
        predict as predict,
        training_step as training_step,
    )

__all__ = [
    "F1",
    "Accuracy",
    "AdamW",
    "BasicTrainingLoop",
    "CSVLogger",
    "Callback",
    "CausalTransformerLM",
    "DataLoader",
    "DataSplits",
    "EarlyStopping",
    "EtudeError",
    "GradientMonitor",
    "LanguageModelingLoss",
    "LeNet5",
    "LossTerm",
    "MeaningfulLoss",
    "ModelCheckpoint",
    "MultiTask",
    "MultiTaskModel",
    "Phase",
    "Task",
    "TaskSpec",
    "TensorData",
    "Trainer",
    "TrainerConfig",
    "TrainingLoop",
    "ValidationLoop",
    "find_lr",
    "load_experiment_config",
    "load_model",
    "register",
    "resume_run",
    "set_seed",
    "train_experiment",
]
"""The names most programs need. Everything imported above can be imported from here too."""

drop_missing(__all__, __file__, ("multimodal", "multitask"))
_load = load_late(__name__, __file__)


def __getattr__(name: str) -> Any:
    return package_version() if name == "__version__" else _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
