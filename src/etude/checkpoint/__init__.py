"""Checkpoints: file format, atomic store, retention, and `CheckpointManager`."""

from etude.checkpoint.folder import find_checkpoints, newest_intact
from etude.checkpoint.format import pack, unpack
from etude.checkpoint.manager import CheckpointManager, locate_checkpoint
from etude.checkpoint.match import load_model_state
from etude.checkpoint.store import Checkpoint, read_checkpoint
from etude.checkpoint.trust import check_kind, is_kind, record_of

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "check_kind",
    "find_checkpoints",
    "is_kind",
    "load_model_state",
    "locate_checkpoint",
    "newest_intact",
    "pack",
    "read_checkpoint",
    "record_of",
    "unpack",
]
