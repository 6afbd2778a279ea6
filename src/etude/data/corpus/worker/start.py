"""Started by its path, this is a worker process: it loads its folder without the packages above, which load torch."""

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        "etude_worker", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules["etude_worker"] = importlib.util.module_from_spec(spec)
    importlib.import_module("etude_worker.process").serve()
