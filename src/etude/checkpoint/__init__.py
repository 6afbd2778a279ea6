"""Checkpoints: file format, atomic store, retention, and `CheckpointManager`."""

from etude.checkpoint.folder import find_checkpoints, newest_intact
from etude.checkpoint.format import pack, unpack
from etude.checkpoint.manager import CheckpointManager, locate_checkpoint
from etude.checkpoint.match import check_model_state, load_model_state
from etude.checkpoint.optimizer import check_optimizer, load_optimizer_state, optimizer_state
from etude.checkpoint.store import Checkpoint, is_intact, read_checkpoint
from etude.checkpoint.trust import check_kind, check_tensor, errors_of, record_of

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "check_kind",
    "check_model_state",
    "check_optimizer",
    "check_tensor",
    "errors_of",
    "find_checkpoints",
    "is_intact",
    "load_model_state",
    "load_optimizer_state",
    "locate_checkpoint",
    "newest_intact",
    "optimizer_state",
    "pack",
    "read_checkpoint",
    "record_of",
    "unpack",
]
