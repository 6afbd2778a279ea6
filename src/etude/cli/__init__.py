"""The command line: argument parsing and words for people, no logic."""
