"""Where the time and memory of steps go: parts, operators, a trace, and advice."""
