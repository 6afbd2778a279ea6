"""Codebooks from .npz, .npy and .safetensors files: the right array as float32, or one line that says what is wrong."""

import struct
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save_file

import etude
from etude.core.errors import ConfigError, DataError, EtudeError
from etude.multimodal import load_codebook, load_npz_key

CENTROIDS = np.random.default_rng(0).normal(size=(7, 3))
quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder, suffix, array, key="centroids"):
    """Write one array into a file of the format that the suffix names."""
    path = folder / f"codebook{suffix}"
    if suffix == ".npy":
        np.save(path, array)
    elif suffix == ".npz":
        np.savez(path, **{key: array})
    else:
        save_file({key: torch.from_numpy(np.array(array, order="C"))}, path)
    return path


def refusal(path, load=load_codebook, **kwargs):
    with pytest.raises(DataError) as caught:
        load(path, **kwargs)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4"])
@pytest.mark.parametrize("shape", [(1,), (5,), (4, 1), (3, 2)])
def test_all_numbers_become_float32(suffix, dtype, shape, tmp_path):
    array = (np.arange(np.prod(shape)) * 1.7).astype(dtype).reshape(shape)
    loaded = load_codebook(write(tmp_path, suffix, array))
    assert loaded.dtype == torch.float32
    assert loaded.device.type == "cpu"
    assert loaded.is_contiguous()
    assert np.array_equal(loaded.numpy(), array.astype("f4"))


@quick
@given(
    hnp.arrays(
        st.sampled_from(["<f8", ">f8", "<f4", ">f4", ">i2", "<u8"]),
        hnp.array_shapes(min_dims=1, max_dims=2, max_side=6),
        elements=st.integers(0, 1000),
    ),
    st.sampled_from(["C", "F", "reversed"]),
    st.booleans(),
)
def test_any_array_comes_back_from_numpy(tmp_path, array, order, compressed):
    array = np.asfortranarray(array) if order == "F" else array[::-1] if order == "reversed" else array
    np.save(tmp_path / "a.npy", array)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", first=array[:1] * 0, centers=array)
    for loaded in (
        load_codebook(tmp_path / "a.npy"),
        load_codebook(tmp_path / "a.npz"),
        load_npz_key(tmp_path / "a.npz"),
    ):
        assert np.array_equal(loaded.numpy(), array.astype("f4"))
        assert loaded.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn])
def test_the_dtypes_of_torch(dtype, tmp_path):
    tensor = torch.tensor([[1.5, -2.0], [3.0, 4.0]]).to(dtype)
    save_file({"codebook": tensor}, tmp_path / "a.safetensors")
    assert torch.equal(load_codebook(tmp_path / "a.safetensors"), tensor.float())


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_the_tensor_is_no_view_of_the_file(suffix, tmp_path):
    path = write(tmp_path, suffix, CENTROIDS.astype("f4"))
    loaded = load_codebook(path)
    raw = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(len(raw)))
    assert torch.equal(loaded, torch.tensor(CENTROIDS, dtype=torch.float32))
    loaded += 1  # its memory is its own: writing is no fault
    assert path.read_bytes() == bytes(len(raw))


def test_candidates_are_tried_in_order(tmp_path):
    arrays = {
        name: np.full(2, i) for i, name in enumerate(["values", "centroids", "bin_centers", "other", "codebook"])
    }
    np.savez(tmp_path / "a.npz", **arrays)
    save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, tmp_path / "a.safetensors")
    for path in (tmp_path / "a.npz", tmp_path / "a.safetensors"):
        assert load_codebook(path)[0] == 1
        assert load_codebook(path, key_candidates=("nothing", "other", "values"))[0] == 3
        assert load_codebook(path, key_candidates=["values"])[0] == 0
    assert load_npz_key(tmp_path / "a.npz")[0] == 2
    assert load_npz_key(tmp_path / "a.npz", ("codebook",))[0] == 4


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_the_one_array_of_a_file_is_not_guessed(suffix, tmp_path):
    path = write(tmp_path, suffix, CENTROIDS, key="kmeans_result")
    message = refusal(path)
    assert "'centroids', 'codebook', 'centers', 'cluster_centers_', 'values'" in message
    assert "key_candidates=('kmeans_result',)" in message
    assert load_codebook(path, key_candidates=("kmeans_result",)).shape == (7, 3)


def test_the_nearest_spelling_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", edges=np.ones(3), Bin_Centres=np.ones(2))
    message = refusal(tmp_path / "a.npz", load_npz_key)
    assert "key_candidates=('Bin_Centres',)" in message
    assert "'edges'" in message


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.float32(3), "the shape ()"),
        (np.zeros((2, 3, 4)), "the shape (2, 3, 4)"),
        (np.zeros(0), "the shape (0,)"),
        (np.zeros((3, 0)), "the shape (3, 0)"),
        (np.zeros(3, np.complex64), "complex64"),
        (np.zeros(3, bool), "bool"),
        (np.array([[1, 2], [np.nan, np.inf]]), "entry 1 is NaN"),
        (np.array([1.0, 2.0, -np.inf], np.float16), "entry 2 is NaN"),
        (np.array([0, 0x7FF0000000000001]).view("f8"), "entry 1 is NaN"),  # a signalling NaN
        (np.array([1.0, 1e300, -1e39]), "entry 1 is"),
    ],
)
def test_what_is_no_codebook(suffix, array, words, tmp_path):
    assert words in refusal(write(tmp_path, suffix, array))


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array(["a", "b"]), "<U1"),
        (np.array([b"a"]), "|S1"),
        (np.zeros(2, [("x", "f4")]), "'x'"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64"),
    ],
)
def test_arrays_without_numbers(suffix, array, words, tmp_path):
    message = refusal(write(tmp_path, suffix, array))
    assert words in message
    assert "real numbers" in message


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def test_objects_are_not_unpickled(tmp_path):
    array = np.array([1.0, Trap()], dtype=object)
    assert "allow_pickle=False" in refusal(write(tmp_path, ".npy", array))
    assert "allow_pickle=False" in refusal(write(tmp_path, ".npz", array))
    np.savez(tmp_path / "a.npz", extra=array, centroids=CENTROIDS)
    assert load_codebook(tmp_path / "a.npz").shape == (7, 3)


# The path


def test_paths_that_lead_nowhere(tmp_path):
    np.savez(tmp_path / "codebook_2048.npz", centroids=CENTROIDS)
    assert "no such file; did you mean 'codebook_2048.npz'?" in refusal(tmp_path / "codebook_204.npz")
    assert "no such file" in refusal(tmp_path / "missing" / "codebook.joblib")
    for name in ("", "a.csv", "plain", "a.npy.gz"):
        assert ".safetensors" in refusal(tmp_path / name)


def test_load_npz_key_reads_npz_files(tmp_path):
    path = write(tmp_path, ".npy", CENTROIDS)
    refusal(path, load_npz_key)
    assert "no such file" in refusal(tmp_path / "missing.npz", load_npz_key)


def test_paths_as_text_and_suffixes_in_capitals(tmp_path):
    path = write(tmp_path, ".npz", CENTROIDS).rename(tmp_path / "A.NPZ")
    assert torch.equal(load_codebook(str(path)), load_npz_key(path))


@pytest.mark.parametrize("load", [load_codebook, load_npz_key])
def test_candidates_must_be_names(load, tmp_path):
    path = write(tmp_path, ".npz", CENTROIDS)
    with pytest.raises(ConfigError, match="key_candidates"):
        load(path, key_candidates="centroids")
    with pytest.raises(ConfigError, match="key_candidates"):
        load(path, key_candidates=[3])


# Damage


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_every_truncation_is_reported(suffix, tmp_path):
    path = write(tmp_path, suffix, CENTROIDS.astype("f4")[:2])
    raw = path.read_bytes()
    for end in range(0, len(raw), 3):
        path.write_bytes(raw[:end])
        refusal(path)


@settings(quick, max_examples=300)
@given(st.sampled_from([".npy", ".npz", ".safetensors"]), st.integers(0, 1 << 16), st.integers(0, 255))
def test_a_changed_byte_never_gives_another_error(tmp_path, suffix, place, value):
    path = write(tmp_path, suffix, CENTROIDS)
    raw = bytearray(path.read_bytes())
    raw[place % len(raw)] = value
    path.write_bytes(raw)
    try:
        loaded = load_codebook(path)
    except DataError as error:
        message = str(error)
    else:
        if suffix == ".npz":  # it has checksums of the data, though not of where they are
            assert torch.equal(loaded, torch.tensor(CENTROIDS, dtype=torch.float32))
        return
    assert "\n" not in message


@quick
@given(
    st.binary(max_size=200), st.sampled_from([b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"\x10" + bytes(7) + b"{"])
)
def test_any_bytes_never_give_another_error(tmp_path, raw, start):
    for suffix in (".npy", ".npz", ".safetensors"):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(start + raw)
        refusal(path)


@quick
@given(st.text(st.sampled_from("(){}[]'\",:0123456789-<>f8TrueFalse descrfortran_ordershape\n\\"), max_size=120))
def test_any_header_never_gives_another_error(tmp_path, text):
    for header in (text, "{'descr': '<f8', 'fortran_order': False, 'shape': (" + text + "), }"):
        raw = header.encode()
        path = tmp_path / "a.npy"
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw)
        refusal(path)


@pytest.mark.parametrize("header", ["(" * 9000, "-" * 9000, "{'descr': " + "[" * 5000, "9" * 9000])
def test_headers_that_are_hard_to_parse(header, tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    refusal(path)


def test_archives_with_other_things(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert "'notes.txt'" in refusal(path)
    refusal(path, key_candidates=("notes.txt",))
    with zipfile.ZipFile(path, "w") as archive:
        pass
    refusal(path)


def test_etude_has_both_at_its_top():
    assert etude.load_codebook is load_codebook
    assert etude.load_npz_key is load_npz_key
    assert issubclass(DataError, EtudeError)
