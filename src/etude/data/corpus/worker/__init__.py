"""What worker processes do: find and hash documents, train the tokenizer, encode documents.

This folder imports nothing of etude: a worker loads it as a package of its own. So it is ready in a fraction of a
second, holds little memory, and neither the threads nor the main module of the process that started it matter to it.
"""
