"""Benchmarks: each prints one table per question, measured against others in the same run."""
