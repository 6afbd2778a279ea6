"""Which loss is trained and validated: the model's own, one chosen on the first batch, another one for validation."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import BasicTrainingLoop, Trainer, TrainingLoop
from etude.core.errors import ConfigError, DataError, TrainingError

V = 11
IDS = torch.randint(0, V, (12, 9), generator=torch.Generator().manual_seed(0))
QUIET = {"epochs": 1, "batch_size": 4}


class NanoGPT(nn.Module):
    """Like nanoGPT: without targets only the logits of the last position."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)

    def forward(self, idx, targets=None):
        hidden = self.embed(idx)
        if targets is None:
            return self.head(hidden[:, [-1], :]), None
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)


def ragged():
    """Next tokens, of which some are ignored, in two micro-batches."""
    targets = IDS[:, 1:].clone()
    targets[:4, 2:] = -1
    return IDS[:, :-1], targets


def plain_step(model, inputs, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(inputs, targets)[1].backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("loss", [None, "model"])
def test_nanogpt_trains_unchanged_and_accumulates_like_one_batch(loss):
    inputs, targets = ragged()
    model = NanoGPT()
    expected = plain_step(NanoGPT(), inputs, targets)
    config = {**QUIET, "grad_accum_steps": 3, "gradient_clip_norm": None}
    batches = [(inputs[at : at + 4], targets[at : at + 4].contiguous()) for at in (0, 4, 8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    Trainer(model, batches, optimizer=optimizer, loss=loss, config=config, progress=False).train()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name])


def test_nanogpt_reads_token_batches():
    trainer = Trainer(NanoGPT(), [{"tokens": IDS}], [{"tokens": IDS}], config=QUIET, progress=False)
    expected = NanoGPT()(IDS[:, :-1], IDS[:, 1:].contiguous())[1].item()
    result = trainer.train()
    assert result["loss"] == pytest.approx(expected)
    assert result["val_loss"] < expected


def test_a_model_without_a_loss_is_reported():
    with pytest.raises(TrainingError, match="loss 'model'"):
        Trainer(nn.Linear(3, 2), (torch.randn(8, 3), torch.zeros(8)), loss="model", config=QUIET).train()


LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
SOFT = torch.softmax(torch.randn(6, 3, generator=torch.Generator().manual_seed(2)), 1)
HOT = torch.tensor([[1.0, 1, 0], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 0, 1]])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (SOFT, F.cross_entropy(LOGITS, SOFT)),
        (F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2])).float(), F.cross_entropy(LOGITS, torch.tensor([0, 1, 2] * 2))),
        (HOT, F.binary_cross_entropy_with_logits(LOGITS, HOT)),
        (HOT.long(), F.binary_cross_entropy_with_logits(LOGITS, HOT)),
        (HOT * 2, F.mse_loss(LOGITS, HOT * 2)),
        (torch.zeros(6, 3), F.mse_loss(LOGITS, torch.zeros(6, 3))),
    ],
)
def test_the_values_of_labels_decide(labels, expected):
    layer = nn.Linear(6, 3)
    with torch.no_grad():
        layer.weight.copy_(LOGITS.T)
        layer.bias.zero_()
    result = Trainer(layer, [(torch.eye(6), labels)], config={"epochs": 1}, progress=False).train()
    assert result["loss"] == pytest.approx(expected.item(), rel=1e-5)


class ClassWeights(nn.Module):
    """Its loss is a mean over weights of classes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels, torch.tensor([1.0, 9.0, 1.0]))}


@pytest.mark.parametrize("loss", [None, "model"])
def test_a_loss_that_is_no_mean_over_labels_is_not_called_one(capsys, loss):
    torch.manual_seed(0)
    data = [{"x": torch.randn(6, 4), "labels": torch.tensor([0, 0, 0, 0, 1, 0])}]
    Trainer(ClassWeights(), data, loss=loss, config=QUIET).train()
    assert "not a mean over labels" in capsys.readouterr().out


def batches(first, rest):
    return [(torch.randn(6, 4), first), (torch.randn(6, 4), rest)]


@pytest.mark.parametrize(
    ("first", "kind"),
    [(torch.zeros(6, 3), "multi_label"), (torch.zeros(6, 3).long(), "multi_label"), (torch.zeros(6, 3), "mse")],
)
def test_labels_that_are_all_zero_do_not_decide_between_numbers_and_several_labels(first, kind):
    rest = {"multi_label": HOT, "mse": HOT * 2}[kind].to(first.dtype)
    trainer = Trainer(nn.Linear(4, 3), batches(first, rest), config=QUIET, progress=False)
    trainer.train()
    assert trainer.task.decisions() == {"kind": kind}


def test_several_labels_are_not_trained_as_probabilities_of_classes():
    one_each = F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2])).float()
    with pytest.raises(DataError, match="multi_label"):
        Trainer(nn.Linear(4, 3), batches(one_each, HOT), config=QUIET, progress=False).train()


@pytest.mark.parametrize(
    ("model", "shape", "labels"), [(nn.Linear(4, 1), (8, 4), (8,)), (nn.Conv2d(3, 1, 1), (8, 3, 2, 2), (8, 2, 2))]
)
def test_one_output_is_no_class(model, shape, labels):
    data = torch.randn(shape), torch.zeros(labels, dtype=torch.long)
    with pytest.raises(TrainingError, match="binary_cross_entropy"):
        Trainer(model, data, config=QUIET, progress=False).train()


def test_inputs_that_are_reproduced_are_no_labels_of_classes():
    images = (torch.rand(8, 6) > 0.5).float()
    trainer = Trainer(nn.Linear(6, 6), (images, images), config=QUIET, progress=False)
    trainer.train()
    assert trainer.task.decisions()["kind"] == "mse"


def test_the_choice_is_shown_and_recorded(tmp_path, capsys):
    data = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    Trainer(nn.Linear(3, 2), data, config=QUIET, output_dir=tmp_path).train()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (found,) = [one["message"] for one in events if one["kind"] == "execution" and "loss" in one["message"]]
    assert "cross entropy" in found
    assert "(4,)" in found
    assert found in capsys.readouterr().out


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_with_the_models_own_loss_resumes_exactly(tmp_path, at):
    inputs, targets = ragged()
    data = inputs, targets.contiguous()
    runs = []
    for folder, stops in (("whole", [4]), ("parts", [at, 4])):
        for steps in stops:
            model = NanoGPT()
            config = {"max_steps": steps, "batch_size": 4, "save_every_steps": 1}
            trainer = Trainer(model, data, config=config, output_dir=tmp_path / folder, resume=True, progress=False)
            trainer.train()
        runs.append(model.state_dict())
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name])


def test_another_loss_for_validation():
    data = torch.randn(8, 3), torch.randn(8, 1)
    model = nn.Linear(3, 1)
    trainer = Trainer(model, data, data, loss="mse", val_loss=nn.L1Loss(), config=QUIET, progress=False)
    found = trainer.train()["val_loss"]
    expected = F.l1_loss(model(data[0]), data[1]).item()
    assert found == pytest.approx(expected)
    assert trainer.evaluate(data)["loss"] == pytest.approx(expected)
    loop = BasicTrainingLoop(model, loss="mse", val_loss="l1", config=QUIET, progress=False)
    found = loop.fit(data, data, epochs=1)["val_loss"]
    assert found == pytest.approx(F.l1_loss(model(data[0]), data[1]).item())


def test_another_loss_for_validation_of_an_epoch():
    data = torch.randn(8, 3), torch.randn(8, 1)
    model = nn.Linear(3, 1)
    loop = TrainingLoop(loss_strategy="mse", val_loss="l1")
    result = loop.train_epoch(model, data, torch.optim.SGD(model.parameters(), lr=0.1), val_dataloader=data)
    assert result.parts["val_loss"] == pytest.approx(F.l1_loss(model(data[0]), data[1]).item())
    with pytest.raises(ConfigError, match="val_loss"):
        loop.run_epoch(model, F.mse_loss, lambda: None, lambda: None, [data], None)


@pytest.mark.parametrize("validates", [True, False])
def test_a_validation_loss_without_validation_data_is_one_warning(validates, caplog):
    data = torch.randn(8, 3), torch.randn(8, 2)
    trainer = Trainer(
        nn.Linear(3, 2), data, data if validates else None, config=QUIET, loss="mse", val_loss="l1", progress=False
    )
    assert trainer.evaluate(data)["loss"] == pytest.approx(F.l1_loss(trainer.model(data[0]), data[1]).item())
    assert not caplog.records
    trainer.train()
    assert ["val_loss" in record.getMessage() for record in caplog.records] == [True] * (not validates)


class MeanOfSamples(nn.Module):
    """Its loss is the mean over samples of their own means over labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)

    def forward(self, ids, labels=None):
        logits = self.head(self.embed(ids))
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return {"logits": logits, "loss": (losses.sum(1) / (labels >= 0).sum(1)).mean()}


def test_batches_that_show_nothing_count_on_after_a_resume(tmp_path):
    """The fifth of them decides, whether or not the run was stopped before it."""

    def batch(rows, counted):
        ids = IDS[rows]
        return {"ids": ids, "labels": ids.where(torch.arange(9) < torch.tensor(counted)[:, None], -100)}

    data = [batch([place], [2 + place]) for place in range(6)] + [batch([7, 8], [2, 9]), batch([9, 10], [9, 8])]

    def trained(epochs, max_steps=None, folder=None):
        config = {"epochs": epochs, "max_steps": max_steps, "grad_accum_steps": 2, "learning_rate": 0.1}
        made = Trainer(
            MeanOfSamples(), data, loss="model", config=config, output_dir=folder, resume=True, progress=False
        )
        made.train()
        return made.model.state_dict()

    straight = trained(1, folder=tmp_path / "straight")
    trained(1, 2, tmp_path / "run")
    resumed = trained(1, folder=tmp_path / "run")
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
