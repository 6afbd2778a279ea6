"""Callbacks that pass a run on to other tools; each writes on a thread of its own."""
