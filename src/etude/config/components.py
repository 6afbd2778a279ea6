"""Where our own components are, so that a config imports only what it names: kind → name → module, below `etude`."""

MODULES: dict[str, dict[str, str]] = {
    "augmentation": dict.fromkeys(
        ("color_jitter", "horizontal_flip", "random_crop", "vertical_flip"), "data.catalog.augment"
    ),
    "callback": {
        "csv_logger": "callbacks.csv_logger",
        "early_stopping": "callbacks.early_stopping",
        "find_nonfinite": "callbacks.find_nonfinite",
        "gradient_monitor": "callbacks.gradient_monitor",
        "model_checkpoint": "callbacks.model_checkpoint",
        "task_gradients": "multitask.gradient_monitor",
        "text_samples": "callbacks.text_samples",
    },
    "data": {
        "arrays": "data.catalog.arrays",
        "huggingface": "data.catalog.huggingface",
        "image_folder": "data.catalog.images",
        "jsonl": "data.catalog.texts",
        **dict.fromkeys(("csv", "parquet"), "data.catalog.tabular"),
        **dict.fromkeys(("fashion_mnist", "mnist"), "data.catalog.mnist"),
        "text_corpus": "corpus.dataset",
        **dict.fromkeys(("streams", "token_mixture"), "data.catalog.streams"),
        "tokens": "data.catalog.tokens",
    },
    "head": dict.fromkeys(
        ("binary", "language_model", "linear", "sequence_classifier", "token_classifier"), "multitask.heads"
    ),
    "loss": {
        **dict.fromkeys(("binary_cross_entropy", "multi_label"), "losses.binary"),
        **dict.fromkeys(("language_modeling", "masked_language_modeling"), "losses.language"),
        **dict.fromkeys(
            ("cross_entropy", "segmentation", "text_classification", "vision_classification"), "losses.strategies"
        ),
        **dict.fromkeys(("huber", "l1", "mse"), "losses.wrapped"),
        "meaningful": "multimodal.loss.strategy",
    },
    "metric": {
        "accuracy": "metrics.accuracy",
        **dict.fromkeys(("f1", "precision", "recall"), "metrics.classification"),
    },
    "model": {
        **dict.fromkeys(("huggingface", "huggingface_causal_lm"), "models.huggingface"),
        "lenet5": "models.lenet5",
        "mlp": "models.mlp",
        "text_classifier": "models.text_classifier",
        **dict.fromkeys(("causal_transformer_lm", "transformer_lm"), "models.transformer"),
    },
    "optimizer": dict.fromkeys(("adam", "adamw", "rmsprop", "sgd"), "optim.optimizers"),
    "scheduler": dict.fromkeys(
        (
            *("constant", "cosine", "cosine_annealing", "cosine_restarts", "exponential", "inverse_sqrt", "linear"),
            *("multistep", "one_cycle", "polynomial", "product", "sequence", "sgdr", "step", "step_decay", "warmup"),
            "warmup_cosine",
        ),
        "optim.schedules",
    ),
    "weighting": {
        **dict.fromkeys(("dwa", "imtl_l", "static", "uncertainty"), "multitask.weighting.losses"),
        **dict.fromkeys(("famo", "gradnorm", "pcgrad"), "multitask.weighting.steps"),
        **dict.fromkeys(
            (
                *("aligned_mtl", "cagrad", "config", "cosmos", "dualproj", "excess_mtl", "fairgrad"),
                *("geometric_mean", "graddrop", "gradvac", "imtl_g", "krum", "mean", "mgda", "nash_mtl"),
                *("pbi", "pcd", "random", "stch", "trimmed_mean", "upgrad"),
            ),
            "multitask.weighting.torchjd_adapter",
        ),
    },
}
