"""Labels that are no classes are an error with the metric, the label and the range."""

import pytest
import torch

from etude.core import DataError
from etude.core.label_range import LabelRange
from metric_classes import LABELS, LOGITS, OF_CLASSES, with_label


@pytest.mark.parametrize("label", [4, -1])
@pytest.mark.parametrize("make", OF_CLASSES.values(), ids=OF_CLASSES)
def test_a_label_that_is_no_class(make, label):
    metric = make()
    with pytest.raises(DataError, match=rf"^{type(metric).__name__}: targets hold the class {label}, .*\(0 … 3\)"):
        metric.update(LOGITS, with_label(label))


@pytest.mark.parametrize("make", OF_CLASSES.values(), ids=OF_CLASSES)
def test_ignored_labels_are_no_error(make):
    some, all_ = make(), make()
    some.update(LOGITS, with_label(-100))
    all_.update(LOGITS[[0, 1, 2, 3, 5]], LABELS[[0, 1, 2, 3, 5]])
    torch.testing.assert_close(some.compute(), all_.compute())


def test_the_first_of_two_ends_that_is_out_of_range_is_named():
    labels = LabelRange()
    labels.add(torch.tensor([0.0, 1.0]), 0, 1, "found {found}")
    labels.add(torch.empty(0), 0, 1, "found {found}")
    with pytest.raises(DataError, match=r"^found -0\.5$"):
        labels.add(torch.tensor([-0.5, 3.0]), 0, 1, "found {found}")
    labels.check()  # on the host nothing is left to say
