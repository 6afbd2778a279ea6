"""Token files: writing, reading, checking, and formats of other tools."""
