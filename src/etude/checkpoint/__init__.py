"""Checkpoints: file format, atomic store, retention, and `CheckpointManager`."""

from etude.checkpoint.durable import clean_leftovers
from etude.checkpoint.find import find_checkpoints, folder_name, newest_intact, read_newest_intact
from etude.checkpoint.format import pack, unpack
from etude.checkpoint.manager import CheckpointManager, locate_checkpoint
from etude.checkpoint.match import clean_state_dict, explain_mismatch, load_model_state
from etude.checkpoint.optimizer import load_optimizer_state, optimizer_state
from etude.checkpoint.retention import Entry, to_delete
from etude.checkpoint.store import Checkpoint, read_checkpoint, read_meta, verify_checkpoint, write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Entry",
    "clean_leftovers",
    "clean_state_dict",
    "explain_mismatch",
    "find_checkpoints",
    "folder_name",
    "load_model_state",
    "load_optimizer_state",
    "locate_checkpoint",
    "newest_intact",
    "optimizer_state",
    "pack",
    "read_checkpoint",
    "read_meta",
    "read_newest_intact",
    "to_delete",
    "unpack",
    "verify_checkpoint",
    "write_checkpoint",
]
