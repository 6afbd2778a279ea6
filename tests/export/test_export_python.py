"""Programs of runs made in Python: traced with two samples of their first batch, which the run folder keeps."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import etude.checkpoint.example as kept
from etude import Trainer, load_model
from etude.core import CheckpointError, ConfigError
from etude.core.run_layout import EXAMPLE
from etude.export import export_run
from etude.losses import SupervisedTask
from etude.models import MLP
from forked_python import run_python

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def trained(folder, data=(X, Y), model=None, **others):
    model = MLP(4, [8], 3) if model is None else model
    Trainer(model, data, config={"epochs": 1, "device": "cpu"}, output_dir=folder, progress=False, **others).train()
    return folder


def program(path):
    return torch.export.load(path).module()


def test_a_program_of_torch(tmp_path):
    run = trained(tmp_path / "run")
    exported = export_run(run, "torch")
    inputs = torch.randn(7, 4)
    torch.testing.assert_close(program(exported.files[0])(inputs), load_model(run)(inputs))
    assert "on the run's data in batches of 2, 1" in exported.words[1]


def test_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    run = trained(tmp_path / "run")
    session = runtime.InferenceSession(str(export_run(run, "onnx").files[0]))
    inputs = torch.randn(7, 4)
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), load_model(run)(inputs).detach(), rtol=1e-4, atol=1e-5)


class ByName(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.width = width
        self.layer = nn.Linear(4, width)

    def forward(self, features, scale=None):
        return self.layer(features) * (1.0 if scale is None else scale)


def test_batches_by_name(tmp_path):
    batches = [{"features": X, "scale": Y[:, None] + 1.0, "labels": Y, "source": "a file"}]
    (path,) = export_run(trained(tmp_path / "run", batches, ByName()), "torch").files
    features, scale = torch.randn(5, 4), torch.rand(5, 1)
    expected = load_model(tmp_path / "run")(features, scale)
    torch.testing.assert_close(program(path)(features, scale), expected)


def test_batches_of_one_sample(tmp_path):
    run = trained(tmp_path / "run", [(X[:1], Y[:1]), (X[1:2], Y[1:2])])
    (path,) = export_run(run, "torch").files
    torch.testing.assert_close(program(path)(X), load_model(run)(X))


def test_large_samples_are_kept_as_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST_BYTES", 20)
    run = trained(tmp_path / "run")
    assert (run / EXAMPLE).stat().st_size < 500
    exported = export_run(run, "torch")
    torch.testing.assert_close(program(exported.files[0])(X), load_model(run)(X))
    assert "made-up" in exported.words[1]


def test_the_example_is_two_samples_of_the_first_batch(tmp_path):
    run = trained(tmp_path / "run", [(X[:5], Y[:5]), (X[5:], Y[5:])])
    (inputs, labels), is_real = kept.load_example(run)
    assert torch.equal(inputs, X[:2])
    assert torch.equal(labels, Y[:2])
    assert is_real


def test_an_example_of_a_run_that_failed_is_replaced(tmp_path):
    (tmp_path / "run").mkdir()
    kept.save_example((X[:2, :1], Y[:2]), tmp_path / "run")
    (inputs, _), _ = kept.load_example(trained(tmp_path / "run"))
    assert inputs.shape == (2, 4)


def test_the_trained_weights_do_not_depend_on_the_example(tmp_path):
    weights = []
    for folder in (tmp_path / "run", None):
        torch.manual_seed(0)
        model = MLP(4, [8], 3)
        trained(folder, model=model)
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@dataclass
class Opaque:
    """A batch that holds more than data."""

    inputs: torch.Tensor
    labels: torch.Tensor
    other: object


class OfObjects(ByName):
    def forward(self, batch):
        return self.layer(batch.inputs)


def test_what_cannot_be_kept_is_said_at_the_export(tmp_path):
    run = trained(tmp_path / "run", [Opaque(X, Y, object())], OfObjects(), loss=lambda output, batch: output.mean())
    with pytest.raises(ConfigError, match=r"save_program\("):
        export_run(run, "torch")


class OwnCall(SupervisedTask):
    def predict(self, model, batch):
        return super().predict(model, batch).softmax(-1)


def test_a_task_that_calls_the_model_in_its_own_way_has_no_plain_program(tmp_path):
    assert not (trained(tmp_path / "run", task=OwnCall()) / EXAMPLE).exists()


def test_overrides_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path=x"):
        export_run(trained(tmp_path / "run"), "torch", overrides=["data.path=x"])


@pytest.mark.parametrize("shape", [[2**20, 2**20], [-1], ["2"]])
def test_a_damaged_example_is_one_line(tmp_path, shape):
    run = trained(tmp_path / "run")
    tree = kept.pack({"etude.large": shape, "dtype": "float32"})
    with (run / EXAMPLE).open("wb") as file:
        for piece in kept.safetensors_pieces(tree[0], {"structure": kept.json.dumps(tree[1])}):
            file.write(piece)
    with pytest.raises(CheckpointError, match=EXAMPLE):
        export_run(run, "torch")
    (run / EXAMPLE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=EXAMPLE):
        export_run(run, "torch")


def test_the_command_imports_the_class_of_a_script(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine(torch.nn.Module):\n"
        "    def __init__(self, width=3):\n"
        "        super().__init__()\n"
        "        self.width, self.layer = width, torch.nn.Linear(4, width)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch, etude, mine\n"
        "data = torch.randn(12, 4), torch.arange(12) % 3\n"
        "config = {'epochs': 1, 'device': 'cpu'}\n"
        "etude.Trainer(mine.Mine(), data, config=config, output_dir='run', progress=False).train()\n"
    )
    command = "import sys; sys.path.insert(0, '.'); from etude.cli.main import main; sys.exit(main())"
    made = run_python("train.py", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    arguments = ["export", "run", "--to", "torch"]
    refused = run_python("-c", command, *arguments, cwd=tmp_path)
    assert (refused.returncode, "import_class" in refused.stderr) == (2, True), refused.stderr
    arguments.append("--import-class")
    done = run_python("-c", command, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert program(tmp_path / "run/export/torch/model.pt2")(torch.zeros(5, 4)).shape == (5, 3)
