"""Checkpoints: file format, atomic store, retention, and `CheckpointManager`."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.checkpoint.folder import find_checkpoints as find_checkpoints, newest_intact as newest_intact
    from etude.checkpoint.format import pack as pack, unpack as unpack
    from etude.checkpoint.manager import (
        CheckpointManager as CheckpointManager,
        locate_checkpoint as locate_checkpoint,
    )
    from etude.checkpoint.match import load_model_state as load_model_state
    from etude.checkpoint.store import Checkpoint as Checkpoint, read_checkpoint as read_checkpoint
    from etude.checkpoint.trust import check_kind as check_kind, is_kind as is_kind, record_of as record_of

__getattr__ = load_late(__name__, __file__)
