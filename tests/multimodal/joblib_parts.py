"""What the tests of joblib files share: writing them, reading them, measuring the memory that takes."""

import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from etude.core.errors import DataError
from etude.multimodal import load_codebook

joblib = pytest.importorskip("joblib")

COMPRESSIONS = [0, "zlib", "gzip", "bz2", "lzma", "xz"]
CHECKSUMMED = ["zlib", "gzip", "bz2", "xz"]
PROTOCOLS = range(6)
CENTROIDS = np.random.default_rng(0).normal(size=(7, 3))
quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def dumped(value, compress=0, protocol=None):
    with io.BytesIO() as file:
        if compress == 0:
            joblib.dump(value, file, protocol=protocol)
        else:
            joblib.dump(value, file, compress=(compress, 3), protocol=protocol)
        return file.getvalue()


def load_bytes(raw, folder, **kwargs):
    path = folder / "file.joblib"
    path.write_bytes(raw)
    return load_codebook(path, **kwargs)


def refusal(raw, folder, **kwargs):
    with pytest.raises(DataError) as caught:
        load_bytes(raw, folder, **kwargs)
    assert "\n" not in str(caught.value)
    assert str(folder / "file.joblib") in str(caught.value)
    return str(caught.value)


def loaded_or_refused(raw, folder):
    """Return the codebook, or None if it is refused in one line; all else is an error of the test."""
    try:
        return load_bytes(raw, folder)
    except DataError as error:
        message = str(error)
    assert "\n" not in message
    return None


def peak_of(action):
    """Return the most bytes that Python and NumPy held at once during the action."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
