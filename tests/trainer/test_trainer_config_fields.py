"""Every key of `TrainerConfig` acts in Python: each has a probe here that sees the difference, or the refusal."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import etude.data.factory
from etude import Callback, Trainer, TrainerConfig
from etude.core import ConfigError, TrainingError


class Watch(Callback):
    """Counts what a run does."""

    def __init__(self):
        super().__init__()
        self.rates, self.logged, self.validated, self.saved, self.epochs, self.norms = [], [], [], [], 0, []

    def on_step_end(self, report):
        self.rates.append(report.lr)
        self.norms.append(float(report.counts["loss"]))

    def on_log(self, record):
        self.logged.append(record)

    def on_validation_end(self, epoch, metrics):
        self.validated.append(epoch)

    def on_checkpoint(self, path):
        self.saved.append(Path(path).name)

    def on_epoch_end(self, epoch, logs):
        self.epochs += 1
        self.last = logs


class Block(nn.Module):
    """One of several, with a count of how often it is run."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).tanh()


class Blocks(nn.Module):
    """Blocks that repeat."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head, self.dtypes = nn.Linear(4, 2), set()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        answer = self.head(x)
        self.dtypes.add(answer.dtype)
        return answer


def data(samples=30):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def run(folder=None, source=None, **config):
    """Train and return all that a probe may want to look at."""
    model, watch = Blocks(), Watch()
    trainer = Trainer(
        model,
        data() if source is None else source,
        data(),
        config={"epochs": 2, "batch_size": 8, "device": "cpu", **config},
        callbacks=[watch],
        output_dir=folder,
        progress=False,
    )
    threads = torch.get_num_threads()
    try:
        trainer.train()
    finally:
        torch.set_num_threads(threads)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"model": model, "watch": watch, "trainer": trainer, "weights": weights, "folder": folder}


def steps(found):
    return len(found["watch"].rates)


def rates(found):
    return found["watch"].rates


def weights(found):
    return found["weights"].tolist()


def checkpoints(found):
    return sorted(path.name for path in (Path(found["folder"]) / "checkpoints").glob("step-*"))


NAN = (torch.full((30, 4), float("nan")), torch.zeros(30, dtype=torch.int64))


PROBES = {
    "epochs": (3, lambda f: f["watch"].epochs),
    "max_steps": (3, steps),
    "batch_size": (10, lambda f: f["watch"].norms),
    "seed": (7, weights),
    "log_interval": (1, lambda f: len(f["watch"].logged)),
    "validate_interval": (0, lambda f: f["watch"].validated),
    "validate_every_steps": (3, lambda f: len(f["watch"].validated)),
    "sanity_val_batches": (0, lambda f: f["model"].blocks[0].calls),
    "save_checkpoints": (False, checkpoints),
    "checkpoint_dir": ("weights", checkpoints),
    "checkpoint_interval": (0, lambda f: f["watch"].saved),
    "save_every_steps": (3, lambda f: f["watch"].saved),
    "async_save": (True, lambda f: len(f["trainer"].output._background._copies)),
    "keep_best": (0, checkpoints),
    "monitor": ("val_accuracy", lambda f: f["trainer"].output.judge.best.best.value),
    "mode": ("max", lambda f: f["trainer"].output.judge.best.best.step),
    "restore_best": (True, lambda f: f["trainer"].output.judge.load_best is None),
    "grad_accum_steps": (2, steps),
    "gradient_clip_norm": (1e-4, lambda f: f["trainer"].step.updater.clip_norm),
    "gradient_clip_value": (1e-4, weights),
    "precision": ("bf16", lambda f: f["model"].dtypes),
    "use_mixed_precision": (True, lambda f: f["model"].dtypes),
    "precision_dtype": ("bfloat16", lambda f: f["model"].dtypes),
    "activation_checkpointing": (True, lambda f: f["model"].blocks[0].calls),
    "deterministic": (True, lambda f: torch.are_deterministic_algorithms_enabled()),
    "train_metrics": (False, lambda f: "accuracy" in f["watch"].last),
    "drop_last": (True, lambda f: f["watch"].norms),
    "micro_batch_size": (3, lambda f: f["model"].blocks[0].calls),
    "batch_transform": ({"name": "mixup", "num_classes": 2}, weights),
    "freeze": ("head", weights),
    "ema": (0.9, weights),
    "learning_rate": (0.5, rates),
    "weight_decay": (0.5, weights),
    "warmup_steps": (3, rates),
    "use_scheduler": (True, rates),
    "scheduler_type": ("cosine", rates),
}
"""A value that is not the default, and where it shows."""

ELSEWHERE = {
    "trainable_only": "tests/checkpoint/test_checkpoint_frozen.py",
    "unfreeze": "tests/callbacks/test_callback_freeze.py",
    "frozen_eval": "tests/callbacks/test_callback_freeze.py",
    "device": "test_the_device_is_asked_for",
    "num_threads": "test_threads_are_set_while_it_runs",
    "loss_scale": "test_the_loss_scale_is_the_first_one",
    "max_skipped_steps": "test_the_limit_of_skipped_updates",
    "compile": "test_the_model_or_the_step_is_compiled",
    "capture": "test_capture_needs_cuda",
    "find_unused_parameters": "tests/distributed",
    "on_out_of_memory": "tests/trainer/test_trainer_memory.py",
    "meaningful_loss": "test_settings_of_another_loss_are_refused",
    "num_workers": "test_settings_of_workers_reach_the_loader",
    "persistent_workers": "test_settings_of_workers_reach_the_loader",
    "prefetch_factor": "test_settings_of_workers_reach_the_loader",
    "pin_memory": "test_settings_of_workers_reach_the_loader",
    "prefetch": "test_settings_of_workers_reach_the_loader",
}
"""Keys that need something of their own to show, and the test that does."""


def test_every_key_is_probed():
    assert PROBES.keys() | ELSEWHERE.keys() == set(TrainerConfig.model_fields)
    assert not PROBES.keys() & ELSEWHERE.keys()
    assert all(name in globals() for name in ELSEWHERE.values() if name.startswith("test_"))


@pytest.mark.parametrize("key", PROBES)
def test_a_key_acts(key, tmp_path):
    value, look = PROBES[key]
    was = torch.are_deterministic_algorithms_enabled()
    try:
        plain, changed = look(run(tmp_path / "one")), look(run(tmp_path / "two", **{key: value}))
    finally:
        torch.use_deterministic_algorithms(was)
    assert plain != changed


def test_the_device_is_asked_for():
    with pytest.raises(ConfigError, match="nonsense"):
        run(device="nonsense")


def test_threads_are_set_while_it_runs():
    seen = []

    class Threads(Callback):
        def on_step_end(self, report):
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        config = {"num_threads": before + 1, "epochs": 1, "batch_size": 30}
        Trainer(Blocks(), data(), config=config, callbacks=[Threads()], progress=False).train()
    finally:
        torch.set_num_threads(before)
    assert seen == [before + 1]


def test_the_loss_scale_is_the_first_one():
    trainer = Trainer(Blocks(), data(), config={"precision": "fp16", "loss_scale": 128.0}, progress=False)
    assert trainer.machine.precision.scaler.scale.item() == 128.0


def test_the_limit_of_skipped_updates():
    for limit in (2, 3):
        with pytest.raises(TrainingError, match=f"last {limit} steps"):
            run(source=NAN, max_skipped_steps=limit, log_interval=1)


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ({}, ""),
        ({"compile_model": False}, ""),
        ({"compile": "off"}, ""),
        ({"compile": "model"}, "model"),
        ({"compile_model": True}, "step"),
        ({"compile": "step"}, "step"),
    ],
    ids=str,
)
def test_the_model_or_the_step_is_compiled(monkeypatch, setting, what):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda _self: compiled.append("model"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append("step") or function)
    config = {"epochs": 1, "device": "cpu", **setting}
    Trainer(Blocks(), data(), config=config, progress=False).train()
    assert compiled == [what] * bool(what)


def test_capture_needs_cuda():
    for setting in ("on", True):
        with pytest.raises(ConfigError, match=r"training\.capture.*cpu"):
            run(capture=setting)
    for setting in ("auto", "off", False):
        run(capture=setting)


def test_settings_of_another_loss_are_refused():
    with pytest.raises(ConfigError, match="meaningful_loss"):
        run(meaningful_loss={"weight": 0.5})


def test_settings_of_workers_reach_the_loader(monkeypatch):
    made, make = [], etude.data.factory.make_loader
    monkeypatch.setattr(
        etude.data.factory, "make_loader", lambda *data, **given: made.append(given) or make(*data, **given)
    )
    asked = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3, "pin_memory": False, "prefetch": 2}
    Trainer(Blocks(), torch.utils.data.TensorDataset(*data()), config=asked, progress=False)
    assert asked.items() <= made[0].items()


# ------------------------------------------------------------------ what contradicts


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"precision": "fp16", "use_mixed_precision": True}, "precision is fp16"),
        ({"precision": "fp32", "precision_dtype": "bfloat16"}, "precision is fp32"),
        ({"precision": "bf16", "use_mixed_precision": False}, "precision is bf16"),
    ],
)
def test_two_precisions_are_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        Trainer(Blocks(), data(), config=config, progress=False)


@pytest.mark.parametrize("given", ["fp16", "bf16"])
def test_use_amp_keeps_the_number_format_that_the_config_names(given):
    trainer = Trainer(Blocks(), data(), config={"precision": given}, use_amp=True, progress=False)
    assert trainer.machine.precision.name == given


@pytest.mark.parametrize("form", ["object", "function", "class"])
@pytest.mark.parametrize(("key", "name"), [("learning_rate", "lr"), ("weight_decay", "weight_decay")])
def test_a_rate_beside_an_optimizer_is_the_same_or_refused(form, key, name):
    """A class of optimizers is made with it."""
    for value, same in itertools.product((0.5, 0.25), repeat=2):
        model = Blocks()
        forms = {
            "object": torch.optim.SGD(model.parameters(), **{"lr": 0.1, name: same}),
            "function": lambda params, same=same: torch.optim.SGD(params, **{"lr": 0.1, name: same}),
            "class": torch.optim.SGD,
        }
        settings = {"config": {key: value}, "optimizer": forms[form], "progress": False}
        if form == "class" or value == same:
            assert Trainer(model, data(), **settings).optimizer.param_groups[0][name] == value
        else:
            with pytest.raises(ConfigError, match=f"{key} is {value}.* {same}"):
                Trainer(model, data(), **settings)


@pytest.mark.parametrize(("key", "value"), [("batch_size", 16), ("drop_last", True), ("num_workers", 2)])
def test_settings_that_a_ready_loader_cannot_follow_are_a_warning(key, value, caplog):
    ready = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8)
    Trainer(Blocks(), ready, config={"epochs": 1}, progress=False)
    assert not caplog.records
    Trainer(Blocks(), ready, config={key: value}, progress=False)
    assert f"training.{key} is {value}" in caplog.text
