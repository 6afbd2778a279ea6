"""Codebooks: files with the values that tokens stand for, read without running anything in them."""
