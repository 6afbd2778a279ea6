"""Catalog: data sets that a config can name, and the sources of their files."""
