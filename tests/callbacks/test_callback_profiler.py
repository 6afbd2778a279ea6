"""The profiler: parts add up to the step, are those that were made slow, and change nothing; the trace; the advice."""

import gzip
import json
import time

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.callbacks import Callback, Profiler
from etude.callbacks.profiler import _crowded
from etude.callbacks.profiling import timeline
from etude.callbacks.profiling.advice import Facts, advise
from etude.callbacks.profiling.profile import Profile
from etude.callbacks.profiling.timeline import Timeline
from etude.core import ConfigError
from etude.core.spans import is_watched, needs_eager_steps, span, watch
from etude.engine.capture import Capture
from stub_recorder import RunAgain

BUSY_MS = 12.0
CONFIG = {"epochs": 2, "batch_size": 8, "log_interval": 5, "num_threads": 1}


class Clock:
    """A clock that goes on only when work is done, so that times are exact on a busy machine."""

    now = 0.0

    def perf_counter(self):
        return self.now

    process_time = perf_counter


CLOCK = Clock()


def busy(ms=BUSY_MS):
    """Work for a while."""
    CLOCK.now += ms / 1e3


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(timeline, "time", CLOCK)


class Slow(torch.autograd.Function):
    """The identity, slow forward and twice as slow backward."""

    @staticmethod
    def forward(ctx, x):
        busy()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        busy(2 * BUSY_MS)
        return gradient


class SlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x):
        return Slow.apply(self.layers(x))


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        busy()
        return super().step(closure)


class SlowData(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        busy(BUSY_MS / 8)  # eight samples make a batch
        return torch.full((4,), float(index)), index % 3


class SlowLog(Callback):
    def on_log(self, record):
        busy(5 * BUSY_MS)


def data(samples=400):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 4, generator=generator), torch.arange(samples) % 3


def net(dropout=0.2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    assert not needs_eager_steps()


def test_every_part_has_the_time_that_it_takes(clock):
    model, profiler = SlowNet(), Profiler(start=2, steps=10)
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model, SlowData(), config=CONFIG | {"epochs": 1}, optimizer=optimizer, callbacks=[profiler, SlowLog()],
        progress=False,
    )  # fmt: skip
    trainer.train()
    parts = profiler.profile.parts
    times = {"data": 1, "forward": 1, "backward": 2, "optimizer": 1, "logging": 1, "rest": 0}  # it logs every 5 steps
    assert parts == pytest.approx({name: number * BUSY_MS for name, number in times.items()})
    assert profiler.profile.each == pytest.approx({"logging": 5 * BUSY_MS})
    assert profiler.profile.step_ms == pytest.approx(6 * BUSY_MS)
    assert profiler.profile.share("data") == pytest.approx(1 / 6)


def test_parts_add_up_to_the_time_of_the_steps():
    class Times(Callback):
        def __init__(self):
            super().__init__()
            self.at, self.steps = {}, 0

        def on_step_end(self, report):
            self.steps += 1
            self.at[self.steps] = time.perf_counter()

    for _ in range(20):  # another process may take the CPU between the two clocks
        clock, profiler = Times(), Profiler(start=10, steps=80)
        Trainer(net(), data(1600), config=CONFIG, callbacks=[profiler, clock], progress=False).train()
        measured = 1e3 * (clock.at[90] - clock.at[10]) / 80
        if abs(profiler.profile.step_ms - measured) < 0.1 * measured:
            return
    pytest.fail(f"{profiler.profile.step_ms} ms, measured {measured}")


@pytest.mark.parametrize("capture", [False, True])
def test_weights_are_those_without_a_profile(capture, tmp_path):
    found = []
    for callbacks in ([], [Profiler(start=8, steps=5)]):
        model = net(dropout=0.0 if capture else 0.2)  # the stand-in for CUDA graphs records no random numbers
        trainer = Trainer(
            model, data(), config=CONFIG, callbacks=callbacks, progress=False, output_dir=tmp_path / str(len(found))
        )
        if capture:
            trainer.step.capture = Capture(trainer.step, RunAgain(trainer.step, 1.0, True))
        trainer.train()
        found.append((tmp_path / str(len(found)) / "checkpoints/last/model.safetensors").read_bytes())
        assert not callbacks or callbacks[0].profile is not None
        assert not callbacks or bool(callbacks[0].profile.eager) == capture
    assert found[0] == found[1]


def test_captured_steps_are_timed_as_they_are_and_their_parts_in_eager_ones():
    profiler = Profiler(start=8, steps=6)
    trainer = Trainer(net(dropout=0.0), data(), config=CONFIG, callbacks=[profiler], progress=False)
    trainer.step.capture = Capture(trainer.step, RunAgain(trainer.step, 1.0, True))
    trainer.train()
    assert profiler.profile.parts["captured"] > 0
    assert min(profiler.profile.eager[name] for name in ("forward", "backward", "optimizer")) > 0
    assert "captured step" in str(profiler.profile)
    assert "without CUDA graphs" in str(profiler.profile)


def test_the_files(tmp_path):
    profiler = Profiler(start=3, steps=4)
    Trainer(net(), data(), config=CONFIG, callbacks=[profiler], progress=False, output_dir=tmp_path / "run").train()
    folder = tmp_path / "run/profile"
    with gzip.open(folder / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    assert {"data", "forward", "backward", "optimizer"} <= {event["name"] for event in ranges}
    assert sum(event["name"] == "forward" for event in ranges) == 3
    numbers = json.loads((folder / "profile.json").read_text())
    assert numbers["step_ms"] == pytest.approx(sum(numbers["parts"].values()))
    assert "steps 4 to 7 on cpu" in (folder / "profile.txt").read_text()
    # the operators are those of torch's own sums, by the events of its trace
    on_cpu = [event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::addmm"]
    (products,) = [one for one in numbers["operators"] if one["name"] == "aten::addmm"]
    assert products["calls"] * 3 == len(on_cpu)
    assert 0 < products["ms"] * 3e3 <= sum(event["dur"] for event in on_cpu) * 1.05
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "profile" and "ms per step" in str(event) for event in events)


def test_a_run_that_is_too_short_says_so(caplog):
    for start in (120, 90, 70):  # before its first stage, its last step, and the trace
        caplog.clear()
        profiler = Profiler(start=start, steps=30)
        Trainer(net(), data(), config=CONFIG | {"epochs": 2}, callbacks=[profiler], progress=False).train()
        assert profiler.profile is None
        assert f"needs {start + 33} steps" in caplog.text
    profiler = Profiler(start=67, steps=30)
    Trainer(net(), data(), config=CONFIG | {"epochs": 2}, callbacks=[profiler], progress=False).train()
    assert profiler.profile is not None


def test_two_profiles_of_the_same_steps(caplog):
    first, second = Profiler(start=2, steps=9), Profiler(start=5, steps=1, folder="second")
    Trainer(net(), data(), config=CONFIG, callbacks=[first, second], progress=False).train()
    assert first.profile.parts["forward"] > 0
    assert second.profile is None
    assert "another profile" in caplog.text


def test_an_error_ends_the_profile():
    class Fail(Callback):
        def on_log(self, record):
            raise RuntimeError("broken")

    for start in (3, 2):  # in the timed steps, and in those that are traced
        profiler = Profiler(start=start, steps=1)
        with pytest.raises(RuntimeError, match="broken"):
            Trainer(net(), data(), config=CONFIG, callbacks=[profiler, Fail()], progress=False).train()
        assert not is_watched()
    Trainer(net(), data(), config=CONFIG, callbacks=[Profiler(start=1, steps=1)], progress=False).train()


def test_resumed_before_and_after_the_profiled_steps(tmp_path, caplog):
    def run(epochs, **options):
        profiler = Profiler(start=60, steps=5)
        config = CONFIG | {"epochs": epochs}
        Trainer(
            net(), data(), config=config, callbacks=[profiler], progress=False, output_dir=tmp_path / "run", **options
        ).train()
        return profiler.profile

    assert run(1) is None
    assert run(2, resume=True).first == 61
    before = (tmp_path / "run/profile/profile.json").read_bytes()
    assert run(3, resume=True) is None
    assert (tmp_path / "run/profile/profile.json").read_bytes() == before
    assert "nothing is profiled" not in caplog.text
    (tmp_path / "run/profile/profile.txt").unlink()
    assert run(4, resume=True) is None
    assert "nothing is profiled" in caplog.text


def test_resumed_at_the_step_after_which_it_begins(tmp_path, caplog):
    for epochs in (1, 2):
        config, profiler = CONFIG | {"epochs": epochs}, Profiler(start=50, steps=5)
        options = {"progress": False, "output_dir": tmp_path / "run", "resume": epochs == 2}
        Trainer(net(), data(), config=config, callbacks=[profiler], **options).train()
    assert "the run continues after step 50, so nothing is profiled" in caplog.text


@pytest.mark.parametrize("arguments", [{"start": 0}, {"steps": 0}])
def test_mistakes(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        Profiler(**arguments)


def test_inner_parts_are_not_counted_twice(clock):
    times = Timeline(torch.device("cpu"))
    times.begin()
    watch(times.span)
    with span("data"):
        busy(4)
        with span("transfer"):
            busy(8)
        busy(4)
    with span("validation"), span("transfer"):  # its own
        busy(3)
    watch(None)
    busy(1)
    times.end()
    assert times.totals_ms() == pytest.approx({"rest": 1, "data": 8, "transfer": 8, "validation": 3})


# --- advice, by numbers


def profile(**parts):
    usual = {"data": 0.0, "forward": 3.0, "backward": 6.0, "optimizer": 1.0, "rest": 0.0}
    given = {name: parts.pop(name) for name in [*usual, "transfer", "logging", "saving", "captured"] if name in parts}
    return Profile("cuda:0", 1, 20, usual | given, **parts)


GPU = Facts(is_cuda=True, precision="bf16", is_compiled=True, cores=16, threads=8)


def changes(measured, facts):
    return {one.change: round(one.saves, 3) for one in advise(measured, facts)}


def workers(number):
    return f"training.num_workers={number} training.persistent_workers=true"


@pytest.mark.parametrize(
    ("measured", "facts", "expected"),
    [
        (profile(matrix_ms=9.5), GPU, {}),
        (profile(), Facts(cores=2, threads=2), {}),
        # 10 ms of work and 7 of waiting: a worker takes 7 ms for a batch, and then the steps do not wait
        (profile(data=7.0), Facts(source="dataset", cores=8, threads=8), {workers(1): 0.412}),
        (profile(data=40.0), Facts(source="dataset", cores=8, threads=8), {workers(4): 0.8}),
        (profile(data=40.0), Facts(source="dataset", cores=2, threads=2), {workers(2): 0.6}),
        (
            profile(data=10.0),
            Facts(source="dataset", num_workers=2, cores=8, threads=8),
            {workers(4): 0.5},
        ),
        (profile(data=10.0), Facts(source="dataset", num_workers=8, cores=8, threads=8), {}),
        (
            profile(data=10.0),
            Facts(source="torch", cores=8, threads=8),
            {"num_workers=1, persistent_workers=True of the DataLoader": 0.5},
        ),
        (profile(data=2.5), Facts(source="memory", cores=8, threads=8), {"training.prefetch=2": 0.2}),
        (profile(data=2.5), Facts(source="memory", prefetch=2, cores=8, threads=8), {}),
        (profile(data=10.0), Facts(source="other", cores=8, threads=8), {}),
        (profile(data=10.0, busy_cores=1.9), Facts(source="dataset", cores=2, threads=2), {}),
        # 30 ms of work of one core, in 20 ms: two cores need at least 15
        (
            profile(data=10.0, busy_cores=1.5),
            Facts(source="dataset", cores=2, threads=2),
            {workers(1): 0.25},
        ),
        (
            profile(data=10.0, busy_cores=1.5),
            Facts(source="memory", cores=2, threads=2),
            {"training.prefetch=2": 0.25},
        ),
        (profile(data=0.4), Facts(source="dataset", cores=8, threads=8), {}),
        (
            profile(logging=0.75, intervals={"logging": 1.0}),
            Facts(cores=1),
            {"training.log_interval=10": 0.063},
        ),
        (
            profile(saving=2.5, intervals={"saving": 10.0}),
            Facts(cores=1, save_every_steps=10),
            {"training.save_every_steps=100": 0.18},
        ),
        (
            profile(saving=2.5, intervals={"saving": 7.0}),
            Facts(cores=1, checkpoint_interval=2),
            {"training.checkpoint_interval=20": 0.18},
        ),
        (profile(optimizer=6.0), Facts(cores=1, can_fuse=True), {"optimizer.kernel=fused (fused=True in Python)": 0.2}),
        (profile(busy_cores=2.0), Facts(cores=8, threads=2), {"training.num_threads=8": 0.75}),
        (profile(busy_cores=0.9), Facts(cores=8, threads=2), {}),
    ],
)  # fmt: skip
def test_advice(measured, facts, expected):
    assert changes(measured, facts) == expected


@pytest.mark.parametrize(
    ("measured", "facts", "expected"),
    [
        (profile(transfer=2.5, matrix_ms=10), {"pin_memory": False}, {"training.pin_memory=true": 0.2}),
        (profile(transfer=2.5, matrix_ms=10), {"source": "memory"}, {"training.prefetch=2": 0.2}),
        (profile(matrix_ms=8.0), {"precision": "fp32", "has_bf16": True}, {"training.precision=bf16": 0.4}),
        (
            profile(matrix_ms=8.0),
            {"precision": "fp32", "has_bf16": True, "is_tf32": False},
            {
                "training.precision=bf16 (or TF32: torch.set_float32_matmul_precision('high') in your program)": 0.72,
            },
        ),
        (profile(matrix_ms=8.0), {"precision": "fp32"}, {}),
        (profile(matrix_ms=5.0, other_ms=5.0), {"is_compiled": False}, {"training.compile=step": 0.5}),
        (profile(matrix_ms=4.0), {"capture": "off"}, {"training.capture=auto": 0.6}),
        (
            profile(matrix_ms=4.0),
            {"batch_size": 32, "free_memory": 0.9},
            {"training.batch_size=64 (another training: more samples per step)": 0.6},
        ),
        (profile(matrix_ms=4.0), {"batch_size": 32, "free_memory": 0.2}, {}),
    ],
)
def test_advice_for_a_gpu(measured, facts, expected):
    usual = {
        "is_cuda": True,
        "precision": "bf16",
        "is_compiled": True,
        "cores": 16,
        "threads": 16,
    }
    assert changes(measured, Facts(**usual | facts)) == expected


def test_a_crowded_machine_is_named(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (40.0, 1.0, 1.0))
    monkeypatch.setattr("etude.callbacks.profiler._cores", lambda: 4)
    assert "load 40.0 on 4 cores" in _crowded(threads=4)
    assert _crowded(threads=64) == ""  # they are its own
    assert str(profile(warning="crowded")).endswith("\ncrowded")


def test_words():
    measured = profile(data=7.0)
    measured.advice = advise(measured, Facts(source="dataset", cores=8, threads=8))
    assert (
        "data wait is 41% of a step: training.num_workers=1 training.persistent_workers=true would save up to 41%"
        in str(measured)
    )
    assert "no setting is known to make these steps faster; most of their time is backward: 60%" in str(profile())
