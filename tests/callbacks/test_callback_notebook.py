"""The display in a notebook: one output of a cell that changes in place, and no lines."""

import math
import re
import sys
import types
import xml.etree.ElementTree as ET

import pytest
from callback_life import Life

from etude.callbacks import CallbackList, ProgressDisplay
from etude.callbacks.notebook import curves, in_notebook, page
from etude.callbacks.progress_lines import EpochRow, View


class Notebook:
    """Stands in for IPython: outputs by display id, each with all that it has shown."""

    def __init__(self, kernel=True, error=None):
        self.outputs, self.error = {}, error
        self.shell = types.SimpleNamespace(kernel=object() if kernel else None)

    def display(self, bundle, raw, display_id):
        assert raw
        assert display_id not in self.outputs
        self.outputs[display_id] = [bundle]
        if self.error is not None:
            raise self.error

    def update_display(self, bundle, raw, display_id):
        self.outputs[display_id].append(bundle)

    def install(self, monkeypatch):
        package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        package.get_ipython = lambda: self.shell
        module.display, module.update_display = self.display, self.update_display
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", module)
        return self

    @property
    def shown(self):
        (output,) = self.outputs.values()
        return [bundle["text/html"] for bundle in output]


def words(html):
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_a_run_is_one_output_without_lines(tmp_path, monkeypatch, capsys):
    notebook = Notebook().install(monkeypatch)
    Life(tmp_path, total_epochs=3).whole(ProgressDisplay())
    assert capsys.readouterr().out == ""
    first, last = notebook.shown[0], notebook.shown[-1]
    assert "epoch 1/3" in words(first)
    assert "<svg" not in first
    assert re.search(r"★ 1 1\.0000 .* 2 0\.5000 .* finished in", words(last))
    (svg,) = re.findall(r"<svg.*</svg>", last)
    ET.fromstring(svg)
    assert svg.count("<polyline") == 2
    for html in notebook.shown:
        ET.fromstring(html)


def test_an_interrupted_run_says_so_and_keeps_its_output(tmp_path, monkeypatch):
    notebook = Notebook().install(monkeypatch)
    life, callbacks = Life(tmp_path), CallbackList([ProgressDisplay()])
    callbacks.on_train_begin(life.run_info())
    life.epoch(callbacks)
    callbacks.on_exception(KeyboardInterrupt())
    assert "interrupted after" in words(notebook.shown[-1])
    count = len(notebook.shown)
    callbacks.on_log({"loss": 1.0})
    assert len(notebook.shown) == count


def test_a_notebook_that_cannot_be_reached_ends_the_display_and_not_the_run(tmp_path, monkeypatch, capsys):
    notebook = Notebook(error=RuntimeError("socket closed")).install(monkeypatch)
    Life(tmp_path, total_epochs=2).whole(ProgressDisplay())
    assert len(notebook.shown) == 1
    assert capsys.readouterr().out == ""


def test_updates_are_rare(tmp_path, monkeypatch):
    notebook = Notebook().install(monkeypatch)
    monkeypatch.setattr("etude.callbacks.progress.MAX_SHARE", 1.0)
    life, display = Life(tmp_path, total_epochs=1), ProgressDisplay(refresh_s=0.0)
    callbacks = CallbackList([display])
    callbacks.on_train_begin(life.run_info())
    begin = len(notebook.shown)
    for _ in range(100):
        callbacks.on_step_end(None)
    assert len(notebook.shown) - begin <= 2  # no more than one every half second


@pytest.mark.parametrize("kernel", [True, False])
def test_only_a_kernel_is_a_notebook(monkeypatch, kernel):
    Notebook(kernel).install(monkeypatch)
    assert in_notebook() is kernel


def test_without_ipython_nothing_is_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    Life(tmp_path, total_epochs=1).whole(ProgressDisplay())
    assert "epoch 1/1 done" in capsys.readouterr().out
    assert "IPython" not in sys.modules


def test_a_given_stream_gets_lines_in_a_notebook_too(tmp_path, monkeypatch):
    import io

    notebook, stream = Notebook().install(monkeypatch), io.StringIO()
    Life(tmp_path, total_epochs=1).whole(ProgressDisplay(stream=stream))
    assert notebook.outputs == {}
    assert "epoch 1/1 done" in stream.getvalue()


def test_names_are_escaped():
    evil = "<img src=x onerror=alert(1)>"
    view = View(evil, evil, phase=evil, notices=[evil], note=evil, record={evil: 1.0})
    view.rows = [EpochRow(0, 1.0, {evil: 1.0, "loss": 2.0}, evil)]
    for view.outcome in ("", "finished"):
        html, _ = page(view)
        ET.fromstring(html)
        assert "<img" not in html


@pytest.mark.parametrize("points", [[], [(1, 1.0)]])
def test_too_few_values_are_no_curve(points):
    assert curves({"loss": points}) == ""


@pytest.mark.parametrize("values", [(1.0, 1.0), (-1e308, 1e308), (0.0, 5e-324)])
def test_edges_of_curves(values):
    svg = curves({"loss": list(enumerate(values)), "val_loss": [(1, values[0])]})
    numbers = [float(one) for pair in re.findall(r"points='([^']*)'", svg) for one in re.split("[, ]", pair)]
    assert all(math.isfinite(one) and 0 <= one <= 480 for one in numbers)


CELL = """
import signal, torch
from torch import nn
from etude import Trainer
from etude.callbacks import Callback
class Stop(Callback):
    def on_log(self, record):
        if {stop} and record["step"] == 12:
            signal.raise_signal(signal.SIGINT)
data = (torch.randn(64, 4), torch.randint(0, 3, (64,)))
config = dict(epochs=3, batch_size=8, device="cpu", log_interval=1)
try:
    Trainer(nn.Linear(4, 3), data, data, config=config, callbacks=[Stop()]).train()
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize(("stop", "says"), [(False, "finished in"), (True, "interrupted|stopped after")])
def test_a_real_kernel(tmp_path, stop, says):
    pytest.importorskip("ipykernel")
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cell = nbformat.v4.new_code_cell(CELL.format(stop=stop))
    book = nbformat.v4.new_notebook(cells=[cell])
    client.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [output.output_type for output in cell.outputs]
    assert kinds.count("display_data") == 1
    html = next(output.data["text/html"] for output in cell.outputs if output.output_type == "display_data")
    assert re.search(says, words(html))
    assert "<svg" in html
    assert not any("epoch" in output.get("text", "") for output in cell.outputs)
