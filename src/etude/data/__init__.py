"""Keyed permutation, samplers, loaders, prefetching and data sets."""
