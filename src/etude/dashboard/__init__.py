"""The dashboard: a local web page about run folders, also while they are written. Needs no torch."""
