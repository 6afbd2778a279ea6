"""Concrete callbacks; the engine knows only their protocol."""
