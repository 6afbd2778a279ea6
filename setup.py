"""The build puts the experiments beside the package: `etude train lenet5/lecun1998` needs no checkout."""

import re
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
            shutil.copytree(
                "experiments", target, ignore=shutil.ignore_patterns("__pycache__", "*.svg", "runs", "tests")
            )


def description() -> str:
    """Return the README for a package index: links and pictures of the repository lead nowhere there."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": WithExperiments},
    long_description=description(),
    long_description_content_type="text/markdown",
)
