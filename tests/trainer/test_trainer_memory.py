"""Sizes of batches: steps that run out of memory, sizes that are found by trying, and schedules of sizes."""

import json

import pytest
import torch
import yaml
from hypothesis import given, settings, strategies as st
from torch import nn

from etude import Callback, DataLoader, Trainer, TrainerConfig
from etude.core import ConfigError, TrainingError
from etude.data import Streams
from etude.trainer.fit import fewest_parts, largest_power

LIMIT = 5


class Limited(nn.Module):
    """Has memory for at most `most` samples at once in training, from its step `since` on."""

    def __init__(self, most=10**9, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.most, self.largest, self.calls = most, 0, 0

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.largest, self.calls = max(self.largest, len(x)), self.calls + 1
        return self.layers(x)


class StopAt(Callback):
    def __init__(self, step):
        self.step, self.count = step, 0

    def on_step_end(self, report):
        self.count += 1
        if self.count == self.step:
            self.control.request_stop("enough")


def data(samples=37):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)


def make(model=None, source=None, callbacks=(), validation=None, **options):
    config = {"epochs": 3, "batch_size": 16, "device": "cpu", "learning_rate": 0.1}
    for key in list(options):
        if key in TrainerConfig.model_fields:
            config[key] = options.pop(key)
    model, source = Limited() if model is None else model, data() if source is None else source
    return Trainer(model, source, validation, config=config, callbacks=list(callbacks), progress=False, **options)


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.model.parameters()])


# ------------------------------------------------------------------------------------------------ out of memory


def test_an_error_by_default():
    with pytest.raises(TrainingError, match=r"out of memory.*on_out_of_memory=split"):
        make(Limited(LIMIT)).train()


def test_what_a_split_cannot_avoid_is_not_remedied_by_one():
    class Fail(Callback):
        def on_step_end(self, report):
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(TrainingError, match="out of memory on cpu; remedies: ") as failure:
        make(callbacks=[Fail()], on_out_of_memory="split").train()
    assert "on_out_of_memory" not in str(failure.value)


def test_split_gives_the_same_weights():
    whole, split, given = make(), make(Limited(LIMIT), on_out_of_memory="split"), make(micro_batch_size=4)
    for one in (whole, split, given):
        one.train()
        torch.testing.assert_close(weights(one), weights(whole), rtol=1e-4, atol=1e-6)
    assert split.model.largest == given.model.largest == split.step.splitter.size == 4


def test_the_notice_is_in_the_events(tmp_path):
    make(Limited(LIMIT), on_out_of_memory="split", output_dir=tmp_path / "run").train()
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert sum("out of memory" in json.dumps(event) for event in events) == 2


@pytest.mark.parametrize("stop", [1, 4, 8])
def test_a_resume_after_a_split_is_exact(tmp_path, stop):
    """The size is in the checkpoint: a resumed run does not run out of memory again, and has the same bytes."""

    def files(folder, *callbacks, resume=False):
        model = Limited(LIMIT, dropout=0.3)
        made = make(model, callbacks=callbacks, on_out_of_memory="split", output_dir=folder, resume=resume)
        before = made.step.splitter.size
        made.train()
        return before, (folder / "checkpoints/last/model.safetensors").read_bytes()

    _, expected = files(tmp_path / "whole")
    files(tmp_path / "cut", StopAt(stop))
    size, found = files(tmp_path / "cut", resume=True)
    assert size == 4
    assert found == expected


def test_a_crash_after_a_split_is_resumed_exactly(tmp_path):
    """From the checkpoint before the split, memory runs out again in the same step."""

    class Crash(Callback):
        def on_step_end(self, report):
            if self.clock.step == 6:
                raise RuntimeError("killed")

        def on_train_begin(self, run):
            self.clock = run.clock

    class Later(Callback):
        """Less memory from step 4 on."""

        def on_step_begin(self, step):
            self.model.most = 99 if step < 4 else LIMIT

        def on_train_begin(self, run):
            self.model = run.model

    def run(folder, *callbacks, resume=False):
        options = {"on_out_of_memory": "split", "save_every_steps": 4, "checkpoint_interval": 0}
        make(
            Limited(dropout=0.3), callbacks=[Later(), *callbacks], output_dir=folder, resume=resume, **options
        ).train()
        return (folder / "checkpoints/last/model.safetensors").read_bytes()

    expected = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "cut", Crash())
    assert run(tmp_path / "cut", resume=True) == expected


def test_another_setting_replaces_the_size_of_the_checkpoint(tmp_path):
    first = make(Limited(LIMIT), on_out_of_memory="split", output_dir=tmp_path / "run", epochs=1)
    first.train()
    again = make(Limited(LIMIT), micro_batch_size=2, output_dir=tmp_path / "run", resume=True)
    assert again.step.splitter.size == 2


def test_a_batch_that_cannot_be_divided_is_refused():
    batches = [{"x": torch.zeros(8, 4), "labels": torch.zeros(8, dtype=torch.long), "offsets": torch.zeros(3)}]
    with pytest.raises(Exception, match="cannot be divided"):
        make(source=batches, micro_batch_size=2, epochs=1).train()


@pytest.mark.parametrize("bad", [{"micro_batch_size": 0}, {"on_out_of_memory": "halve"}, {"batch_size": "largest"}])
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make(**bad)


# ------------------------------------------------------------------------------------------------ automatic sizes


@given(st.integers(1, 300), st.integers(1, 400))
def test_the_largest_power_that_fits(fitting, most):
    powers = [2**n for n in range(10) if 2**n <= min(fitting, most)]
    assert largest_power(lambda size: size <= fitting, most) == max(powers)


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_fewest_parts_that_fit(fitting, batch):
    expected = next(parts for parts in range(1, batch + 1) if -(-batch // parts) <= fitting)
    assert fewest_parts(lambda size: size <= fitting, batch) == expected


def test_nothing_fits():
    with pytest.raises(TrainingError, match="out of memory even with a batch of 1"):
        make(Limited(0), batch_size="auto")


@pytest.mark.parametrize(("most", "samples", "expected"), [(20, 200, 16), (500, 200, 64), (500, 37, 32), (3, 37, 2)])
def test_automatic_batch_size(most, samples, expected):
    trainer = make(Limited(most), data(samples), batch_size="auto")
    assert (trainer.config.batch_size, trainer.config.on_out_of_memory) == (expected, "split")
    trainer.train()
    assert trainer.model.largest == expected


@pytest.mark.parametrize("batch_size", [16, {0: 8, 1: 16}])
def test_automatic_micro_batch_size(batch_size):
    whole, auto = make(batch_size=batch_size), make(Limited(6), micro_batch_size="auto", batch_size=batch_size)
    assert (auto.config.micro_batch_size, auto.config.batch_size) == (6, batch_size)
    for one in (whole, auto):
        one.train()
    torch.testing.assert_close(weights(auto), weights(whole), rtol=1e-4, atol=1e-6)


def test_a_search_leaves_no_trace():
    """A run whose size was found is, byte for byte, one whose size was set."""
    made = [make(Limited(20, 0.3), batch_size=size, on_out_of_memory="split") for size in ("auto", 16)]
    for one in made:
        one.train()
    assert torch.equal(weights(made[0]), weights(made[1]))


def test_sizes_that_were_found_are_kept(tmp_path):
    """The run folder has numbers; the same script, resumed with more memory, continues with them."""
    folder = tmp_path / "run"
    make(Limited(20), batch_size="auto", output_dir=folder, epochs=1).train()
    training = yaml.safe_load((folder / "config.yaml").read_text())["training"]
    assert (training["batch_size"], training["on_out_of_memory"]) == (16, "split")
    again = make(Limited(99), batch_size="auto", output_dir=folder, resume=True)
    assert (again.config.batch_size, again.state.clock.step) == (16, 3)


def test_automatic_parts_of_any_loader():
    """Batches that a loader makes itself are divided too."""
    x, y = data(32)
    torch_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    for source in (DataLoader(x, y, batch_size=16), torch_loader, [(x[:16], y[:16]), (x[16:], y[16:])]):
        auto = make(Limited(6), source, micro_batch_size="auto", epochs=1)
        assert auto.config.micro_batch_size == 6
        auto.train()
        assert auto.model.largest == 6
    with pytest.raises(ConfigError, match="only once"):
        make(Limited(6), iter([(x, y)]), micro_batch_size="auto")


def test_loaders_have_their_own_size():
    with pytest.raises(ConfigError, match="makes its own batches"):
        make(source=DataLoader(*data(), batch_size=8), batch_size="auto")


# ------------------------------------------------------------------------------------------------ schedules of sizes


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.dictionaries(st.integers(1, 6), st.integers(1, 20), max_size=3),
    st.integers(1, 20),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_epoch_has_every_sample_once(samples, changes, first, shuffle, world_size):
    sizes = {**changes, 0: first}
    rows = torch.arange(samples)
    loader = DataLoader(rows, batch_size=first, shuffle=shuffle).resized(sizes)
    ranks = [loader.shared(rank, world_size) for rank in range(world_size)]
    for epoch in range(7):
        size = sizes[max(start for start in sizes if start <= epoch)]
        batches = list(loader.iterate(epoch))
        assert loader.batches_in(epoch) == len(batches) == -(-samples // size)
        assert {len(batch.data) for batch in batches[:-1]} <= {size}
        assert sorted(torch.cat([batch.data for batch in batches]).tolist()) == rows.tolist()
        shares = [list(rank.iterate(epoch)) for rank in ranks]
        for place, batch in enumerate(batches):  # the global batches do not depend on the number of ranks
            assert torch.cat([share[place].data for share in shares]).tolist() == batch.data.tolist()
        if len(batches) > 1:
            rest = list(loader.iterate(epoch, size))
            assert [one.data.tolist() for one in rest] == [one.data.tolist() for one in batches[1:]]


class Sizes(Callback):
    def __init__(self):
        self.sizes, self.rates = [], []

    def on_step_end(self, report):
        self.sizes.append(int(report.counts["loss"]))
        self.rates.append(report.lr)


def test_a_schedule_of_sizes():
    watch = Sizes()
    schedule = {"batch_size": {0: 8, 1: 16}, "grad_accum_steps": {0: 1, 2: 2}}
    trainer = make(callbacks=[watch], scheduler="linear", **schedule)
    assert trainer.total_steps == 5 + 3 + 2
    trainer.train()
    assert watch.sizes == [8, 8, 8, 8, 5, 16, 16, 5, 32, 5]
    assert watch.rates == pytest.approx([0.1 * (1 - step / 10) for step in range(10)])


def test_max_steps_end_a_schedule():
    trainer = make(batch_size={0: 8, 1: 16}, max_steps=6)
    assert trainer.total_steps == 6
    trainer.train()
    assert (trainer.state.clock.step, trainer.state.clock.epoch) == (6, 1)


@pytest.mark.parametrize("stop", [2, 5, 6, 7])
def test_a_resume_within_a_schedule_is_exact(tmp_path, stop):
    def run(folder, *callbacks, resume=False):
        sizes = {"batch_size": {0: 8, 1: 16}}
        make(Limited(dropout=0.3), callbacks=callbacks, output_dir=folder, resume=resume, **sizes).train()
        return (folder / "checkpoints/last/model.safetensors").read_bytes()

    expected = run(tmp_path / "whole")
    run(tmp_path / "cut", StopAt(stop))
    assert run(tmp_path / "cut", resume=True) == expected


@pytest.mark.parametrize("bad", [{}, {1: 8}, {0: 8, 2: 0}])
def test_schedules_that_cannot_be(bad):
    with pytest.raises(ConfigError, match="batch_size"):
        make(batch_size=bad)


def test_a_schedule_counted_in_epochs_needs_equal_epochs():
    step_decay = {"name": "step_decay", "step_size": 1, "unit": "epoch"}
    make(scheduler=step_decay)
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        make(scheduler=step_decay, batch_size={0: 8, 1: 16})


def test_streams_have_one_size():
    with pytest.raises(Exception, match="streams have batches of one size"):
        make(source=Streams({"a": data(), "b": data()}), batch_size={0: 8, 1: 16})
