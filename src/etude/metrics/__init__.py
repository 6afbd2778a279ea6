"""Metrics that are exact over batches and ranks, and trackers for loops."""
