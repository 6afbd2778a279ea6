"""Checkpoints: file format, atomic store, retention, and `CheckpointManager`."""

from etude.checkpoint.durable import clean_leftovers
from etude.checkpoint.folder import Entry, find_checkpoints, newest_intact, read_newest_intact, to_delete
from etude.checkpoint.format import pack, unpack
from etude.checkpoint.manager import CheckpointManager, locate_checkpoint
from etude.checkpoint.match import (
    change_model,
    check_model_state,
    explain_mismatch,
    load_model_state,
)
from etude.checkpoint.optimizer import check_optimizer, load_optimizer_state, optimizer_state, remember_optimizer
from etude.checkpoint.store import (
    Checkpoint,
    is_intact,
    read_checkpoint,
    read_meta,
    verify_checkpoint,
    write_checkpoint,
)
from etude.checkpoint.trust import Undo, check_kind, check_tensor, copied, errors_of, record_of
from etude.core.run_layout import folder_name

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Entry",
    "Undo",
    "change_model",
    "check_kind",
    "check_model_state",
    "check_optimizer",
    "check_tensor",
    "clean_leftovers",
    "copied",
    "errors_of",
    "explain_mismatch",
    "find_checkpoints",
    "folder_name",
    "is_intact",
    "load_model_state",
    "load_optimizer_state",
    "locate_checkpoint",
    "newest_intact",
    "optimizer_state",
    "pack",
    "read_checkpoint",
    "read_meta",
    "read_newest_intact",
    "record_of",
    "remember_optimizer",
    "to_delete",
    "unpack",
    "verify_checkpoint",
    "write_checkpoint",
]
