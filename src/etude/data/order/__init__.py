"""Order: which sample is at a position, as arithmetic: permutations, samplers, buckets and mixtures."""
