"""Loops for users who write the outer loop themselves, or train from plain functions."""
