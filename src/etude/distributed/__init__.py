"""Process groups, wrapping for data parallelism, and reductions over ranks."""
