"""The command line: argument parsing and output, no logic."""
