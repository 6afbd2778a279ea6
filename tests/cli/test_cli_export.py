"""`etude export`: every format from the command line, and refusals in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from data_files import write_csv, write_lines
from safetensors.torch import load_file

from etude import load_model

MODELS = {
    "csv": (write_csv, {"name": "mlp", "hidden": [8]}, {"name": "csv", "path": "d.csv", "target": "y"}),
    "jsonl": (
        write_lines,
        {"name": "text_classifier", "d_model": 16, "n_layers": 1, "n_heads": 2},
        {"name": "jsonl", "path": "d.jsonl", "max_length": 20},
    ),
}


@pytest.fixture(params=MODELS)
def trained(request, etude, tmp_path, monkeypatch):
    """A run of a config in the folder `run`."""
    monkeypatch.chdir(tmp_path)
    write, model, data = MODELS[request.param]
    write()
    config = {"model": model, "data": data, "training": {"epochs": 1, "batch_size": 16, "device": "cpu"}}
    Path("c.yaml").write_text(yaml.safe_dump(config))
    outcome = etude("train", "c.yaml", "--run-dir", "run", "-q")
    assert outcome.code == 0, outcome.err
    return data["name"]


def inputs(name):
    """Inputs of any batch size, by plain torch."""
    if name == "csv":
        return (torch.rand(7, 4),)
    ids = torch.arange(7 * 8).view(7, 8) % 200 + 1
    return ids, torch.ones_like(ids)


def test_every_format(trained, etude):
    model = load_model("run")
    for to in ("state_dict", "hub", "torch"):
        outcome = etude("export", "run", "--to", to)
        assert outcome.code == 0, outcome.err
        assert str(Path("run/export") / to) in outcome.out
    model.load_state_dict(load_file("run/export/state_dict/model.safetensors"), strict=True)
    given = inputs(trained)
    expected = model(*given)
    program = torch.export.load("run/export/torch/model.pt2").module()
    torch.testing.assert_close(program(*given), expected, rtol=1e-4, atol=1e-5)
    config = json.loads(Path("run/export/hub/config.json").read_text())
    assert set(config["id2label"].values()) in ({"yes", "no"}, {"good", "bad"})
    assert config["section"]["name"] == MODELS[trained][1]["name"]


def test_onnx(trained, etude):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    outcome = etude("export", "run", "--to", "onnx", "--out", "here", "--weights", "last")
    assert outcome.code == 0, outcome.err
    assert "difference" in outcome.out
    assert "dynamo" in outcome.out
    session = runtime.InferenceSession("here/model.onnx", providers=["CPUExecutionProvider"])
    given = inputs(trained)
    names = [one.name for one in session.get_inputs()]
    (found,) = session.run(None, {name: one.numpy() for name, one in zip(names, given, strict=True)})
    np.testing.assert_allclose(found, load_model("run", "last")(*given).detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("trained", ["csv"], indirect=True)
def test_what_cannot_be_exported_leaves_nothing(trained, etude):
    module = (
        "import torch\nfrom etude import register\n@register('model', 'branches')\nclass Branches(torch.nn.Linear):\n"
    )
    module += "    def __init__(self):\n        super().__init__(4, 2)\n"
    module += "    def forward(self, x):\n        return super().forward(x if float(x.sum()) > 0 else -x)\n"
    Path("branches.py").write_text(module)
    config = yaml.safe_load(Path("c.yaml").read_text()) | {"model": "branches", "imports": ["branches.py"]}
    Path("b.yaml").write_text(yaml.safe_dump(config))
    assert etude("train", "b.yaml", "--run-dir", "other", "-q").code == 0
    outcome = etude("export", "other", "--to", "torch")
    assert outcome.code == 2
    assert "Branches" in outcome.err
    assert not Path("other/export/torch").exists()


def test_refusals_are_one_line(run, etude):
    for arguments, named in ((["--to", "keras"], "keras"), (["--to", "hub", "--weights", "77"], "77")):
        outcome = etude("export", run, *arguments)
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome
        assert named in outcome.err
    assert not (run / "export").exists()


@pytest.mark.parametrize("to", ["state_dict", "hub"])
def test_overrides_that_would_be_ignored_are_refused(etude, tmp_path, to):
    outcome = etude("export", str(tmp_path), "model.hidden=[4]", "--to", to)
    assert outcome.code == 2
    assert "model.hidden" in outcome.err


def test_files_that_no_export_has_written_stay(run, etude, tmp_path):
    for name in ("README.md", "config.json"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        (folder / name).write_text("mine")
        outcome = etude("export", run, "--to", "hub", "--out", folder)
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome
        assert name in outcome.err
        assert (folder / name).read_text() == "mine"
        assert [path.name for path in folder.iterdir()] == [name]


def test_only_what_was_written_is_listed(run, etude, tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "notes.txt").write_text("mine")
    for _ in range(2):  # its own files are replaced
        outcome = etude("export", run, "--to", "hub", "--out", tmp_path / "hub")
        assert outcome.code == 0, outcome.err
        assert "README.md, config.json, model.safetensors" in outcome.out
        assert "notes" not in outcome.out
