"""Etude: exact, fast and clear training for PyTorch.

Names are loaded when they are first used, so that `import etude` and `etude --help` stay quick.
"""

from typing import TYPE_CHECKING, Any

from etude.lazy import drop_missing, load_late

if TYPE_CHECKING:
    from etude.callbacks import (
        CSVLogger,
        EarlyStopping,
        GradientMonitor,
        LRSchedule,
        ModelCheckpoint,
        ProgressDisplay,
    )
    from etude.checkpoint import CheckpointManager
    from etude.config import register
    from etude.core import Batch, Clock, Control, DataBatch, EtudeError, LossTerm, StepReport, Task
    from etude.core.random import set_seed
    from etude.data import (
        BatchSampler,
        DataLoader,
        DataLoaderFactory,
        TokenBlocks,
        collate,
        prefetch_stream,
        read_dataset,
    )
    from etude.engine.callback import Callback, CallbackList
    from etude.engine.step import GradientAccumulator
    from etude.experiment import (
        create_model_config,
        create_trainer_config,
        load_config,
        load_experiment_config,
        resume_run,
        train_experiment,
    )
    from etude.losses import (
        LanguageModelingLoss,
        LossStrategy,
        SegmentationLoss,
        TextClassificationLoss,
        VisionClassificationLoss,
        binary_cross_entropy,
        cross_entropy,
        multi_label_bce,
    )
    from etude.metrics import F1, Accuracy, ConfusionMatrix, LossTracker, Precision, Recall, TrainingMetrics
    from etude.models import MLP, CausalTransformerLM, LeNet5
    from etude.multimodal.codebooks.loading import load_codebook, load_npz_key
    from etude.multimodal.loss import MeaningfulLoss, combined_loss
    from etude.multimodal.tokenizers.scalar import ScalarTokenizer
    from etude.multimodal.tokenizers.vector import VectorTokenizer
    from etude.multimodal.vocab import VocabSpec, build_vocab_spec
    from etude.multitask.functional import default_weights, multi_task_loss
    from etude.multitask.model import MultiTaskModel
    from etude.trainer import (
        BasicTrainingLoop,
        EpochResult,
        Trainer,
        TrainerConfig,
        TrainingLoop,
        ValidationLoop,
        configure_cuda_performance,
        training_step,
    )

__all__ = [
    "F1",
    "MLP",
    "Accuracy",
    "BasicTrainingLoop",
    "Batch",
    "BatchSampler",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "CausalTransformerLM",
    "CheckpointManager",
    "Clock",
    "ConfusionMatrix",
    "Control",
    "DataBatch",
    "DataLoader",
    "DataLoaderFactory",
    "EarlyStopping",
    "EpochResult",
    "EtudeError",
    "GradientAccumulator",
    "GradientMonitor",
    "LRSchedule",
    "LanguageModelingLoss",
    "LeNet5",
    "LossStrategy",
    "LossTerm",
    "LossTracker",
    "MeaningfulLoss",
    "ModelCheckpoint",
    "MultiTaskModel",
    "Precision",
    "ProgressDisplay",
    "Recall",
    "ScalarTokenizer",
    "SegmentationLoss",
    "StepReport",
    "Task",
    "TextClassificationLoss",
    "TokenBlocks",
    "Trainer",
    "TrainerConfig",
    "TrainingLoop",
    "TrainingMetrics",
    "ValidationLoop",
    "VectorTokenizer",
    "VisionClassificationLoss",
    "VocabSpec",
    "binary_cross_entropy",
    "build_vocab_spec",
    "collate",
    "combined_loss",
    "configure_cuda_performance",
    "create_model_config",
    "create_trainer_config",
    "cross_entropy",
    "default_weights",
    "load_codebook",
    "load_config",
    "load_experiment_config",
    "load_npz_key",
    "multi_label_bce",
    "multi_task_loss",
    "prefetch_stream",
    "read_dataset",
    "register",
    "resume_run",
    "set_seed",
    "train_experiment",
    "training_step",
]

drop_missing(__all__, __file__, ("multimodal", "multitask"))
_load = load_late(__name__, __file__)


def __getattr__(name: str) -> Any:
    return _version() if name == "__version__" else _load(name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("etude")
    except PackageNotFoundError:  # run from the source folder, not installed
        return "0+source"


def __dir__() -> list[str]:
    return sorted(__all__)
