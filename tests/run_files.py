"""What a run leaves in its folder, without what depends on the clock on the wall."""

import json
from pathlib import Path
from typing import Any

TIMING = {"time", "samples_per_s", "batches_per_s", "tokens_per_s", "mfu", "data_wait", "epoch_s", "memory_bytes"}


def steady(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without its times and rates."""
    return {key: value for key, value in record.items() if key not in TIMING}


def records(folder: Path, split: str | None = None) -> list[dict[str, Any]]:
    """Return what a run recorded, of one split or of all."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [steady(line) for line in lines if split in (None, line["split"])]


def weights(folder: Path | str) -> bytes:
    """Return the bytes of the last checkpoint's weights."""
    return Path(folder, "checkpoints", "last", "model.safetensors").read_bytes()


def files_of(folder: Path | str) -> dict[str, bytes]:
    """Return the bytes of the last checkpoint's tensors by file: several if processes divide the model."""
    last = Path(folder, "checkpoints", "last").resolve()
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}
