"""Metrics of torchmetrics whose state is a list and whose result is a mapping, as those of detection, on any ranks."""

import copy
import threading

import pytest
import torch
import torchmetrics

from etude.core.errors import ConfigError
from etude.distributed import World
from etude.metrics.metric_set import MetricSet

CPU = torch.device("cpu")


class Boxes(torchmetrics.Metric):
    """Like metrics of detection: lists of mappings in, a mapping of values out; two lists that belong together."""

    def __init__(self, extended: bool = False):
        super().__init__()
        self.extended = extended
        self.add_state("scores", default=[], dist_reduce_fx=None)
        self.add_state("labels", default=[], dist_reduce_fx=None)
        self.add_state("masks", default=[], dist_reduce_fx=None)

    def update(self, predictions, targets):
        self.scores += [one["scores"] for one in predictions]
        self.labels += [one["labels"] for one in targets]
        self.masks += [((2, 3), bytes([200, len(one["labels"])])) for one in targets]

    def compute(self):
        pairs = [(score.sum(), label) for score, label in zip(self.scores, self.labels, strict=True)]
        classes = torch.cat(self.labels).unique()
        assert [mask[1][1] for mask in self.masks] == [len(one) for one in self.labels]
        per_class = torch.stack([sum(score for score, label in pairs if one in label) for one in classes])
        more = {"ious": {}} if self.extended else {}
        return {
            "map": torch.cat(self.scores).mean(),
            "mar_per_class": torch.tensor(-1.0),
            "map_per_class": per_class.squeeze(),
            "classes": classes.squeeze(),
            **more,
        }


IMAGES = [
    ({"scores": torch.tensor(scores)}, {"labels": torch.tensor(labels)})
    for scores, labels in [([0.5, 0.25], [2, 5]), ([], [5]), ([0.75], [2]), ([0.125], [7])]
]
EXPECTED = {"map": 0.40625, "map_class2": 1.5, "map_class5": 0.75, "map_class7": 0.125}


def updated(images, metrics=None, training=False):
    found = MetricSet.of(metrics or [Boxes()], training)
    for prediction, target in images:
        found.update([prediction], [target], training=training)
    return found


def test_values_are_reported_by_their_keys_and_classes_by_their_labels():
    assert updated(IMAGES).results(World(), CPU, training=False) == EXPECTED
    one_class = updated(IMAGES[3:]).results(World(), CPU, training=False)
    assert one_class == {"map": 0.125, "map_class7": 0.125}


def test_metrics_with_names_of_their_own_keep_their_values_apart():
    found = updated(IMAGES, {"near": Boxes(), "far": Boxes()}).results(World(), CPU, training=False)
    assert found == {f"{name}_{key}": value for name in ("near", "far") for key, value in EXPECTED.items()}
    collection = torchmetrics.MetricCollection({"near": Boxes()}, compute_groups=False)
    assert "near_map" in updated(IMAGES, collection).results(World(), CPU, training=False)


def test_two_metrics_that_report_the_same_name_are_refused():
    with pytest.raises(ConfigError, match="'map'"):
        updated(IMAGES, [Boxes(), lambda_named("map")]).results(World(), CPU, training=False)


def lambda_named(name):
    def function(predictions, labels):
        return torch.zeros(2)

    function.__name__ = name
    return function


def test_a_value_that_is_no_number_is_refused_with_its_name():
    with pytest.raises(ConfigError, match=r"ious.*extended_summary"):
        updated(IMAGES, [Boxes(extended=True)]).results(World(), CPU, training=False)


class Rank(World):
    """A rank that is a thread; `slots` has what each of them passes."""

    def gather_bytes(self, tensor):
        self.slots[self.rank] = tensor
        self.barrier.wait(30)
        found = list(self.slots)
        self.barrier.wait(30)
        return found

    def host_max(self, values):
        found = self.gather_bytes(torch.tensor(values))
        return torch.stack(found).amax(0).tolist()


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_ranks_with_different_numbers_of_images_and_images_without_boxes(cut, monkeypatch):
    for name, value in (("slots", [None, None]), ("barrier", threading.Barrier(2))):
        monkeypatch.setattr(Rank, name, value, raising=False)
    results = [None, None]

    def run(rank, images):
        results[rank] = updated(images).results(Rank(rank=rank, size=2), CPU, training=False)

    threads = [
        threading.Thread(target=run, args=(0, IMAGES[:cut])),
        threading.Thread(target=run, args=(1, IMAGES[cut:])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [EXPECTED, EXPECTED]


def test_a_checkpoint_holds_lists_and_masks():
    before, after = updated(IMAGES[:2], training=True), MetricSet.of([Boxes()], True)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for prediction, target in IMAGES[2:]:
        after.update([prediction], [target], training=True)
    assert after.results(World(), CPU, training=True) == EXPECTED


def test_mean_average_precision_equals_its_own(monkeypatch):
    detection = pytest.importorskip("torchmetrics.detection")
    if not hasattr(detection, "MeanAveragePrecision"):
        pytest.skip("torchvision or pycocotools is missing")
    boxes = torch.tensor([[0.0, 0.0, 40.0, 40.0], [50.0, 50.0, 90.0, 99.0]])
    predictions = [
        {"boxes": boxes + 2, "scores": torch.tensor([0.9, 0.4]), "labels": torch.tensor([1, 4])},
        {"boxes": boxes[:0], "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 4])}, {"boxes": boxes[:1], "labels": torch.tensor([4])}]
    metric = detection.MeanAveragePrecision(class_metrics=True)
    metric.update(predictions, targets)
    expected = metric.compute()
    ours = {"name": "torchmetrics", "metric": "detection.MeanAveragePrecision", "arguments": {"class_metrics": True}}
    metrics = MetricSet.of([ours])
    metrics.update(predictions, targets, training=False)
    found = metrics.results(World(), CPU, training=False)
    assert found["map"] == float(expected["map"])
    assert [found["map_class1"], found["map_class4"]] == expected["map_per_class"].tolist()
