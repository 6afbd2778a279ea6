"""What worker processes do: find and hash documents, train the tokenizer, encode documents.

Of etude this folder imports `core.errors` and `core.files` alone, which load nothing else, and a worker is started
without running the packages above (`start.py`). So it is ready in a fraction of a second, holds little memory, and
neither the threads nor the main module of the process that started it matter to it.
"""
