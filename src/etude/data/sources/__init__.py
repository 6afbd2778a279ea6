"""Sources: samples in memory, data sets with workers, several named sources, third-party loaders."""
