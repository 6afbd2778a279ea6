"""Tasks that cannot be trained as they are written: one line that names the task."""

import math

import pytest
import torch
from three_tasks import NAN, make_batch, make_model, specs

from etude.core.errors import ConfigError, DataError, TrainingError
from etude.losses import ClassificationLoss, MultiLabelLoss
from etude.multimodal import MeaningfulLoss
from etude.multimodal.vocab import build_vocab_spec
from etude.multitask import MultiTask, TaskSpec
from etude.multitask.weighting import FAMO, GradNorm


def test_a_loss_of_several_terms_is_refused_when_its_labels_are_counted():
    vocab = build_vocab_spec(v_scalar=4)
    loss = MeaningfulLoss(vocab, {"scalar": torch.arange(4.0)})
    task = MultiTask({"value": TaskSpec("value", loss, labels="ids")})
    words = (
        "task 'value': its loss has the weighted terms loss_ce, loss_sca, but a task must have exactly one, 'loss'"
    )
    with pytest.raises(TrainingError, match=words):
        task.counts({"input": torch.zeros(2, 3), "ids": torch.tensor([[6, 7, 1], [2, 9, 3]])})


ONE_LINE = {
    "no tasks": (lambda: MultiTask({}), ConfigError, "at least one"),
    "slash": (lambda: MultiTask({"a/b": TaskSpec("kind")}), ConfigError, "'a/b' is not a valid task name"),
    "empty name": (lambda: MultiTask({"": TaskSpec("kind")}), ConfigError, "non-empty"),
    "negative": (
        lambda: MultiTask({"a": TaskSpec("kind", weight=-1.0)}),
        ConfigError,
        "task 'a' is -1.0; .* at least 0",
    ),
    "nan": (lambda: MultiTask({"a": TaskSpec("kind", weight=NAN)}), ConfigError, "task 'a' is nan; .*finite"),
    "infinite": (lambda: MultiTask({"a": TaskSpec("kind", weight=math.inf)}), ConfigError, "is inf; .*finite"),
    "variant's weight": (
        lambda: MultiTask({"a": TaskSpec("kind", variants={"b": TaskSpec("kind", weight=NAN)})}),
        ConfigError,
        "task 'a', variant 'b' is nan",
    ),
    "variants of variants": (
        lambda: MultiTask({"a": TaskSpec("k", variants={"b": TaskSpec("k", variants={"c": TaskSpec("k")})})}),
        ConfigError,
        "variant 'b' has variants itself",
    ),
    "unknown task": (
        lambda: MultiTask(specs()).activate({"knd": 1.0}),
        ConfigError,
        "'knd', which is not defined; did you mean 'kind'",
    ),
    "activate negative": (
        lambda: MultiTask(specs()).activate({"kind": -0.5}),
        ConfigError,
        "'kind' is -0.5; .*finite",
    ),
    "activate nan": (
        lambda: MultiTask(specs()).activate({"kind": NAN}),
        ConfigError,
        "'kind' is nan; .*finite",
    ),
    "unknown variant": (
        lambda: MultiTask(specs()).activate({"kind": 1.0}, {"kind": "simple"}),
        ConfigError,
        r"'kind' has no variant 'simple' \(there are: none\)",
    ),
    "variant of unknown task": (
        lambda: MultiTask(specs()).activate({"kind": 1.0}, {"kinds": "x"}),
        ConfigError,
        "did you mean 'kind'",
    ),
    "weighting of other tasks": (
        lambda: MultiTask(specs(), GradNorm(["kind", "flags"])),
        ConfigError,
        "the weighting has the tasks kind, flags, but there are kind, flags, belongs",
    ),
    "name of a weighting": (lambda: MultiTask(specs(), "pcgrad"), ConfigError, "found 'pcgrad'"),
    "weighting in another order": (
        lambda: MultiTask(specs(), FAMO(["flags", "kind", "belongs"])),
        ConfigError,
        "in the same order",
    ),
    "no stream": (
        lambda: MultiTask({"a": TaskSpec("kind", stream="s")})(make_model(), make_batch(), metrics=False),
        TrainingError,
        "'a' reads the stream 's', but batches do not name their stream",
    ),
    "no labels in the stream": (
        lambda: MultiTask({"a": TaskSpec("kind", stream="s", labels="kinds")})(
            make_model(), make_batch(stream="s"), metrics=False
        ),
        TrainingError,
        "'a' are 'kinds', which no batch of the stream 's' has; did you mean 'kind'",
    ),
    "labels of another shape": (
        lambda: MultiTask({"a": TaskSpec("flags", MultiLabelLoss(), labels="belongs")})(
            make_model(), make_batch(), metrics=False
        ),
        TrainingError,
        "^task 'a': binary labels of shape",
    ),
    "labels out of range": (
        lambda: MultiTask({"a": TaskSpec("belongs", ClassificationLoss(), labels="kind")})(
            make_model(), make_batch(seed=2, missing=0), metrics=False
        ),
        DataError,
        "^task 'a': labels out of range",
    ),
    "no such head": (
        lambda: MultiTask({"a": TaskSpec("knd", labels="kind")})(make_model(), make_batch(), metrics=False),
        TrainingError,
        "no head 'knd'; did you mean 'kind'",
    ),
    "metrics without labels": (
        lambda: measured(
            {"a": TaskSpec("kind", Unlabelled(), metrics={"f1": "f1"})}, {"input": make_batch()["input"]}
        ),
        TrainingError,
        "^task 'a': a metric needs a tensor of labels",
    ),
    "counts of a function": (
        lambda: MultiTask({"a": TaskSpec("size", lambda x, y: (x - y).abs().max(), labels="size")}).counts(
            {"size": 0}
        ),
        TrainingError,
        "^task 'a': the count of its loss depends on the model.*grad_accum_steps",
    ),
}


class Unlabelled(ClassificationLoss):
    def terms(self, output, batch, *, metrics):
        return super().terms(output, {"labels": torch.zeros(len(output), dtype=torch.int64)}, metrics=metrics)


def measured(tasks, batch):
    task = MultiTask(tasks)
    task._measuring = True
    task(make_model(), batch, metrics=True)


@pytest.mark.parametrize("name", ONE_LINE)
def test_mistakes_are_one_line(name):
    act, kind, words = ONE_LINE[name]
    with pytest.raises(kind, match=words) as caught:
        act()
    assert "\n" not in str(caught.value)
