"""Sources: samples in memory, data sets with workers, several named sources, loaders of other people."""
