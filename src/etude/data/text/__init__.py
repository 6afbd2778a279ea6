"""Text: samples of token files, as blocks, padded documents, packed blocks or masked text, and collating of samples."""
