"""Models that ship with the library."""
