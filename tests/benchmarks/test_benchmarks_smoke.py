"""Every benchmark runs at its tiny size, where no peer can be imported, and its tables say what they should."""

import doctest
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    advice,
    counters,
    csv_loading,
    dashboard,
    meaningful,
    multi_task,
    overhead,
    resume,
    startup,
    table,
    token_loader,
    token_peers,
    token_race,
    work,
)
from forked_python import run_python

ROOT = Path(__file__).parents[2]

BROKEN = {
    "accelerate": "AttributeError('no dtensor here')",
    "datasets": "KeyError('arrow')",
    "grain": "SystemExit('needs another Python')",
    "ignite": "OSError('libtorch_cuda.so: cannot open shared object file')",
    "lightning": "ImportError('cannot import name x from y')",
    "pandas": "ImportError('numpy of another version')",
    "polars": "ImportError('needs another processor')",
    "pyarrow": "OSError('libarrow.so: cannot open shared object file')",
    "litdata": "RuntimeError('operator torchvision::nms does not exist')",
    "torchdata": "ModuleNotFoundError('no module', name='something_else')",
    "torchjd": "ValueError('made for another torch')",
    "transformers": "TypeError('metaclass conflict')",
}
"""What importing each peer raises: as wheels do that do not fit the torch beside them."""


def break_peers(folder):
    """Return an environment in which every peer is installed and none can be imported."""
    for module, error in BROKEN.items():
        package = folder / "broken" / module
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise {error}\n")
    return os.environ | {"PYTHONPATH": f"{folder / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def run(name, folder, peers=()):
    """Return the rows of each table, less those of the named peers, which have to say why they were not run."""
    file = folder / f"{name}.json"
    done = run_python("-m", f"benchmarks.{name}", "--quick", "--json", file, cwd=ROOT, env=break_peers(folder))
    assert done.returncode == 0, done.stderr
    return tables(name, file, done.stdout, peers)


def tables(name, file, printed, peers=()):
    report = json.loads(file.read_text())
    assert report["benchmark"] == name
    assert report["environment"]["versions"]["torch"].startswith("2.")
    for one in report["tables"]:
        assert one["title"] in printed
        assert all(str(next(iter(row.values()))) in printed for row in one["rows"])
    absent = {
        next(iter(row.values())): row for one in report["tables"] for row in one["rows"] if table.NOT_RUN in row
    }
    assert set(absent) == set(peers)
    for row in absent.values():
        assert any(error.partition("(")[0] in row[table.NOT_RUN] for error in BROKEN.values()), row
        assert row[table.NOT_RUN] in printed
    return [[row for row in one["rows"] if table.NOT_RUN not in row] for one in report["tables"]]


def test_overhead(tmp_path):
    for rows in run("overhead", tmp_path, {one.name for one in overhead.PEERS}):
        assert [row["loop"] for row in rows] == [one.name for one in overhead.OWN]
        assert all(row["µs/step"] > 0 and row["CPU µs"] > 0 for row in rows)
        assert all(row["pairs"] == 1 for row in rows[1:])


@pytest.mark.slow
def test_resume(tmp_path):
    stopped, killed = run("resume", tmp_path, resume.PEERS)
    for row in stopped:
        assert row["batches right"] == row["exact steps"] == row["of"] == row["run"] > 0
    assert stopped[0]["of"] == resume.STEPS - resume.SAVED_AT
    assert killed[0]["killed"] == killed[0]["exact"] == 2
    assert killed[0]["resume failed"] == killed[0]["other weights"] == 0


@pytest.fixture
def run_in_forks(tmp_path, monkeypatch, capfd):
    """Run a benchmark in this process, and the programs that it times as forks of one that has torch."""

    def call(module, peers):
        env, name = break_peers(tmp_path), module.__name__.rpartition(".")[2]

        def forked(command, check=False, **_):
            done = run_python(*(command[1:] if command[0] == sys.executable else command), env=env)
            assert not check or done.returncode == 0, done.stderr
            return done

        monkeypatch.syspath_prepend(tmp_path / "broken")
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=forked, DEVNULL=None))
        module.main(["--quick", "--json", str(tmp_path / "out.json")])
        return tables(name, tmp_path / "out.json", capfd.readouterr().out, peers)

    return call


def test_startup(run_in_forks):
    commands, seeking = run_in_forks(startup, startup.PEERS)
    assert {row["command"] for row in commands} >= {"import torch", "import etude", "etude --help"}
    assert all(row["s"] > 0 for row in commands)
    assert seeking[0]["slowest ms"] >= seeking[0]["median ms"] > 0


@pytest.mark.slow
def test_advice(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(advice, "CPU", {"training.save_every_steps": advice.CPU["training.save_every_steps"]})
    advice.main(["--quick", "--json", str(tmp_path / "out.json")])
    (((row,)),) = tables("advice", tmp_path / "out.json", capfd.readouterr().out)
    assert row["advice"] == "training.save_every_steps=100"
    assert min(row["before"], row["after"], row["at most"]) > 0


def test_dashboard(tmp_path, capfd):
    dashboard.main(["--quick", "--json", str(tmp_path / "out.json")])
    opening, news, long = tables("dashboard", tmp_path / "out.json", capfd.readouterr().out)
    assert all(row["s"] > 0 for row in (*opening[:-1], *long))
    assert 0 < news[0]["median s"] < 1


def test_csv_loading(run_in_forks):
    ((row,),) = run_in_forks(csv_loading, set(csv_loading.READERS) - {csv_loading.WITHOUT})
    assert row["reader"] == csv_loading.WITHOUT
    assert row["s"] > 0
    assert row["CPU s"] > 0


def test_token_loader(tmp_path):
    peers = {one.name for one in token_peers.PEERS if one.needs} | {"StatefulDataLoader, blocks"}
    blocks, documents, packed, seeking = run("token_loader", tmp_path, peers)
    assert len(blocks) == 3 + sum(not one.needs for one in token_peers.PEERS)
    assert len(seeking) == 6
    assert all(row["samples/s"] > 0 for row in (*blocks, *documents, *packed))
    waste = {row["loader"]: row["padding"] for row in documents}
    assert waste["Etude, bucketed"] < 0.1 < 0.4 < waste["Etude"] < 0.5
    assert [row["fill"] == 1.0 for row in packed] == [True, True, False, True]
    assert all(row["slowest ms"] >= row["median ms"] > 0 for row in seeking)


def test_batches_that_are_not_in_the_file_or_not_shuffled_are_reported(tmp_path):
    corpus = token_peers.Corpus(tmp_path / "blocks.bin", tmp_path, 0)
    token_loader.write_tokens(corpus.path, 40 * token_peers.LENGTH)
    peer = next(one for one in token_peers.PEERS if one.name == "torch DataLoader, 0 workers")
    ids, labels = next(peer.batches(corpus))
    token_loader.check_blocks(corpus, peer.name, (ids, labels))
    wrong = (ids.clone(), labels)
    wrong[0][0, 0] = (wrong[0][0, 0] + 1) % 50257
    with pytest.raises(AssertionError, match="not in the file"):
        token_loader.check_blocks(corpus, peer.name, wrong)
    size = token_peers.BATCH_SIZE, token_peers.LENGTH
    tokens = torch.from_numpy(corpus.mapped().astype("int64"))
    in_order = (tokens[: size[0] * size[1]].view(size), tokens[1 : size[0] * size[1] + 1].view(size))
    with pytest.raises(AssertionError, match="does not shuffle"):
        token_loader.check_blocks(corpus, peer.name, in_order)


def test_loaders_take_turns_and_one_that_is_missing_is_named():
    given = []

    def batches(name):
        while True:
            given.append(name)
            yield name

    contenders = [token_race.Contender(name, partial(batches, name)) for name in "abc"]
    contenders.append(token_race.Contender("absent", partial(batches, "absent"), needs=("no_such_module",)))
    contenders.append(token_race.Contender("fails", lambda: 1 / 0, needs=("json",)))
    pairs = token_race.race(contenders, token_race.Pace(3, 0.001), 1, lambda _, batch: None)
    assert {name: len(pairs[name]) for name in "abc"} == {"a": 3, "b": 3, "c": 3}
    turns = [name for name, _ in itertools.groupby(given)]
    assert all(before == "a" for before, name in itertools.pairwise(turns[3:]) if name != "a")
    rows = token_race.rows_of(contenders, pairs | {"b": [(1.0, 4.0), (2.0, 4.0), (9.0, 10.0)]}, "share")
    assert [row.get("share") for row in rows][0::3] == [1.0, None]
    assert rows[1]["share"] == 0.5
    assert rows[3] == {"loader": "absent", table.NOT_RUN: table.NOT_INSTALLED}
    assert "ZeroDivisionError" in rows[4][table.NOT_RUN]


def test_gradient_monitor(tmp_path):
    (rows,) = run("gradient_monitor", tmp_path)
    assert len(rows) == 3
    for row in rows:
        assert row["step µs"] > row["hooks µs"] > 0
        assert row["look µs"] > 0


def test_sinks(tmp_path):
    (rows,) = run("sinks", tmp_path)
    names = [row["sinks"] for row in rows if "step µs" in row or "+µs" in row]
    assert names.count("none") == names.count("prometheus") == 2
    assert sum(name.startswith("all ") for name in names) == 2
    assert all(row["step µs"] > 100 for row in rows if row["sinks"] == "none")


def test_metrics(tmp_path):
    updates, areas, validation = run("metrics", tmp_path, {"torchmetrics, 64 × 10", "torchmetrics, 64 × 20"})
    assert [row["update"].partition(",")[0] for row in updates] == ["Etude", "argmax and bincount"] * 2
    assert [row["AUROC"] for row in areas][:2] == ["Etude, float16", "Etude, float32"]
    assert [row["metrics"].partition(",")[0] for row in validation] == ["none", "accuracy"]


@pytest.mark.slow
def test_multi_task(tmp_path):
    (rows,) = run("multi_task", tmp_path, {"torchjd, pcgrad"})
    assert len(rows) == 2 + len(multi_task.WEIGHTINGS)  # by hand, each weighting, and looking at gradients
    assert rows[0]["× by hand"] == 1.0
    assert all(row["ms/step"] > 0 for row in rows)


@pytest.mark.slow
def test_linear_ce(tmp_path):
    (rows,) = run("linear_ce", tmp_path)
    assert len(rows) == 4
    for plain, chunked in (rows[:2], rows[2:]):
        assert plain["× less"] == plain["× time"] == 1.0
        assert chunked["× less"] > 1.0
        assert min(plain["ms"], chunked["ms"]) > 0


@pytest.mark.slow
def test_meaningful(tmp_path):
    fused, drawn = run("meaningful", tmp_path)
    assert [row["way"].partition(",")[0] for row in fused] == ["plain formula", "fused"] * (len(meaningful.KINDS) + 2)
    assert all(row["ms"] > 0 and row["× faster"] > 0 for row in fused)
    whole, *some = drawn
    assert whole["× of all"] == whole["× of all, with CE"] == 1.0
    errors = [row["gradient error"] for row in some]
    assert errors == sorted(errors, reverse=True)
    assert all(row["gradient error, with CE"] < row["gradient error"] for row in some)


@pytest.mark.parametrize(
    ("name", "arguments"), [("loader", ["--rounds=1", "--samples=2000"]), ("optim", ["--quick"])]
)
def test_others(name, arguments):
    done = run_python("-m", f"benchmarks.{name}", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "etude" in done.stdout


def test_all_benchmarks_are_run_and_a_failure_is_reported(tmp_path, monkeypatch, capfd):
    from benchmarks import __main__ as everything

    commands = []

    def remember(command, **_):
        commands.append(command[2:])
        return subprocess.CompletedProcess(command, returncode=int("startup" in command[2]))

    monkeypatch.setattr(everything.subprocess, "run", remember)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", "--no-peers", "--json", str(tmp_path / "out")])
    assert everything.main() == 1
    assert "failed: startup" in capfd.readouterr().err
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "def main(" in path.read_text()}
    assert {command[0].removeprefix("benchmarks.") for command in commands} == modules - {"__main__", "kills"}
    assert commands[0][1:] == ["--quick", "--no-peers", f"--json={tmp_path / 'out' / 'overhead.json'}"]


def test_a_peer_that_is_missing_is_named_and_no_error():
    absent = overhead.Contestant("Absent", overhead.OWN[0].run, needs=("no_such_module",))
    why = table.missing(absent.needs)
    assert why == table.NOT_INSTALLED
    mark = work.Mark(100.0, 90.0, None)
    slower = work.Mark(125.0, 90.0, None)
    rows = overhead.rows_of((*overhead.OWN[:2], absent), {overhead.PLAIN: [(slower, mark)]}, {"Absent": why})
    assert rows[2] == {"loop": "Absent", table.NOT_RUN: table.NOT_INSTALLED}
    assert rows[1]["+µs"] == 25.0
    assert rows[1]["× plain"] == 1.0
    assert rows[0]["× plain"] == pytest.approx(0.8)
    assert resume.peer_row("Absent", resume.etude, ("no_such_module",))[table.NOT_RUN] == table.NOT_INSTALLED
    assert resume.kill_row("Absent", 1, ("no_such_module",))[table.NOT_RUN] == table.NOT_INSTALLED


def test_a_peer_that_fails_when_it_is_used_is_named_and_no_error(monkeypatch):
    """Some packages import their parts only when these are used."""

    def fails(*_):
        raise RuntimeError("operator torchvision::nms\ndoes not exist" + 1000 * " word")

    row = resume.peer_row("Lazy", fails, ("json",))
    assert "RuntimeError: operator torchvision::nms does not exist" in row[table.NOT_RUN]
    assert len(row[table.NOT_RUN]) < 100
    ended = subprocess.CompletedProcess([], returncode=1, stdout="", stderr="Traceback\n  File\nTypeError: lazy\n")
    monkeypatch.setattr(resume.subprocess, "run", lambda *_, **__: ended)
    assert "TypeError: lazy" in resume.kill_row("Lazy", 1, ("json",))[table.NOT_RUN]
    with pytest.raises(RuntimeError, match="TypeError: lazy"):
        resume.kill_row("Etude", 1)

    class Stage(overhead.Stage):
        def run(self, contestant):
            contestant.run(None)

    stage = Stage(overhead.QUICK, None, None, None, None)
    lazy = overhead.Contestant("Lazy", fails, needs=("json",))
    assert "torchvision" in stage.warm_up([overhead.Contestant("fine", lambda _: None), lazy])["Lazy"]
    with pytest.raises(RuntimeError, match="torchvision"):  # our own loops have no excuse
        stage.warm_up([overhead.Contestant("ours", fails)])


def test_pairs_take_turns_and_their_order_alternates():
    order = []
    names = [overhead.REFERENCE, "a", "b", "rare"]
    contestants = [overhead.Contestant(name, lambda _: None, every=2 if name == "rare" else 1) for name in names]

    class Stage(overhead.Stage):
        def run(self, contestant):
            order.append(contestant.name)
            return work.Mark(1.0, 1.0, None)

    pairs = Stage(overhead.QUICK, None, None, None, None).pairs(contestants, 4)
    assert {name: len(runs) for name, runs in pairs.items()} == {"a": 4, "b": 4, "rare": 2}
    couples = list(zip(order[::2], order[1::2], strict=True))
    assert all((overhead.REFERENCE in couple) and len(set(couple)) == 2 for couple in couples)
    assert {first == overhead.REFERENCE for first, second in couples if "a" in (first, second)} == {True, False}


def test_the_probe_times_whole_steps(monkeypatch):
    now = {"wall": 0.0, "cpu": 0.0, "instructions": 0}
    monkeypatch.setattr(work.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(work.time, "process_time", lambda: now["cpu"])

    class Counter:
        def read(self):
            return now["instructions"]

    probe = work.Probe(warmup=2, num_steps=3, counter=Counter())
    for step in range(7):
        probe()
        now["wall"] += 100.0 if step < 2 else 4e-6  # the warm-up is slow, and not counted
        now["cpu"] += 100.0 if step < 2 else 3e-6
        now["instructions"] += 5000
    per_step = probe.per_step()
    assert per_step.wall == pytest.approx(4.0, rel=1e-4)
    assert per_step.cpu == pytest.approx(3.0, rel=1e-4)
    assert per_step.instructions == 5000


def test_the_counter_counts():
    """The clock of the kernel stands in for instructions, which virtual machines often hide."""
    clock = counters.InstructionCounter(counters.SOFTWARE, counters.TASK_CLOCK)
    before = clock.read()
    if before is None:
        pytest.skip("perf_event_open is not allowed here")
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    assert clock.read() - before > 0.01 * 1e9
    clock.close()
    clock.close()
    assert clock.read() is None


def test_the_terminal_is_one():
    with work.terminal(width=91, height=33):
        assert sys.stdout.isatty()
        assert sys.stderr.isatty()
        assert os.get_terminal_size(sys.stdout.fileno()) == (91, 33)
        sys.stdout.write("drawn\n" * 20_000)  # far more than a terminal holds unless somebody reads it
    assert not sys.stdout.isatty()


def test_a_record_that_differs_is_not_exact():
    straight = [(bytes([step]), bytes([step])) for step in range(resume.STEPS)]
    resumed = straight[resume.SAVED_AT :]
    row = resume.compare("x", straight, resumed)
    assert (row["exact in epoch 1"], row["exact in epoch 2"]) == (15, 20)
    resumed[3] = (resumed[3][0], b"other")
    row = resume.compare("x", straight, resumed)
    assert (row["batches right"], row["exact steps"], row["exact in epoch 1"]) == (35, 34, 14)
    assert resume.compare("x", straight, straight)["exact steps"] == 0


def test_table_text():
    columns = {"name": "", "count": "d", "time": "+.1f", "never": ""}
    rows = [{"name": "a", "count": 3, "time": 1.26}, {"name": "long"}, {"name": "no", table.NOT_RUN: "a long reason"}]
    text = str(table.Table("Title.", columns, "How.", rows))
    assert text.splitlines() == [
        "Title.",
        "",
        "name  count  time",
        "-" * 17,
        "a         3  +1.3",
        "long      –     –",
        "no    a long reason",
        "",
        "How.",
    ]


def test_statistics():
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0]
    assert table.quartiles(values)[1] == statistics.median(values) == table.median(values)
    assert table.median([1.0, None]) is None
    assert table.median([]) is None
    assert doctest.testmod(table).failed == 0
