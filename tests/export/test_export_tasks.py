"""Programs of several tasks: the model with all heads, opened by torch and onnxruntime."""

import json

import pytest
import torch
from torch import nn

from etude import DataSplits, TensorData, load_model, register
from etude.core import ConfigError
from etude.experiment import train_experiment
from etude.export import export_run, save_program
from etude.multitask import MultiTask

IDS = torch.randint(1, 9, (48, 6), generator=torch.Generator().manual_seed(0))
TASKS = {
    "kind": {
        "labels": "kind",
        "head": {"name": "linear", "out_features": 3, "in_features": 8},
        "loss": "cross_entropy",
    },
    "size": {"labels": "size", "head": {"name": "linear", "out_features": 2, "in_features": 8}, "loss": "mse"},
}


@register("model", "export_trunk")
class Trunk(nn.Module):
    """Uses its mask, which hides nothing in the example: it stays an input."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        return (self.embedding(input_ids) * mask).sum(1) / mask.sum(1).clamp_min(1)


@register("data", "export_tasks")
def export_tasks() -> DataSplits:
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    return DataSplits(TensorData({**inputs, "kind": IDS[:, 0] % 3, "size": IDS[:, :2].float()}), vocab_size=9)


@pytest.fixture(params=["one data set", "streams"])
def run(request, tmp_path):
    one = "export_tasks"
    data = one if request.param == "one data set" else {"name": "streams", "streams": {"a": one, "b": one}}
    training = {"epochs": 1, "batch_size": 16, "device": "cpu"}
    config = {"model": "export_trunk", "data": data, "tasks": TASKS, "training": training}
    (tmp_path / "c.json").write_text(json.dumps(config))
    train_experiment(tmp_path / "c.json", run_dir=tmp_path / "run", progress=False)
    return tmp_path / "run"


def expected(run, ids, mask):
    with torch.no_grad():
        return load_model(run)({"input_ids": ids, "attention_mask": mask}, ["kind", "size"])


NEW = IDS[:5], (torch.arange(6) < torch.tensor([6, 2, 3, 1, 5])[:, None]).long()


def test_torch_export(run):
    (path,) = export_run(run, "torch").files
    found = torch.export.load(path).module()(*NEW)
    assert list(found) == ["kind", "size"]
    torch.testing.assert_close(dict(found), dict(expected(run, *NEW)))


def test_onnx(run):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (path,) = export_run(run, "onnx").files
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    assert names == ["input_ids", "attention_mask"]
    assert [one.name for one in session.get_outputs()] == ["output_kind", "output_size"]
    found = session.run(None, {name: one.numpy() for name, one in zip(names, NEW, strict=True)})
    for one, other in zip(found, expected(run, *NEW).values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-4, atol=1e-5)


def test_a_batch_without_names_is_refused(tmp_path):
    class Task(MultiTask):
        def __init__(self):
            pass

    with pytest.raises(ConfigError, match="mapping"):
        save_program(Trunk(), torch.ones(4, 6), tmp_path / "m.pt2", task=Task())
