"""joblib files that take for ever to unpickle, and damaged ones: one line of error."""

import pickle
import pickletools
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from joblib_parts import (
    CENTROIDS,
    CHECKSUMMED,
    COMPRESSIONS,
    PROTOCOLS,
    dumped,
    joblib,
    load_bytes,
    loaded_or_refused,
    peak_of,
    quick,
    refusal,
)

from etude.multimodal import joblib_files


def test_deep_nesting(tmp_path):
    for raw in (b"(" * 20_000 + b"t" * 20_000, b")" + b"\x85" * 20_000, b"]" + b"\x85q\x000]h\x00a" * 20_000):
        refusal(raw + b".", tmp_path)
    deep = b"cos\nmkdir\n" + b")\x81" * 20_000
    refusal(b"\x80\x02" + deep + b".", tmp_path)
    # A chain of objects, each the state of the next, as a value beside the array.
    chain = b"N" + b"cx\ny\n)\x81\x86" * 20_000
    raw = b"\x80\x02}(Vchain\n" + chain + b"Vcentroids\n" + pickle.dumps(np.ones(3), 2)[2:-1] + b"u."
    assert load_bytes(raw, tmp_path).tolist() == [1, 1, 1]


ARRAY = pickle.dumps(np.ones(3), 2)[2:-1]


def test_billion_laughs(tmp_path):
    laughs = {
        "tuples": b"N" + b"2\x86" * 200,
        "lists of lists": b"]" + b"2\x86q\x000]h\x00a" * 200,
        "a tuple as key": b"}N" + b"2\x86" * 200 + b"Ns",
        "a tuple in a set": b"\x8f(N" + b"2\x86" * 200 + b"\x90",
        "a tuple in a frozen set": b"(N" + b"2\x86" * 200 + b"\x91",
    }
    for name, laugh in laughs.items():
        raw = (
            b"\x80\x04}(V"
            + name.encode()
            + b"\n"
            + laugh
            + b"Vcentroids\n"
            + ARRAY.replace(b"q\x00", b"q\xff")
            + b"u."
        )
        assert load_bytes(raw, tmp_path).tolist() == [1, 1, 1]


def test_keys_that_collide_cost_nothing(tmp_path):
    modulus = sys.hash_info.modulus
    keys = b"".join(pickle.dumps(i * modulus, 2)[2:-1] + b"N" for i in range(1, 50_000))
    raw = b"\x80\x02}(" + keys + b"Vcentroids\n" + ARRAY + b"u."
    assert load_bytes(raw, tmp_path).tolist() == [1, 1, 1]  # 1e9 comparisons if they were hashed


def test_impossible_shapes(tmp_path):
    for shape in ((-1,), (1 << 64,), ("3",), (2,) * 65, [3], None):
        wrapper = joblib.numpy_pickle.NumpyArrayWrapper(np.ndarray, shape, "C", np.dtype("f8"))
        refusal(pickle.dumps(wrapper, 2)[:-1] + b"\x01\xff" + bytes(64) + b".", tmp_path)
    for shape in ((0, 1 << 62), (0,) * 64, (1 << 62, 0, 1 << 62)):
        wrapper = joblib.numpy_pickle.NumpyArrayWrapper(np.ndarray, shape, "C", np.dtype("f8"))
        refusal(pickle.dumps(wrapper, 2)[:-1] + b"\x01\xff.", tmp_path)


@pytest.mark.parametrize("compress", COMPRESSIONS[1:])
def test_a_bomb_is_not_decompressed(compress, tmp_path, monkeypatch):
    raw = dumped(np.zeros(4_000_000), compress)
    monkeypatch.setattr(joblib_files, "MAX_BYTES", 4_000_000)
    (tmp_path / "file.joblib").write_bytes(raw)
    assert peak_of(lambda: refusal(raw, tmp_path)) < 16e6
    assert "more than 4000000 bytes" in refusal(raw, tmp_path)


def test_lzma_headers_cannot_ask_for_much_memory(tmp_path):
    raw = bytearray(dumped(CENTROIDS, "lzma"))
    raw[1:5] = struct.pack("<I", 1 << 31)  # the size of the dictionary
    assert "Memory usage limit exceeded" in refusal(bytes(raw), tmp_path)


# Damage


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("protocol", [2, 5])
def test_every_truncation_is_reported(compress, protocol, tmp_path):
    raw = dumped({"centroids": CENTROIDS.astype("f4")[:2], "n": 3}, compress, protocol)
    for end in range(len(raw)):
        refusal(raw[:end], tmp_path)


def flipped(raw, place, bit):
    place %= len(raw)
    return raw[:place] + bytes([raw[place] ^ (1 << bit)]) + raw[place + 1 :]


@settings(quick, max_examples=400)
@given(st.sampled_from(COMPRESSIONS), st.sampled_from(PROTOCOLS), st.integers(0, 1 << 16), st.integers(0, 7))
def test_a_flipped_bit_never_gives_another_error(tmp_path, compress, protocol, place, bit):
    raw = dumped(
        {"names": np.array(["a"], dtype=object), "centroids": CENTROIDS, "it": np.float32(1)}, compress, protocol
    )
    loaded = loaded_or_refused(flipped(raw, place, bit), tmp_path)
    if loaded is not None and compress in CHECKSUMMED:
        assert torch.equal(loaded, torch.tensor(CENTROIDS, dtype=torch.float32))


@settings(quick, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=6)), min_size=1, max_size=6), st.integers(2, 5))
@example(patches=[(530, b"\n")], protocol=4)
def test_overwritten_bytes_never_give_another_error(tmp_path, patches, protocol):
    raw = bytearray(
        dumped({"a": {1, 2}, "b": SimpleNamespace(c=(1, 2.0, None)), "centroids": CENTROIDS}, 0, protocol)
    )
    for place, patch in patches:
        place %= len(raw)
        raw[place : place + len(patch)] = patch
    loaded_or_refused(bytes(raw), tmp_path)


CODES = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]
PIECES = st.one_of(
    st.sampled_from(CODES),
    st.sampled_from([b"N", b"(", b")", b"}", b"]", b"K\x01", b"Vx\n", b"h\x00", b"q\x00", b"\x94", ARRAY]),
    st.sampled_from(
        [b"cnumpy\ndtype\n", b"cnumpy._core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n", b"Vf8\n"]
    ),
    st.sampled_from(
        [b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81", b"(K\x03V<\nNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"]
    ),
    st.binary(min_size=1, max_size=4),
)


@settings(quick, max_examples=400)
@given(st.lists(PIECES, max_size=40), st.booleans())
@example([b"S'\\d'\n"], True)  # an escape that Python warns about
@example([b"I" + b"9" * 5000 + b"\n"], True)
@example([b"N", b"p-1\n"], True)
def test_random_programs_never_give_another_error(tmp_path, pieces, wrapped):
    raw = b"\x80\x04" + b"".join(pieces) + b"."
    if wrapped:
        raw = b"\x80\x04}(Vcentroids\n" + b"".join(pieces) + b"u."
    loaded_or_refused(raw, tmp_path)
