"""Catalog: data sets that a config can name, and where their files come from."""
