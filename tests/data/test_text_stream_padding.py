"""What per-token streams are padded with: 0, or what the facts of the file say."""

import numpy as np
import pytest

from etude.core import DataError
from etude.data import PackedDocuments, TokenDocuments, TokenWriter


def write(path, **facts):
    with TokenWriter(path, streams={"roles": "int8", "types": "uint8"}, meta=facts) as writer:
        for length in (5, 2, 3):
            writer.add(np.arange(length) + 1, streams={"roles": np.ones(length, int), "types": np.ones(length, int)})
    return path


@pytest.mark.parametrize(
    "source",
    [
        lambda path: TokenDocuments(path),
        lambda path: TokenDocuments(path).with_length(4),
        lambda path: PackedDocuments(path, 8, "fit"),
        lambda path: PackedDocuments(path, 8, "split", last="pad"),
    ],
)
def test_streams_are_padded_as_the_file_says(tmp_path, source):
    documents = source(write(tmp_path / "a.bin", padding={"roles": -100}))
    batch = documents.gather(np.arange(len(documents)), epoch=0, seed=0)
    padded = batch["input_ids"] == 0
    assert padded.any()
    assert set(batch["roles"][padded].tolist()) == {-100}
    assert set(batch["types"][padded].tolist()) == {0}
    assert set(batch["roles"][~padded].tolist()) == {1}


@pytest.mark.parametrize("padding", [7, {"roles": "no"}, {"roles": True}])
def test_facts_that_are_no_padding_are_refused(tmp_path, padding):
    with pytest.raises(DataError, match="must map names of streams to integers"):
        TokenDocuments(write(tmp_path / "a.bin", padding=padding))
