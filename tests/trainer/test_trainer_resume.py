"""Exactness: a run stopped after any step and resumed ends with the very same bytes as one never stopped."""

import random
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, Dataset, IterableDataset, TensorDataset

from etude import Callback, DataLoader, EarlyStopping, Trainer, TrainerConfig
from etude.checkpoint import read_checkpoint
from etude.checkpoint.store import write_checkpoint
from etude.core import CheckpointError, RunFolderError
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskSpec
from etude.optim import SGD, AdamW, RMSprop, warmup_cosine
from run_files import records, weights

EPOCHS, SAMPLES, BATCH = 3, 50, 8
STEPS_PER_EPOCH = 7  # the last batch of an epoch has 2 samples


def data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


class StopAt(Callback):
    def __init__(self, step):
        super().__init__()
        self.step, self.seen = step, 0

    def on_train_begin(self, run):
        self.seen = run.clock.step

    def on_step_end(self, report):
        self.seen += 1
        if self.seen == self.step:
            self.control.request_stop("test")


class Noisy(Dataset):
    """Draws from torch's generator for every sample, as augmentations do."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x, y = data()
        return x[index] + 0.1 * torch.randn(6), y[index]


class Buffered(IterableDataset):
    """Shuffles with a buffer, and draws noise: two generators, both used for every sample."""

    def __iter__(self):
        kept = []
        for pair in zip(*data(), strict=True):
            kept.append(pair)
            if len(kept) == 20:
                yield self.draw(kept)
        while kept:
            yield self.draw(kept)

    def draw(self, kept):
        x, y = kept.pop(random.randrange(len(kept)))
        return x + 0.1 * torch.randn(6), y


class Keeping:
    """Batches in an order drawn when an epoch begins, with noise; goes on from a state, and counts what it makes."""

    made = 0
    start = None
    extra = None

    def __iter__(self):
        start, Keeping.start = Keeping.start, None
        x, y = data()
        order = torch.randperm(SAMPLES) if start is None else start["order"]
        for number in range(0 if start is None else start["number"], STEPS_PER_EPOCH):
            Keeping.made += 1
            self.state = {"order": order, "number": number + 1, "extra": Keeping.extra}
            rows = order[number * BATCH : (number + 1) * BATCH]
            yield x[rows] + 0.1 * torch.randn(len(rows), 6) + random.random(), y[rows]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        Keeping.start = state


LOADERS = {
    "keeping": Keeping,
    "etude": lambda: DataLoader(*data(), BATCH, seed=3),
    "etude_dataset": lambda: DataLoader(Noisy(), batch_size=BATCH, seed=3),
    "torch": lambda: TorchDataLoader(TensorDataset(*data()), batch_size=BATCH, shuffle=True),
    "torch_noisy": lambda: TorchDataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    "buffered": lambda: TorchDataLoader(Buffered(), batch_size=BATCH),
    "buffered_workers": lambda: TorchDataLoader(
        Buffered(), batch_size=BATCH, num_workers=1, persistent_workers=True, prefetch_factor=3
    ),
    "list": lambda: [(data()[0][i : i + BATCH], data()[1][i : i + BATCH]) for i in range(0, SAMPLES, BATCH)],
}
OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3),
}


def trainer(folder, *, loader="etude", optimizer="adamw", callbacks=(), **config):
    config = {"epochs": EPOCHS, "batch_size": BATCH, "log_interval": 4, "device": "cpu", **config}
    return Trainer(
        model(),
        LOADERS[loader](),
        DataLoader(*data(), 25, shuffle=False),
        config=config,
        optimizer=OPTIMIZERS[optimizer],
        scheduler=warmup_cosine(total_steps=21, warmup_steps=4),
        callbacks=callbacks,
        output_dir=folder,
        progress=False,
    )


def straight(tmp_path, **kwargs):
    folder = tmp_path / "straight"
    trainer(folder, **kwargs).train()
    return folder


def stopped_and_resumed(tmp_path, step, **kwargs):
    folder = tmp_path / f"stopped-{step}"
    trainer(folder, callbacks=[StopAt(step)], **kwargs).train()
    torch.rand(step)  # a new process starts with random generators in another state
    second = trainer(folder, **kwargs)
    second.load_checkpoint(folder)
    assert second.state.clock.step == step
    second.train()
    return folder


def test_resume_after_every_step_is_byte_identical(tmp_path):
    reference = straight(tmp_path)
    for step in range(1, EPOCHS * STEPS_PER_EPOCH):
        folder = stopped_and_resumed(tmp_path, step)
        assert weights(folder) == weights(reference), f"stopped after step {step}"
        assert records(folder) == records(reference), f"stopped after step {step}"


@pytest.mark.parametrize(
    "variant",
    [
        {"loader": "etude_dataset"},
        {"loader": "torch"},
        {"loader": "torch_noisy"},
        {"loader": "buffered"},
        {"loader": "buffered_workers"},
        {"loader": "list"},
        {"loader": "keeping"},
        {"loader": "keeping", "grad_accum_steps": 3},
        {"optimizer": "sgd"},
        {"optimizer": "rmsprop"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"grad_accum_steps": 3},
        {"grad_accum_steps": {0: 1, 1: 2}},
        {"gradient_clip_norm": None, "gradient_clip_value": 0.01},
    ],
    ids=str,
)
def test_resume_is_byte_identical_in_every_variant(tmp_path, variant):
    reference = straight(tmp_path, **variant)
    last = 9 if "grad_accum_steps" in variant else EPOCHS * STEPS_PER_EPOCH
    for step in range(1, last) if last == 9 else (2, 5, last - 1):
        folder = stopped_and_resumed(tmp_path, step, **variant)
        assert weights(folder) == weights(reference), f"stopped after step {step}"


def test_a_loader_that_keeps_a_state_reads_nothing_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Keeping, "made", 0)
    stopped_and_resumed(tmp_path, STEPS_PER_EPOCH + 4, loader="keeping")
    assert Keeping.made == EPOCHS * STEPS_PER_EPOCH


def test_a_state_that_is_no_data_is_refused_once_and_batches_are_read_again(tmp_path, monkeypatch, caplog):
    reference = straight(tmp_path, loader="keeping")
    monkeypatch.setattr(Keeping, "made", 0)
    monkeypatch.setattr(Keeping, "extra", object())
    folder = stopped_and_resumed(tmp_path, STEPS_PER_EPOCH + 4, loader="keeping", save_every_steps=2)
    assert weights(folder) == weights(reference)
    assert Keeping.made == EPOCHS * STEPS_PER_EPOCH + 4
    warned = [record.message for record in caplog.records if "extra" in record.message]
    assert len(warned) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resume_is_byte_identical_for_weights_of_every_type(tmp_path, dtype, momentum, precision):
    """An optimizer without state does not show that it has stepped before."""

    def run(folder, stop=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        x, y = data()
        Trainer(
            net,
            (x.to(dtype), y),
            config={
                "epochs": 1,
                "batch_size": BATCH,
                "gradient_clip_norm": 0.01,
                "precision": precision,
                "loss_scale": 128.0,
                "device": "cpu",
            },
            optimizer=lambda p: SGD(p, lr=0.5, momentum=momentum),
            callbacks=[StopAt(stop)] if stop else [],
            output_dir=folder,
            resume=True,
            progress=False,
        ).train()

    run(tmp_path / "a")
    for stop in (1, 2, 3, 4, None):
        run(tmp_path / "b", stop)
    assert weights(tmp_path / "b") == weights(tmp_path / "a")


@pytest.mark.parametrize("several", [False, True])
def test_what_the_loss_decided_by_the_first_batch_holds_after_a_resume(tmp_path, several):
    """In every second batch labels that repeat the inputs look like next tokens; an epoch's end sees no batch."""
    rows = torch.randint(1, 9, (3, 2, 6), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": ids} for row in rows for ids in (row, row[:, :1].expand(2, 6).clone())]

    def run(folder, stop=None):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
        model = MultiTaskModel(trunk, {"text": LinearHead(9, in_features=9)}) if several else trunk
        Trainer(
            model,
            batches,
            task=MultiTask({"text": TaskSpec("text", labels="labels")}) if several else None,
            config={"epochs": 2, "log_interval": 1, "learning_rate": 0.1, "device": "cpu"},
            callbacks=[StopAt(stop)] if stop else [],
            output_dir=folder,
            resume=True,
            progress=False,
        ).train()

    run(tmp_path / "a")
    for stop in (*range(1, 12), None):
        run(tmp_path / "b", stop)
    assert weights(tmp_path / "b") == weights(tmp_path / "a")
    assert records(tmp_path / "b") == records(tmp_path / "a")
    assert any(name.endswith("perplexity") for name in records(tmp_path / "a")[-1])


def test_resume_of_a_channels_last_model_is_byte_identical(tmp_path):
    """Its weights and momenta are not contiguous, and must not be laid out again by a checkpoint."""

    def run(folder, stop=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
        images = torch.randn(40, 3, 8, 8)
        one = Trainer(
            net.to(memory_format=torch.channels_last),
            (images.to(memory_format=torch.channels_last), images.mean((2, 3)).argmax(1)),
            config={"epochs": 2, "batch_size": 8, "device": "cpu"},
            optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9),
            callbacks=[StopAt(stop)] if stop else [],
            output_dir=folder,
            progress=False,
        )
        if (folder / "checkpoints" / "last").exists():
            one.load_checkpoint(folder)
        one.train()

    run(tmp_path / "a")
    run(tmp_path / "b", stop=4)
    run(tmp_path / "b")
    assert weights(tmp_path / "b") == weights(tmp_path / "a")


def test_another_seed_gives_other_weights(tmp_path):
    """The comparison above can fail."""
    folder = tmp_path / "other"
    trainer(folder, seed=1).train()
    assert weights(folder) != weights(straight(tmp_path))


@pytest.mark.parametrize("step", [4, STEPS_PER_EPOCH])
def test_a_run_resumed_with_another_seed_draws_from_it_and_says_so(tmp_path, step, caplog):
    trainer(tmp_path / "run", callbacks=[StopAt(step)]).train()
    for name, seed in (("same", 0), ("other", 1), ("again", 1)):
        folder = shutil.copytree(tmp_path / "run", tmp_path / name, symlinks=True)
        caplog.clear()
        resumed = trainer(folder, seed=seed)  # the loader has a seed of its own: only the dropout differs
        resumed.load_checkpoint(folder)
        resumed.train()
        assert ("seed" in caplog.text) == (seed != 0)
    assert weights(tmp_path / "other") == weights(tmp_path / "again") != weights(tmp_path / "same")


def test_a_run_resumed_with_another_loss_scale_begins_with_it(tmp_path):
    def scale(**config):
        one = trainer(tmp_path, precision="fp16", **config)
        one.load_checkpoint(tmp_path)
        return float(one.machine.precision.scaler.scale)

    trainer(tmp_path, precision="fp16", loss_scale=512.0, callbacks=[StopAt(4)]).train()
    assert scale(loss_scale=512.0) == 512.0
    assert scale(loss_scale=8.0) == 8.0


def test_resume_twice_and_at_epoch_boundaries(tmp_path):
    reference = straight(tmp_path)
    folder = tmp_path / "twice"
    for step in (STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH, None):
        part = trainer(folder, callbacks=[StopAt(step)] if step else [])
        if (folder / "checkpoints" / "last").exists():
            part.load_checkpoint(folder)
        part.train()
    assert weights(folder) == weights(reference)


def test_early_stopping_counts_on_after_resume(tmp_path):
    def run(folder, stop=None):
        patience = EarlyStopping(monitor="val_loss", patience=1, min_delta=100.0)
        one = trainer(folder, callbacks=[patience, *([StopAt(stop)] if stop else [])])
        if (folder / "checkpoints" / "last").exists():
            one.load_checkpoint(folder)
        one.train()
        return one.state.clock.epoch

    assert run(tmp_path / "a") == 2
    run(tmp_path / "b", stop=STEPS_PER_EPOCH + 2)
    assert run(tmp_path / "b") == 2


def test_train_num_epochs_counts_from_the_start(tmp_path):
    folder = tmp_path / "run"
    first = trainer(folder)
    first.train(num_epochs=1)
    second = trainer(folder)
    second.load_checkpoint(folder / "checkpoints" / "last")
    second.train(num_epochs=3)
    assert second.state.clock.epoch == 3
    assert weights(folder) == weights(straight(tmp_path))


@pytest.mark.parametrize("from_", [".", "checkpoints", "checkpoints/last", "checkpoints/best"])
def test_a_copied_run_goes_on_to_the_same_bytes(tmp_path, from_):
    """A copy that follows links, as `scp -r` and zip files do, has folders where the run had `last` and `best`."""
    trainer(tmp_path / "run").train(num_epochs=1)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert not (copy / "checkpoints" / "last").is_symlink()
    again = trainer(copy)
    again.load_checkpoint(copy / from_)
    again.train()
    assert weights(copy) == weights(straight(tmp_path))
    links = {path.name for path in (copy / "checkpoints").iterdir() if path.is_symlink()}
    assert links == {"last", "best"}


def test_a_checkpoint_says_what_it_is_of(tmp_path):
    first = trainer(tmp_path / "run", log_interval=3)
    first.train(num_epochs=1)
    moved = shutil.copytree(tmp_path / "run" / "checkpoints" / "last", tmp_path / "elsewhere")
    saved_config = yaml.safe_load(read_checkpoint(moved).config)
    assert TrainerConfig(**saved_config["training"]) == first.config
    (moved / "run-config.yaml").write_text("training: {}")
    with pytest.raises(CheckpointError, match=r"run-config\.yaml"):
        read_checkpoint(moved)


def test_a_checkpoint_without_a_config_loads(tmp_path):
    first = trainer(tmp_path / "run")
    first.train(num_epochs=1)
    model_state, rest = first.state.capture()
    write_checkpoint(tmp_path / "old" / "step-00000007", model_state, rest, {"step": 7})
    second = trainer(None)
    second.load_checkpoint(tmp_path / "old")
    assert second.state.clock.step == STEPS_PER_EPOCH
    assert not (tmp_path / "old" / "step-00000007" / "run-config.yaml").exists()


def test_checkpoint_opens_with_safetensors_alone(tmp_path):
    folder = straight(tmp_path)
    saved = load_file(folder / "checkpoints" / "last" / "model.safetensors")
    assert set(saved) == set(model().state_dict())


def test_two_trainers_do_not_write_one_folder(tmp_path):
    class Rival(Callback):
        error = None

        def on_epoch_begin(self, epoch):
            if self.error is None:
                with pytest.raises(RunFolderError, match="in use by process") as caught:
                    trainer(tmp_path / "run").train()
                self.error = caught.value

    rival = Rival()
    trainer(tmp_path / "run", callbacks=[rival]).train()
    assert rival.error is not None
    assert weights(tmp_path / "run") == weights(straight(tmp_path))
