"""Losses as sums and counts, and the strategies that read model outputs."""
