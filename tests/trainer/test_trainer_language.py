"""Language models: Hugging Face's train unchanged, and every run reports perplexity, tokens/s, MFU and waiting."""

import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import (
    BasicTrainingLoop,
    Callback,
    EpochResult,
    LanguageModelingLoss,
    Trainer,
    TrainingLoop,
    ValidationLoop,
)
from etude.callbacks import ProgressDisplay
from etude.core import LossTerm
from etude.metrics import LossTracker
from run_files import records

VOCABULARY, LENGTH, STRIDE = 64, 16, 3


def sequences(count: int) -> torch.Tensor:
    """Return sequences that count in threes from anywhere: every token follows from the one before it."""
    start = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    return (start + STRIDE * torch.arange(LENGTH)) % VOCABULARY


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


class Small(nn.Module):
    """A language model that sees one token; enough where the model does not matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def inputs_only(ids):
    return {"input_ids": ids}


def labels_repeat(ids):
    return {"input_ids": ids, "labels": ids.clone()}


def next_tokens(ids):
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def batches(form, count=16, rows=8):
    """Return a loader of torch's: what somebody who comes from elsewhere brings."""
    data = form(sequences(count * rows))
    rows_of = [{name: value[place] for name, value in data.items()} for place in range(count * rows)]
    return torch.utils.data.DataLoader(rows_of, batch_size=rows)


class Records(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.logs, self.epochs = [], []

    def on_log(self, record):
        self.logs.append(dict(record))

    def on_epoch_end(self, epoch, logs):
        self.epochs.append(dict(logs))


@pytest.mark.parametrize(
    ("make", "form", "steps"),
    [(gpt2, labels_repeat, 200), (gpt2, inputs_only, 80), (gpt2, next_tokens, 80), (llama, labels_repeat, 80)],
)
def test_a_hugging_face_model_learns_to_count(make, form, steps):
    model, records = make(), Records()
    trainer = Trainer(
        model,
        batches(form, 16, 8),
        config={"max_steps": steps, "log_interval": steps // 4, "learning_rate": 1e-2, "device": "cpu"},
        callbacks=[records],
        progress=False,
    )
    result = trainer.train()
    assert [record["step"] for record in records.logs] == [part * steps // 4 for part in (1, 2, 3, 4)]
    assert records.logs[0]["loss"] > 5 * records.logs[-1]["loss"]
    assert records.logs[-1]["loss"] < 0.1 * math.log(VOCABULARY)
    ids = sequences(4)
    predicted = model.eval()(ids).logits.argmax(-1)
    assert (predicted == (ids + STRIDE) % VOCABULARY).float().mean() > 0.95  # the next token, not the one it sees
    seen = LENGTH - (form is next_tokens)
    for record in (*records.logs, result):
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        assert record["tokens_per_s"] == pytest.approx(record["samples_per_s"] * seen)
        assert 0 < record["mfu"] < 2
        assert 0 <= record["data_wait"] < 1
    assert [record["tokens"] for record in records.logs] == [record["step"] * 8 * seen for record in records.logs]


def test_a_resumed_run_has_the_same_records(tmp_path):
    """Tokens of padded batches are counted on the device; their total goes on where it stopped."""

    def padded(ids):
        mask = torch.arange(LENGTH) < torch.arange(1, len(ids) + 1)[:, None] % LENGTH + 1
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids}

    def train(folder, max_steps):
        config = {"max_steps": max_steps, "log_interval": 3, "seed": 1, "device": "cpu"}
        loader = batches(padded, 8, 4)
        trainer = Trainer(Small(), loader, loader, config=config, output_dir=folder, progress=False)
        if (folder / "checkpoints" / "last").exists():
            trainer.load_checkpoint(folder)
        trainer.train()

    train(tmp_path / "straight", 16)
    for steps in (4, 5, 16):
        train(tmp_path / "resumed", steps)
    straight, resumed = (
        {(one["step"], one["split"]): one for one in records(tmp_path / name, "train")}
        for name in ("straight", "resumed")
    )
    assert straight == resumed
    real = [int(row["attention_mask"].sum()) for row in batches(padded, 8, 4).dataset]
    assert straight[15, "train"]["tokens"] == sum(real) + sum(real[: 7 * 4])
    assert all(type(record["tokens"]) is int for record in straight.values())


def test_validation_has_a_perplexity_and_label_smoothing_leaves_it_alone():
    model, loader = Small(), batches(labels_repeat)
    plain = Trainer(model, loss=LanguageModelingLoss(), progress=False).evaluate(loader)
    assert plain["perplexity"] == pytest.approx(math.exp(plain["loss"]))
    smoothed = Trainer(model, loss=LanguageModelingLoss(label_smoothing=0.2), progress=False).evaluate(loader)
    assert smoothed["loss"] != pytest.approx(plain["loss"], rel=1e-3)
    assert smoothed["perplexity"] == pytest.approx(plain["perplexity"])


def test_a_loss_beyond_all_numbers_has_an_infinite_perplexity():
    model = Small()
    with torch.no_grad():
        model.head.bias[0] = 1e5
    result = Trainer(model, progress=False).evaluate(batches(labels_repeat))
    assert result["perplexity"] == math.inf


def test_epoch_results_carry_the_numbers():
    loop = TrainingLoop(loss_strategy=LanguageModelingLoss())
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    records = Records()
    loop.callbacks = (records,)
    for epoch in range(2):
        trained = loop.train_epoch(model, batches(inputs_only), optimizer, epoch=epoch)
    assert trained.num_tokens == 16 * 8 * LENGTH
    assert [logs["tokens"] for logs in records.epochs] == [trained.num_tokens, 2 * trained.num_tokens]
    assert trained.tokens_per_s == pytest.approx(trained.num_tokens / trained.duration_s)
    assert trained.mfu > 0
    assert 0 <= trained.data_wait < 1
    assert trained.perplexity == pytest.approx(math.exp(trained.loss))
    assert EpochResult.from_dict(json.loads(json.dumps(trained.to_dict()))) == trained
    assert trained.to_dict()["tokens_per_s"] == trained.tokens_per_s
    validated = ValidationLoop(LanguageModelingLoss()).validate_epoch(model, batches(inputs_only, 3))
    assert validated.num_tokens == 3 * 8 * LENGTH
    assert (validated.mfu, validated.data_wait) == (None, None)


def test_an_epoch_result_takes_perplexity_from_the_cross_entropy():
    assert EpochResult(0, 2.0, 1.0, 1).perplexity is None
    assert EpochResult(0, 2.0, 1.0, 1, nll=1.0).perplexity == pytest.approx(math.e)
    assert EpochResult(0, 2.0, 1.0, 1).tokens_per_s is None
    assert EpochResult.from_dict({"epoch": 0, "loss": 2.0, "duration_s": 1.0, "num_samples": 1}).num_tokens == 0


def test_metrics_of_a_users_own_leave_the_perplexity_in():
    tracker = LossTracker()
    loop = BasicTrainingLoop(
        Small(), metrics=[tracker], loss=LanguageModelingLoss(), config={"device": "cpu"}, progress=False
    )
    assert loop.fit(batches(inputs_only), epochs=1)["perplexity"] > 1
    assert tracker.compute() > 0


def test_metrics_of_a_users_own_leave_the_output_layer_to_the_loss(monkeypatch):
    model, run = Small(), []
    plain = nn.Linear.forward

    def watched(layer, hidden):
        run.append(layer)
        return plain(layer, hidden)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    loss = LanguageModelingLoss(fused_head="head")
    BasicTrainingLoop(model, metrics=[LossTracker()], loss=loss, config={"device": "cpu"}, progress=False).fit(
        batches(inputs_only), epochs=1
    )
    assert not any(layer is model.head for layer in run)


def test_other_models_have_none_of_these_numbers():
    records = Records()
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    trainer = Trainer(
        nn.Linear(4, 3), data, config={"epochs": 1, "log_interval": 1}, callbacks=[records], progress=False
    )
    trainer.train()
    assert all(not {"tokens", "tokens_per_s", "mfu", "perplexity"} & record.keys() for record in records.logs)
    assert all("data_wait" in record for record in (*records.logs, *records.epochs))


def test_lines_of_a_language_run_are_short_and_say_what_matters():
    stream = io.StringIO()
    loader = batches(labels_repeat)
    trainer = Trainer(
        Small(),
        loader,
        loader,
        config={"epochs": 2, "log_interval": 8, "device": "cpu"},
        callbacks=[ProgressDisplay(stream=stream)],
        progress=False,
    )
    trainer.train()
    lines = stream.getvalue().splitlines()
    logs = [line for line in lines if " step " in line]
    ends = [line for line in lines if " done in " in line]
    assert (len(logs), len(ends)) == (4, 2)
    assert all(word in line for line in logs for word in ("loss ", "ppl ", "lr ", " tokens/s", "mfu "))
    assert all(word in line for line in ends for word in ("val loss ", "val ppl ", " tokens/s"))
    assert all(len(line) <= 120 for line in (*logs, *ends))
    assert "acc" not in stream.getvalue()


class Penalised(LanguageModelingLoss):
    """A loss with a term of its own beside the cross entropy."""

    def terms(self, output, batch, *, metrics):
        terms = super().terms(output, batch, metrics=metrics)
        return {**terms, "size": LossTerm(terms["loss"].sum * 0 + 3.0, 1.0)}

    def derived(self, means):
        return {**super().derived(means), "loss": means["loss"] + means["size"]}

    def cross_entropy(self, means):
        return None


LOSSES = {
    "plain": (LanguageModelingLoss(), True),
    "smoothed": (LanguageModelingLoss(label_smoothing=0.3), True),
    "of shapes": (None, True),
    "torch": (nn.CrossEntropyLoss(), True),
    "torch smoothed": (nn.CrossEntropyLoss(label_smoothing=0.3), False),
    "with a penalty": (Penalised(), False),
    "a function": (lambda logits, labels: logits.square().mean(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_perplexity_is_that_of_the_cross_entropy_or_absent(name):
    loss, known = LOSSES[name]
    model, data = Small(), batches(next_tokens, 3)
    logits = torch.cat([model(batch["input_ids"]) for batch in data]).detach().double()
    labels = torch.cat([batch["labels"] for batch in data])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).exp().item()
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    for result in (
        ValidationLoop(loss).validate_epoch(model, data),
        TrainingLoop(loss_strategy=loss).train_epoch(model, data, frozen),
    ):
        assert result.perplexity == (pytest.approx(expected, rel=1e-5) if known else None)
        assert result.to_dict()["perplexity"] == result.perplexity


def test_smoothed_training_without_metrics_has_no_perplexity():
    records = Records()
    config = {"max_steps": 2, "log_interval": 1, "device": "cpu", "train_metrics": False}
    loss = LanguageModelingLoss(label_smoothing=0.3)
    Trainer(Small(), batches(inputs_only, 2), loss=loss, config=config, callbacks=[records], progress=False).train()
    assert all("perplexity" not in record for record in records.logs)
