"""Samples from token files: blocks, padded documents, packed blocks or masked text, and collating samples."""
