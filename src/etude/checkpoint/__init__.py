"""Checkpoints: file format, atomic store, retention, and `CheckpointManager`."""
