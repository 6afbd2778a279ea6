"""Modules of the built-in components, so that a config imports only those it names."""

_HOMES = {
    "augmentation": {"data.catalog.augment": "color_jitter horizontal_flip random_crop vertical_flip"},
    "batch_transform": {"data.mixing": "cutmix mixup mixup_cutmix"},
    "callback": {
        "callbacks.csv_logger": "csv_logger",
        "callbacks.device_stats": "device_stats",
        "callbacks.early_stopping": "early_stopping",
        "callbacks.ema": "ema",
        "callbacks.freeze": "freeze",
        "callbacks.gradient_monitor": "gradient_monitor",
        "callbacks.learning_rate_monitor": "learning_rate_monitor",
        "callbacks.model_checkpoint": "model_checkpoint",
        "callbacks.nan_debugger": "nan_debugger",
        "callbacks.profiler": "profiler",
        "callbacks.sinks.mlflow": "mlflow",
        "callbacks.sinks.opentelemetry": "opentelemetry",
        "callbacks.sinks.prometheus": "prometheus",
        "callbacks.sinks.tensorboard": "tensorboard",
        "callbacks.sinks.trackio": "trackio",
        "callbacks.sinks.wandb": "wandb",
        "callbacks.text_samples": "text_samples",
        "multitask.gradient_monitor": "task_gradients",
    },
    "data": {
        "corpus.dataset": "text_corpus",
        "data.catalog.arrays": "arrays",
        "data.catalog.huggingface": "huggingface",
        "data.catalog.images": "image_folder",
        "data.catalog.mnist": "fashion_mnist mnist",
        "data.catalog.streams": "streams token_mixture",
        "data.catalog.tabular": "csv parquet",
        "data.catalog.texts": "jsonl",
        "data.catalog.tokens": "tokens",
    },
    "head": {"multitask.heads": "binary language_model linear sequence_classifier token_classifier"},
    "loss": {
        "losses.binary": "binary_cross_entropy multi_label",
        "losses.language": "language_modeling masked_language_modeling",
        "losses.own": "model",
        "losses.strategies": "cross_entropy segmentation text_classification vision_classification",
        "losses.wrapped": "huber l1 mse",
        "multimodal.loss.strategy": "meaningful",
    },
    "metric": {
        "metrics.accuracy": "accuracy",
        "metrics.adapters": "torchmetrics",
        "metrics.classification": "balanced_accuracy confusion_matrix f1 precision recall",
        "metrics.probabilities": "calibration_error perplexity",
        "metrics.ranking": "auroc average_precision",
        "metrics.regression": "mae mse r2 rmse spearman",
    },
    "model": {
        "models.huggingface": "huggingface huggingface_causal_lm huggingface_classifier",
        "models.lenet5": "lenet5",
        "models.mlp": "mlp",
        "models.text_classifier": "text_classifier",
        "models.transformer": "causal_transformer_lm transformer_lm",
    },
    "optimizer": {
        "optim.device": "adafactor lion",
        "optim.muon": "muon",
        "optim.optimizers": "adagrad adam adamw nadam radam rmsprop sgd",
        "optim.schedule_free": "schedule_free_adamw",
        "optim.several": "several",
        "optim.wrappers": "lookahead sam",
    },
    "pruner": {"sweep.search": "hyperband median none percentile successive_halving threshold"},
    "sampler": {"sweep.search": "cmaes gp grid random tpe"},
    "scheduler": {
        "callbacks.reduce_on_plateau": "plateau",
        "optim.cooldowns": "cooldown wsd",
        "optim.settings": "by_setting per_group",
        "optim.schedules": "constant cosine cosine_annealing cosine_restarts exponential inverse_sqrt linear multistep "
        "one_cycle polynomial product sequence sgdr step step_decay warmup warmup_cosine",
    },
    "weighting": {
        "multitask.weighting.losses": "dwa imtl_l static uncertainty",
        "multitask.weighting.steps": "famo gradnorm pcgrad",
        "multitask.weighting.torchjd_adapter": "aligned_mtl cagrad config cosmos dualproj excess_mtl fairgrad "
        "geometric_mean graddrop gradvac imtl_g krum mean mgda nash_mtl pbi pcd random stch trimmed_mean upgrad",
    },
}
MODULES = {
    kind: {name: module for module, names in homes.items() for name in names.split()}
    for kind, homes in _HOMES.items()
}
"""Kind → name → module, below `etude`."""
BY_PATH = {"optimizer": "optim.imported"}
"""Kind → module whose `find` returns a component by its dotted path (`torch.optim.Adamax`)."""
