"""Data for the six tasks of the experiment, made of Python code by Python's own parser, ruff and a tokenizer."""

from code_tasks.build import ensure, prepare, read_schema
from code_tasks.options import DEFAULT_OUT, STREAMS, Options
from code_tasks.report import report

__all__ = ["DEFAULT_OUT", "STREAMS", "Options", "ensure", "prepare", "read_schema", "report"]
