"""Metrics of classes, whose labels must be classes, and labels of which one is none."""

import torch

from etude.metrics import AUROC, F1, Accuracy, AveragePrecision, CalibrationError, ConfusionMatrix, Perplexity

CLASSES = 4
LOGITS = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
OF_CLASSES = {
    "perplexity": Perplexity,
    "auroc": AUROC,
    "average precision": lambda: AveragePrecision(num_classes=CLASSES),
    "calibration": CalibrationError,
    "accuracy": Accuracy,
    "top 2": lambda: Accuracy(top_k=2),
    "f1": F1,
    "matrix": lambda: ConfusionMatrix(num_classes=CLASSES),
}


def with_label(label):
    return LABELS.clone().index_fill_(0, torch.tensor([4]), label)
