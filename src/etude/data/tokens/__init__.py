"""Token files: writing, reading, checking, and the files of other tools."""
