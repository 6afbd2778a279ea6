"""Programs of torch.export and ONNX give the model's outputs for any batch size, opened by their own libraries."""

import copy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from etude.core import ConfigError
from etude.export import save_onnx, save_program
from etude.models import MLP, CausalTransformerLM, LeNet5
from etude.models.text_classifier import TextClassifier

IDS = torch.arange(48).view(4, 12) % 11


class Forms(nn.Module):
    """Outputs of several forms, and inputs by name."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x, scale=None, flag=True):
        logits = self.layers(x) * (1.0 if scale is None else scale[:, None])
        return {"logits": logits if flag else -logits, "best": logits.argmax(1), "loss": logits.sum()}


MODELS = {
    "lenet5": (lambda: LeNet5(), (torch.rand(4, 1, 28, 28), torch.zeros(4))),
    "mlp": (lambda: MLP(4, [8], 3), torch.rand(5, 4)),
    "forms": (Forms, {"x": torch.rand(4, 4), "scale": torch.rand(4), "labels": torch.zeros(4)}),
    "language model": (lambda: CausalTransformerLM(11, d_model=16, n_layers=1, n_heads=2), {"tokens": IDS}),
    "texts": (
        lambda: TextClassifier(11, 3, d_model=16, n_layers=1, n_heads=2),
        {"input_ids": IDS, "attention_mask": (IDS > 2).long(), "labels": torch.zeros(4)},
    ),
}
INPUTS = {"language model": ("tokens",), "texts": ("input_ids", "attention_mask"), "forms": ("x", "scale")}


def arguments(name, batch, rows):
    """The inputs that the model is called with, as a stranger would prepare them."""
    if isinstance(batch, torch.Tensor):
        return [batch[:rows]]
    if isinstance(batch, tuple):
        return [batch[0][:rows]]
    found = [batch[key][:rows] for key in INPUTS[name]]
    return [found[0][:, :-1]] if name == "language model" else found


def expected(model, name, inputs):
    with torch.no_grad():
        found = copy.deepcopy(model).eval()(*inputs)
    if name == "forms":
        return [found["logits"], found["best"]]
    return [getattr(found, "logits", found)]


@pytest.mark.parametrize("name", MODELS)
def test_torch_export(tmp_path, name):
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    saved = save_program(model, batch, tmp_path / "m.pt2")
    assert model.training
    assert saved.difference < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]
    program = torch.export.load(tmp_path / "m.pt2").module()
    for rows in (1, 3):
        inputs = arguments(name, batch, rows)
        found = program(*inputs)
        found = list(found.values()) if isinstance(found, dict) else [found]
        torch.testing.assert_close(found, expected(model, name, inputs), rtol=1e-4, atol=1e-5)


def test_a_hugging_face_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=11, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    save_program(model, {"input_ids": IDS, "attention_mask": (IDS > 2).long(), "labels": IDS}, tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    ids, mask = IDS[:2, :7], torch.ones(2, 7, dtype=torch.int64)
    torch.testing.assert_close(
        program(ids, mask), model(input_ids=ids, attention_mask=mask).logits, rtol=1e-4, atol=1e-5
    )


def test_a_program_runs_without_etude(tmp_path):
    torch.manual_seed(0)
    model = MODELS["language model"][0]()
    save_program(model, {"tokens": IDS}, tmp_path / "m.pt2")
    code = (
        "import sys, torch; sys.modules['etude'] = None; "
        f"print(torch.export.load({str(tmp_path / 'm.pt2')!r}).module()(torch.zeros(2, 7, dtype=torch.int64)).shape)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert "[2, 7, 11]" in done.stdout, done.stderr


@pytest.mark.parametrize("name", MODELS)
def test_onnx(tmp_path, name):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    saved = save_onnx(model, batch, tmp_path / "m.onnx")
    assert model.training
    assert saved.difference < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == saved.inputs
    for rows in (1, 3):
        inputs = arguments(name, batch, rows)
        found = session.run(None, {key: one.numpy() for key, one in zip(saved.inputs, inputs, strict=True)})
        for one, other in zip(found, expected(model, name, inputs), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_the_older_exporter_is_named(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export = torch.onnx.export

    def only_old(*args, dynamo, **options):
        if dynamo:
            raise RuntimeError("no such operator")
        return export(*args, dynamo=False, **options)

    monkeypatch.setattr(torch.onnx, "export", only_old)
    saved = save_onnx(Forms(), MODELS["forms"][1], tmp_path / "m.onnx")
    assert "older" in saved.exporter
    assert "no such operator" in saved.exporter


class Branches(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


class FixedSize(nn.Module):
    def forward(self, x):
        return x.reshape(4, -1) @ torch.ones(x.numel() // 4, 1)


@pytest.mark.parametrize("model", [Branches(), FixedSize()])
def test_models_that_cannot_be_exported_are_refused(tmp_path, capfd, model):
    with pytest.raises(ConfigError, match=r"Branches|samples|FixedSize"):
        save_program(model, torch.rand(4, 3), tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_a_branch_that_the_older_exporter_fixes_is_reported(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert "boolean" in save_onnx(OnlyBranches(), torch.rand(4, 3), tmp_path / "m.onnx").exporter


class OnlyBranches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else -x


class Masked(nn.Module):
    def forward(self, x):
        return (x * 2).masked_fill(x > 0.5, float("-inf"))


def test_outputs_may_be_masked_with_infinity(tmp_path):
    assert save_program(Masked(), torch.rand(4, 3), tmp_path / "m.pt2").difference < 1e-6


def test_an_infinity_hides_no_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.export, "load", lambda _: SimpleNamespace(module=lambda: lambda x: Masked()(x) + 1))
    with pytest.raises(ConfigError, match="differs by 1"):
        save_program(Masked(), torch.rand(4, 3), tmp_path / "m.pt2")


def test_a_program_that_its_runtime_does_not_load_is_refused(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.export, "load", refuse)
    with pytest.raises(ConfigError, match="no such operator"):
        save_program(nn.Linear(3, 2), torch.rand(4, 3), tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_one_sample_is_not_enough(tmp_path):
    with pytest.raises(ConfigError, match="2 samples"):
        save_program(nn.Linear(3, 2), torch.rand(1, 3), tmp_path / "m.pt2")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"etude\[onnx\]"):
        save_onnx(nn.Linear(3, 2), torch.rand(4, 3), tmp_path / "m.onnx")
