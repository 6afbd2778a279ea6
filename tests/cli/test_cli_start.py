"""What a command costs before and after its work: no compiler where nothing is compiled, and a short exit."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

LENET = Path(__file__).parents[2] / "experiments" / "lenet5" / "configs" / "lecun1998.yaml"
IMAGES = """
import torch
from etude import register
from etude.data import DataSplits, TensorData

@register("data", "noise")
def noise() -> DataSplits:
    images, labels = torch.rand(24, 1, 28, 28), torch.arange(24) % 10
    return DataSplits(TensorData(images, labels), TensorData(images, labels), num_classes=10)
"""
LOOK = """
import gc, json, sys
from etude.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code
print()
print(json.dumps({"modules": [*sys.modules], "enabled": gc.isenabled(), "frozen": gc.get_freeze_count()}))
"""


@pytest.fixture(scope="module")
def looked(tmp_path_factory):
    """What a process holds after it has trained LeNet-5, and after another one went on with that."""
    root = tmp_path_factory.mktemp("lenet")
    (root / "images.py").write_text(IMAGES)
    (root / "lenet.yaml").write_text(LENET.read_text().replace("name: mnist", "name: noise"))
    settings = ["imports=[images.py]", "training.batch_size=8", "training.max_steps=3"]
    found = []
    train, resume = ["train", "lenet.yaml", *settings, "--run-dir", "run"], ["resume", "run", "training.max_steps=5"]
    for arguments in (train, resume):
        command = [sys.executable, "-c", LOOK, *arguments]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert json.loads((root / "run" / "result.json").read_text())["step"] == 5
    return found


def test_training_and_resuming_lenet_import_no_compiler(looked):
    for process in looked:
        assert "etude.models.lenet5" in process["modules"]
        assert not {"torch._dynamo", "sympy", "torch._inductor", "etude.models.transformer"} & set(process["modules"])


def test_what_was_imported_is_no_garbage_and_what_comes_later_may_be(looked):
    for process in looked:
        assert process["enabled"]
        assert process["frozen"] > 100_000


def test_a_process_that_has_torch_already_is_left_alone(etude):
    before = gc.get_freeze_count()
    assert etude("config", "schema").code == 0
    assert gc.get_freeze_count() <= before  # frozen objects may be freed
    assert gc.isenabled()
