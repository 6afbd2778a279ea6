"""The build puts the experiments beside the package: `etude train lenet5/lecun1998` needs no checkout."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithExperiments(build_py):
    """Copies `experiments/` into the wheel as `etude/experiments/`."""

    def run(self) -> None:
        """Build the package, then copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "etude", "experiments")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("experiments", target, ignore=shutil.ignore_patterns("__pycache__", "*.svg", "runs"))


setup(cmdclass={"build_py": WithExperiments})
