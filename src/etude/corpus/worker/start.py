"""Started by its path, this is a worker process: it loads its folder without running the packages above: no torch."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    for name in ("etude", "etude.core", "etude.corpus"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    importlib.import_module("etude.corpus.worker.process").serve()
