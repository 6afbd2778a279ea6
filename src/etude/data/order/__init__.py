"""Sample order as arithmetic: permutations, samplers, buckets and mixtures."""
