"""A sharded checkpoint, exported as one file of weights: one tensor at a time, in any process."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.checkpoint import read_checkpoint
from etude.checkpoint.contents import META, SHARDING, STATE
from etude.checkpoint.saved_tensor import SavedTensor
from etude.checkpoint.store import FileRecord, render_manifest, write_checkpoint
from etude.core import CheckpointError
from etude.export.weights import save_weights

ROWS, WIDTH, LAYERS = 600, 500, 12


def write_sharded(folder, weights) -> None:
    """Write the files that two ranks would, with rows divided unevenly, by other code than ours."""
    write_checkpoint(folder, weights, {"number": 3}, {"step": 1})
    structure = json.loads((folder / STATE).read_text()) | {"format": 2}
    (folder / STATE).write_text(json.dumps(structure))
    names = [STATE, META]
    for part in ("model", "state"):
        tensors = load_file(folder / f"{part}.safetensors")
        (folder / f"{part}.safetensors").unlink()
        for rank, cut in enumerate((slice(0, 400), slice(400, None))):
            blocks = {name: one[cut].contiguous() for name, one in tensors.items()}
            info = {
                name: {"saved_offsets": [400 * rank, 0], "shape": list(one.shape)} for name, one in tensors.items()
            }
            names.append(f"{part}-{rank + 1:05d}-of-00002.safetensors")
            save_file(blocks, folder / names[-1], {SHARDING: json.dumps(info)})
    files = {name: (folder / name).read_bytes() for name in names}
    records = {name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    (folder / "manifest.json").write_bytes(render_manifest(records))


def test_one_file_of_a_sharded_checkpoint(tmp_path, monkeypatch):
    weights = {f"layer.{i}.weight": torch.randn(ROWS, WIDTH) for i in range(LAYERS)}
    write_sharded(tmp_path / "step-00000001", weights)
    whole = read_checkpoint(tmp_path / "step-00000001")
    assert whole.state == {"number": 3}
    torch.testing.assert_close(whole.model_state, weights, rtol=0, atol=0)
    lazy = read_checkpoint(tmp_path / "step-00000001", lazy=True).model_state
    reads, read = [], SavedTensor.full
    monkeypatch.setattr(SavedTensor, "full", lambda self: reads.append(self) or read(self))
    path = save_weights(lazy, tmp_path / "model.safetensors")
    assert len(reads) == LAYERS  # each once, when it is written
    torch.testing.assert_close(load_file(path), weights, rtol=0, atol=0)


def test_blocks_that_do_not_make_up_a_tensor(tmp_path):
    write_sharded(tmp_path / "step-00000001", {"weight": torch.ones(ROWS, 2)})
    folder = tmp_path / "step-00000001"
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        read_checkpoint(folder)
