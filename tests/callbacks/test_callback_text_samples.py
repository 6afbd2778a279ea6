"""Text samples: the model's own text, exactly as it would be drawn by hand, and never a change or an end of the run."""

import json
import logging

import pytest
import torch
from callback_life import Life, tokenizer_file
from torch import nn

import etude
from etude.callbacks import Callback, CallbackList, TextSamples
from etude.core import ConfigError, DataError
from etude.corpus import load_tokenizer
from etude.models import CausalTransformerLM

VOCAB = 270


def make(seed=0, **arguments):
    """Return a model that likes short texts, sure enough of them that texts differ from noise."""
    torch.manual_seed(seed)
    settings = {"vocab_size": VOCAB, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_len": 32, **arguments}
    return CausalTransformerLM(**settings)


class Plain(nn.Module):
    """The same model for a callback that does not know it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return {"logits": self.model(input_ids)}


def run(tmp_path, model, callback, reason="", by_signal=False, **life):
    life = Life(tmp_path, **life)
    life.model = model
    callbacks = CallbackList([callback])
    callbacks.on_train_begin(life.run_info())
    if reason:
        callbacks.control.request_stop(reason, by_signal=by_signal)
    callbacks.on_train_end({})
    path = tmp_path / "samples.txt"
    return path.read_text(encoding="utf-8") if path.exists() else None


def test_texts_begin_with_their_prompts_and_are_drawn_from_the_model(tmp_path):
    model, tokenizer = make(), load_tokenizer(tokenizer_file())
    callback = TextSamples(["def one", ""], max_new_tokens=12, tokenizer=tokenizer_file(), temperature=0)
    texts = callback.sample(model)
    for prompt, text in zip(("def one", ""), texts, strict=True):
        ids = torch.tensor([0, *tokenizer.encode(prompt).ids])
        drawn = model.generate(ids, 12, temperature=0, stop_id=0)[1:].tolist()
        assert text == tokenizer.decode(drawn)
        assert text.startswith(prompt)
    written = run(tmp_path, model, callback)
    assert written.replace("│ ", "").count("def one") >= 1
    assert [block.startswith("│ ") for block in written.split("\n\n")] == [True, True]


def test_any_causal_model_gives_the_text_of_its_logits():
    model = make(max_len=64)
    callback = TextSamples(["def "], max_new_tokens=20, tokenizer=tokenizer_file(), seed=3)
    plain = Plain(model).train()
    assert callback.sample(plain) == callback.sample(model)
    assert plain.training
    assert plain.model.training


def test_a_text_ends_with_its_document():
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.norm.weight.fill_(1.0)
        model.embedding.weight[0] = 1.0  # after an end comes an end, surely; so the text is empty
    callback = TextSamples(tokenizer=tokenizer_file(), temperature=0)
    assert callback.sample(model) == [""]
    assert callback.sample(Plain(model)) == [""]


def test_random_numbers_are_its_own():
    model = make(dropout=0.5)
    state = torch.get_rng_state()
    first = TextSamples(tokenizer=tokenizer_file(), seed=1).sample(model)
    assert torch.get_rng_state().equal(state)
    torch.rand(7)
    assert TextSamples(tokenizer=tokenizer_file(), seed=1).sample(model) == first
    assert TextSamples(tokenizer=tokenizer_file(), seed=2).sample(model) != first


def test_nothing_that_a_terminal_obeys_is_written(tmp_path, monkeypatch):
    callback = TextSamples(tokenizer=tokenizer_file())
    monkeypatch.setattr(callback, "sample", lambda model: ["a\x1b[31mred\x07\n\tb\r\x85c"])
    assert run(tmp_path, make(), callback) == "│ a�[31mred�\n│ \tb��c\n"


def test_other_processes_and_interrupted_runs_write_nothing(tmp_path):
    callback = TextSamples(tokenizer=tokenizer_file())
    assert run(tmp_path, make(), callback, is_main=False) is None
    assert run(tmp_path, make(), TextSamples(tokenizer=tokenizer_file()), reason="SIGTERM", by_signal=True) is None
    assert run(tmp_path, make(), TextSamples(tokenizer=tokenizer_file()), reason="no better for 3 epochs") is not None


def test_a_model_that_cannot_be_sampled_from_costs_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "etude"):
        assert run(tmp_path, nn.Linear(3, 2), TextSamples(tokenizer=tokenizer_file())) is None
    assert "text_samples: no text could be sampled: " in caplog.text


def test_mistakes_are_reported_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="text_samples needs a tokenizer, and the data has none"):
        run(tmp_path, make(), TextSamples())
    with pytest.raises(DataError, match=r"nothing\.json does not exist"):
        run(tmp_path, make(), TextSamples(tokenizer="nothing.json"))
    with pytest.raises(ConfigError, match="top_p is 2"):
        TextSamples(tokenizer="x", top_p=2)


class Dies(Callback):
    def on_step_end(self, report):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 10:
            raise LookupError


def train(folder, *callbacks, validate=True, **kwargs):
    tokens = torch.randint(0, VOCAB, (16, 8), generator=torch.Generator().manual_seed(0))
    data = (tokens, tokens)
    config = {"epochs": 4, "batch_size": 4, "validate_every_steps": 2 if validate else None, "device": "cpu"}
    trainer = etude.Trainer(
        make(dropout=0.1),
        data,
        data if validate else None,
        loss="language_modeling",
        config=config,
        callbacks=list(callbacks),
        output_dir=folder,
        progress=False,
        **kwargs,
    )
    trainer.train()
    return trainer


def published(folder):
    path = folder / "media.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {one["step"]: one["data"] for one in records if one["name"] == "samples"}


def test_texts_by_step_do_not_change_training(tmp_path):
    callback = TextSamples(["def "], max_new_tokens=5, tokenizer=tokenizer_file(), every=3)
    plain, sampled = train(tmp_path / "plain"), train(tmp_path / "sampled", callback)
    for one, other in zip(plain.model.parameters(), sampled.model.parameters(), strict=True):
        assert torch.equal(one, other)
    found = published(tmp_path / "sampled")
    assert list(found) == [6, 12, 16]  # every third of the validations after 2, 4 … 16 steps, and the end
    assert all(text.startswith("│ def ") for text in found.values())
    assert found[16] == (tmp_path / "sampled" / "samples.txt").read_text(encoding="utf-8")
    assert published(tmp_path / "plain") == {}


def test_epochs_are_counted_where_there_is_no_validation(tmp_path):
    callback = TextSamples(max_new_tokens=2, tokenizer=tokenizer_file(), every=2)
    train(tmp_path / "run", callback, validate=False)
    assert list(published(tmp_path / "run")) == [8, 16]


def test_a_resumed_run_samples_at_the_same_steps(tmp_path):
    arguments = {"max_new_tokens": 5, "tokenizer": tokenizer_file(), "every": 3}
    with pytest.raises(LookupError):
        train(tmp_path / "run", TextSamples(**arguments), Dies())
    train(tmp_path / "run", TextSamples(**arguments), resume=True)
    train(tmp_path / "straight", TextSamples(**arguments))
    assert published(tmp_path / "run") == published(tmp_path / "straight") != {}
