"""joblib files: what the real joblib wrote is read without executing anything, or refused with what can be done."""

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from joblib_parts import CENTROIDS, COMPRESSIONS, PROTOCOLS, dumped, joblib, load_bytes, quick, refusal

from etude.multimodal import load_codebook
from forked_python import run_python


@dataclass
class Slotted:
    __slots__ = ("centroids", "name")
    centroids: object
    name: str


class Attributes:
    def __init__(self, centroids):
        self.centroids = centroids


CONTAINERS = {
    "array": lambda array: array,
    "dict": lambda array: {"labels": np.arange(5), "centroids": array, 3: "x", (1, 2): b"y"},
    "ordered": lambda array: OrderedDict(a=1, codebook=array),
    "nested": lambda array: {"model": {"centers": array, "n": 2.5}, "note": None},
    "namespace": lambda array: SimpleNamespace(values=array, seen={1, 2}, frozen=frozenset([3])),
    "object": Attributes,
    "object in a dict": lambda array: {"kind": bytearray(b"k"), "it": Attributes(array)},
    "list": lambda array: [1, "two", {"centroids": array}],
    "with objects": lambda array: {"names": np.array(["a", None, {"b": 1}], dtype=object), "centroids": array},
    "with records": lambda array: {"nodes": np.zeros(3, [("a", "f4"), ("b", "i8")]), "centroids": array},
    "with scalars": lambda array: {"x": np.float32(1), "when": np.datetime64("2020-01-01"), "centroids": array},
    "with text": lambda array: {"text": np.array(["ab", "c"]), "raw": np.array([b"q"]), "centroids": array},
    "with a random state": lambda array: {"rng": np.random.default_rng(3), "centroids": array},
    "with a masked array": lambda array: {"masked": np.ma.array([1.0, 2.0]), "centroids": array},
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_what_joblib_writes_is_read(container, compress, tmp_path):
    for protocol in PROTOCOLS:
        raw = dumped(CONTAINERS[container](CENTROIDS), compress, protocol)
        assert torch.equal(load_bytes(raw, tmp_path), torch.tensor(CENTROIDS, dtype=torch.float32))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_pickle_writes_is_read(container, protocol, tmp_path):
    for array in (CENTROIDS, np.asfortranarray(CENTROIDS), CENTROIDS[::2], CENTROIDS.astype(">f4")):
        path = tmp_path / "codebook.pkl"
        path.write_bytes(pickle.dumps(CONTAINERS[container](array), protocol=protocol))
        assert torch.equal(load_codebook(path), torch.tensor(array.astype("f4")))


@pytest.mark.parametrize("protocol", [4, 5])
def test_slots_are_read(protocol, tmp_path):
    raw = dumped(Slotted(CENTROIDS, "n"), protocol=protocol)
    assert torch.equal(load_bytes(raw, tmp_path), torch.tensor(CENTROIDS, dtype=torch.float32))


NUMBERS = st.sampled_from(["<f2", "<f4", "<f8", ">f2", ">f4", ">f8", "i1", "<i2", ">i4", "<i8", "u1", "<u2", ">u8"])


@st.composite
def arrays(draw):
    """Return an array of any kind of number, in any order in memory, also with gaps."""
    dtype = np.dtype(draw(NUMBERS))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=9))
    finite = {"min_value": -1000, "max_value": 1000} if dtype.kind == "f" else {}
    array = draw(hnp.arrays(dtype, shape, elements=hnp.from_dtype(dtype, **finite)))
    match draw(st.sampled_from(["C", "F", "reversed", "stepped"])):
        case "F":
            return np.asfortranarray(array)
        case "reversed":
            return array[::-1]
        case "stepped":
            return np.repeat(array, 2, axis=-1)[..., ::2]
    return array


@quick
@given(arrays(), st.sampled_from(COMPRESSIONS), st.sampled_from(PROTOCOLS), st.text(max_size=40))
def test_any_array_comes_back(tmp_path, array, compress, protocol, filler):
    # The filler moves the array in the file, so that all lengths of padding are met.
    loaded = load_bytes(dumped({"filler": filler, "centroids": array}, compress, protocol), tmp_path)
    assert loaded.dtype == torch.float32
    assert loaded.is_contiguous()
    assert np.array_equal(loaded.numpy(), array.astype("f4"))


@pytest.mark.parametrize("name", ["KMeans", "MiniBatchKMeans"])
@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_fitted_estimators_give_their_centres(name, compress, tmp_path):
    cluster = pytest.importorskip("sklearn.cluster")
    model = getattr(cluster, name)(5, n_init=1, random_state=np.random.RandomState(1))
    model.fit(np.random.default_rng(2).normal(size=(60, 4)))
    model.feature_names_in_ = np.array(["a", "b", "c", "d"], dtype=object)  # as after a fit on a table
    expected = torch.tensor(model.cluster_centers_, dtype=torch.float32)
    for protocol in PROTOCOLS:
        assert torch.equal(load_bytes(dumped(model, compress, protocol), tmp_path), expected)
        assert torch.equal(load_bytes(dumped({"kmeans": model}, compress, protocol), tmp_path), expected)


def test_a_pipeline_is_reached_by_a_name_with_dots(tmp_path):
    cluster, pipeline = pytest.importorskip("sklearn.cluster"), pytest.importorskip("sklearn.pipeline")
    model = pipeline.Pipeline([("kmeans", cluster.KMeans(3, n_init=1, random_state=0))])
    model.fit(np.random.default_rng(2).normal(size=(20, 2)))
    loaded = load_bytes(dumped(model), tmp_path, key_candidates=("steps.0.1.cluster_centers_",))
    assert torch.equal(loaded, torch.tensor(model.named_steps["kmeans"].cluster_centers_, dtype=torch.float32))


def test_two_arrays_that_fit_are_both_named(tmp_path):
    raw = dumped({"image": Attributes(CENTROIDS), "spectrum": Attributes(CENTROIDS * 2)})
    message = refusal(raw, tmp_path)
    assert "'image.centroids', 'spectrum.centroids'" in message
    chosen = load_bytes(raw, tmp_path, key_candidates=("spectrum.centroids",))
    assert torch.equal(chosen, torch.tensor(CENTROIDS * 2, dtype=torch.float32))


def test_the_top_of_the_file_comes_first(tmp_path):
    raw = dumped({"model": {"centroids": CENTROIDS * 2}, "values": CENTROIDS})
    assert torch.equal(load_bytes(raw, tmp_path), torch.tensor(CENTROIDS, dtype=torch.float32))


def test_a_missing_name_is_shown_with_its_nearest(tmp_path):
    message = refusal(dumped({"model": {"centriods": CENTROIDS}, "labels": np.arange(3)}), tmp_path)
    assert "'labels'" in message
    assert "key_candidates=('model.centriods',)" in message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_without_padding_of_older_versions(protocol, tmp_path, monkeypatch):
    make = joblib.numpy_pickle.NumpyPickler._create_array_wrapper

    def without_alignment(pickler, array):
        wrapper = make(pickler, array)
        del wrapper.numpy_array_alignment_bytes
        return wrapper

    aligned = dumped({"centroids": CENTROIDS}, protocol=protocol)
    monkeypatch.setattr(joblib.numpy_pickle.NumpyPickler, "_create_array_wrapper", without_alignment)
    raw = dumped({"centroids": CENTROIDS}, protocol=protocol)
    assert len(raw) < len(aligned)
    assert torch.equal(load_bytes(raw, tmp_path), torch.tensor(CENTROIDS, dtype=torch.float32))


@pytest.mark.parametrize(
    ("today", "then"),
    [
        (b"cjoblib.numpy_pickle\n", b"csklearn.externals.joblib.numpy_pickle\n"),
        (b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"),
    ],
)
def test_names_of_older_versions(today, then, tmp_path):
    value = {"centroids": CENTROIDS, "scalar": np.float32(1)}
    raw = dumped(value, protocol=2)
    assert today in raw
    # The padding is measured from the start of the file, but its length is written: it may be any.
    assert torch.equal(load_bytes(raw.replace(today, then), tmp_path), torch.tensor(CENTROIDS, dtype=torch.float32))


def test_the_names_of_compressed_files(tmp_path):
    for suffix in (".joblib.gz", ".pkl.z", ".joblib.bz2", ".pickle.xz", ".joblib.lzma", ".JOBLIB"):
        path = tmp_path / f"codebook{suffix}"
        joblib.dump(CENTROIDS, path)
        assert torch.equal(load_codebook(path), torch.tensor(CENTROIDS, dtype=torch.float32))


# Refusals


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "damaged"),
        (b"hello, this is text", "damaged"),
        (b"\x04\x22\x4d\x18rest", "damaged"),
        (b"\x93NUMPY\x01\x00", "damaged"),
        (b"\x80\x02\x82\x07.", "the extension 7"),
        (b"Pid\n.", "persistent id"),
        (b"\x80\x05\x97.", "out-of-band"),
        (b"\x80\xffN.", "protocol: 255"),
        (b"0.", "damaged"),
        (b"h\x05.", "index 5"),
        (b"\xff.", "damaged"),
        (b"\x80\x02cnumpy\ndtype\n(Vbfloat16\n\x89\x88tR.", "'bfloat16'"),
        (dumped({}), "dict and no arrays"),
        (dumped("text"), "str and no arrays"),
        (dumped({"centroids": "text"}), "'centroids' (str)"),
        (dumped({"centroids": np.array(["a"])}), "'centroids' (str32 (1,))"),
        (dumped({"centroids": np.zeros(2, [("x", "f4")])}), "'centroids' (void32 (2,))"),
        (dumped(np.float64(3)), "the shape ()"),
        (dumped(np.zeros((2, 2, 2))), "the shape (2, 2, 2)"),
        (dumped(np.zeros((0, 2))), "the shape (0, 2)"),
        (dumped(np.zeros(2, complex)), "complex128"),
        (dumped({"centroids": np.array([1.0, np.nan])}), "entry 1 is NaN"),
    ],
)  # fmt: skip
def test_refusals(raw, words, tmp_path):
    assert words in refusal(raw, tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda array: {"centroids": array.astype(object)},
        lambda array: {"centroids": array.tolist()},
        lambda array: SimpleNamespace(codebook=torch.tensor(array)),
        lambda array: np.ma.array(array),
        lambda array: array.astype(object),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(make, tmp_path):
    assert "numpy.savez" in refusal(dumped(make(CENTROIDS)), tmp_path)


def test_the_message_names_what_is_there(tmp_path):
    value = {"x": CENTROIDS, "y": [1, 2], "z": {"deep": CENTROIDS}, "n": None, "t": np.array(["a"])}
    message = refusal(dumped(value), tmp_path)
    for words in ("'x'", "'y' (list)", "'z' (dict)", "'z.deep'", "'n' (NoneType)", "'t' (str32 (1,))"):
        assert words in message
    message = refusal(dumped({f"key{i}": CENTROIDS for i in range(16)}), tmp_path)
    assert "and 4 more" in message
    assert "key_candidates=('key" in message


def test_nothing_else_is_needed(tmp_path):
    """A fitted KMeans is read where neither joblib nor scikit-learn is installed."""
    raw = b"\x80\x02csklearn.cluster._kmeans\nKMeans\n)\x81}(Vcluster_centers_\n" + pickle.dumps(CENTROIDS, 2)[2:-1]
    path = tmp_path / "kmeans.joblib"
    path.write_bytes(raw + b"ub.")
    code = (
        "import sys; from etude.multimodal import load_codebook; "
        f"print(load_codebook({str(path)!r}).shape, {{'joblib', 'sklearn'}} & {{*sys.modules}})"
    )
    done = run_python("-c", code)
    assert done.stdout == "torch.Size([7, 3]) set()\n", done.stderr
