"""Etude: exact, fast and clear training for PyTorch."""
