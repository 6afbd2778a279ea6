"""The experiment lenet5 in a small form."""

from pathlib import Path

import pytest

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_configs_train(etude, tiny_mnist, path):
    assert etude("train", path, "-q", "training.epochs=1", "data.limit=500").code == 0


def test_there_is_more_than_one_config():
    assert len(CONFIGS) >= 2
