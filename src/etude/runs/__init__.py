"""Runs side by side: find them, list them, compare them, follow and draw them. It imports no torch."""
