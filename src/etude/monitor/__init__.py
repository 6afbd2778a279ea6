"""The run folder, its records and the sinks that write them."""
