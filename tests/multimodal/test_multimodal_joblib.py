"""joblib files: what the real joblib wrote is read without executing anything, within bounds, or refused."""

import bz2
import contextlib
import copyreg
import gzip
import io
import itertools
import lzma
import pickle
import pickletools
import shlex
import struct
import sys
import tracemalloc
import warnings
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.core.errors import DataError
from etude.multimodal import load_codebook
from etude.multimodal.codebooks import joblib_source, pickle_machine
from etude.multimodal.codebooks.joblib_reader import joblib_entries

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


# What joblib writes


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


def test_a_missing_name_is_told_with_its_nearest(tmp_path):
    message = refusal(dumped({"model": {"centriods": CENTROIDS}, "labels": np.arange(3)}), tmp_path)
    assert "'model.centriods' (float64 (7, 3))" in message
    assert "'labels' (int64 (3,))" in message
    assert "did you mean 'model.centriods'? pass key_candidates=('model.centriods',)" in message


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


def test_only_the_array_asked_for_is_in_memory(tmp_path):
    value = {"labels": np.zeros(3_000_000), "centroids": CENTROIDS}
    for compress in (0, "zlib", "bz2"):
        raw = dumped(value, compress)
        (tmp_path / "file.joblib").write_bytes(raw)
        del raw
        assert peak_of(lambda: load_codebook(tmp_path / "file.joblib")) < 8e6


# Nothing is executed


class Trap:
    """Leaves a mark wherever unpickling could call it; `Trap.mark` is a folder that does not exist."""

    mark = Path()

    def __new__(cls, *args, **kwargs):
        Trap.mark.mkdir(exist_ok=True)
        return object.__new__(cls)

    def __setstate__(self, state):
        Trap.mark.mkdir(exist_ok=True)

    def __setitem__(self, key, value):
        Trap.mark.mkdir(exist_ok=True)

    append = extend = add = __call__ = lambda self, *args: Trap.mark.mkdir(exist_ok=True)

    def __reduce__(self):
        return Trap, ()


def build_trap():
    return object.__new__(Trap)


def spring():
    Trap()


HERE, FOLDER = __name__.encode(), b"__FOLDER__"
TRAP, MADE = b"c" + HERE + b"\nTrap\n", b"c" + HERE + b"\nbuild_trap\n)R"


def short(text):
    return b"\x8c" + bytes([len(text)]) + text


ROUTES = {
    "GLOBAL REDUCE": b"cos\nmkdir\n(V" + FOLDER + b"\ntR.",
    "STACK_GLOBAL REDUCE": b"\x80\x04" + short(b"os") + short(b"mkdir") + b"\x93(V" + FOLDER + b"\ntR.",
    "STACK_GLOBAL by memo": b"\x80\x04" + short(b"os") + b"\x940" + short(b"mkdir") + b"\x94h\x00h\x01\x93(V" + FOLDER
    + b"\ntR.",
    "INST": b"(V" + FOLDER + b"\nios\nmkdir\n.",
    "OBJ": b"(cos\nmkdir\nV" + FOLDER + b"\no.",
    "NEWOBJ": b"\x80\x02" + TRAP + b")\x81.",
    "NEWOBJ_EX": b"\x80\x04" + TRAP + b")}\x92.",
    "copyreg": b"ccopyreg\n__newobj__\n(" + TRAP + b"tR.",
    "BUILD": MADE + b"}b.",
    "SETITEM": MADE + b"NNs.",
    "SETITEMS": MADE + b"(NNu.",
    "APPEND": MADE + b"Na.",
    "APPENDS": MADE + b"(Ne.",
    "ADDITEMS": b"\x80\x04" + MADE + b"(N\x90.",
    "eval": b"cbuiltins\neval\n(V__import__('os').mkdir('" + FOLDER + b"')\ntR.",
    "getattr of an import": b"cbuiltins\ngetattr\n(cimportlib\nimport_module\n(Vos\ntRVmkdir\ntR(V" + FOLDER + b"\ntR.",
    "call of a result": MADE + b"(tR.",
    "behind memo": b"cos\nmkdir\np7\n0N0g7\n(V" + FOLDER + b"\ntR.",
    "thrown away": b"cos\nmkdir\n(V" + FOLDER + b"\ntR0N.",
    "in a dict key": b"}(cos\nmkdir\n(V" + FOLDER + b"\ntRNu.",
    "in a dtype": b"cnumpy\ndtype\n(cos\nmkdir\n(V" + FOLDER + b"\ntRtR.",
    "EXT1": b"\x80\x02\x82\xf0)R.",
}  # fmt: skip


@pytest.fixture
def mark(tmp_path, monkeypatch):
    folder = tmp_path / "mark"
    monkeypatch.setattr(Trap, "mark", folder)
    copyreg.add_extension(__name__, "spring", 0xF0)
    yield folder
    copyreg.remove_extension(__name__, "spring", 0xF0)


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_leads_to_execution(route, mark, tmp_path):
    raw = ROUTES[route].replace(FOLDER, str(mark).encode())
    with contextlib.suppress(TypeError, pickle.UnpicklingError):  # raised after the deed
        pickle.loads(raw)
    assert mark.exists(), "the payload does nothing even with the real pickle"
    mark.rmdir()
    refusal(raw, tmp_path)
    refusal(zlib.compress(raw), tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_around_the_array_stays_inert(compress, protocol, mark, tmp_path):
    armed = object.__new__(Trap)
    value = {"trap": armed, "objects": np.array([armed], dtype=object), "centroids": CENTROIDS}
    raw = dumped(value, compress, protocol)
    joblib.load(io.BytesIO(raw))
    assert mark.exists()
    mark.rmdir()
    assert torch.equal(load_bytes(raw, tmp_path), torch.tensor(CENTROIDS, dtype=torch.float32))
    assert not mark.exists()


def test_nothing_is_imported(tmp_path, monkeypatch):
    (tmp_path / "a_module_nobody_has.py").write_text("thing = 1")
    monkeypatch.syspath_prepend(tmp_path)
    refusal(b"ca_module_nobody_has\nthing\n.", tmp_path)
    refusal(b"ca_module_nobody_has\nthing\n)R}b.", tmp_path)
    assert "a_module_nobody_has" not in sys.modules


def test_an_object_scalar_is_not_unpickled(mark, tmp_path):
    inner = ROUTES["GLOBAL REDUCE"].replace(FOLDER, str(mark).encode())
    outer = (
        b"\x80\x04cnumpy._core.multiarray\nscalar\n(cnumpy\ndtype\n(VO8\n\x89\x88tRC" + bytes([len(inner)]) + inner
    )
    refusal(outer + b"tR.", tmp_path)
    assert not mark.exists()


# Bounds


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


def test_a_dict_within_itself(tmp_path):
    raw = b"\x80\x02}q\xf0(Vme\nh\xf0Vcentroids\n" + ARRAY + b"u."
    assert load_bytes(raw, tmp_path, key_candidates=("me.me.me.centroids",)).tolist() == [1, 1, 1]
    assert load_bytes(raw, tmp_path).tolist() == [1, 1, 1]


def test_repeated_work_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle_machine, "MAX_STEPS", 20_000)
    assert "more than 20000 steps" in refusal(b"\x80\x02" + b"N0" * 20_000 + b"N.", tmp_path)
    # 3000 names for one dict of 3000: nine million parts to list.
    many = b"}q\x01(" + b"".join(b"V%d\nN" % i for i in range(3000)) + b"u0"
    raw = b"\x80\x02" + many + b"}(" + b"".join(b"V%d\nh\x01" % i for i in range(3000)) + b"u."
    assert "more than 20000 steps" in refusal(raw, tmp_path)
    # One object whose state is set again and again to the same large dict.
    raw = b"\x80\x02" + many + b"cx\ny\n)R" + b"h\x01b" * 3000 + b"."
    assert peak_of(lambda: refusal(raw, tmp_path)) < 10e6  # 72 MB if the parts were listed first and counted then
    assert "more than 20000 steps" in refusal(raw, tmp_path)


def test_a_long_argument_list_is_not_copied_for_each_call(tmp_path):
    raw = b"\x80\x02(" + b"N" * 200_000 + b"tq\x010" + b"cnumpy\ndtype\nh\x01R0" * 10_000 + b"N."
    refusal(raw, tmp_path)  # 2e9 copies if they were made


def test_keys_that_collide_cost_nothing(tmp_path):
    modulus = sys.hash_info.modulus
    keys = b"".join(pickle.dumps(i * modulus, 2)[2:-1] + b"N" for i in range(1, 50_000))
    raw = b"\x80\x02}(" + keys + b"Vcentroids\n" + ARRAY + b"u."
    assert load_bytes(raw, tmp_path).tolist() == [1, 1, 1]  # 1e9 comparisons if they were hashed


def test_copies_of_bytes_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(joblib_source, "MAX_INLINE", 10_000_000)
    text = b"\x80\x02X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000 + b"q\x010Vlatin1\nq\x020"
    raw = text + b"c_codecs\nencode\nh\x01h\x02\x86R" * 100 + b"."
    path = tmp_path / "file.joblib"
    path.write_bytes(raw)

    def load():
        with pytest.raises(DataError, match="more than 10000000 bytes"):
            load_codebook(path)

    assert peak_of(load) < 20e6


def claiming(count, protocol=2):
    """Return the pickle of an array that claims to have `count` values, but has none."""
    array = pickle.dumps(joblib.numpy_pickle.NumpyArrayWrapper(np.ndarray, (count,), "C", np.dtype("f8")), protocol)
    return array[:-1] + b"\x01\xff"


@pytest.mark.parametrize("count", [1000, 1 << 28, 1 << 40, 1 << 62])
@pytest.mark.parametrize("fold", [bytes, zlib.compress, gzip.compress, bz2.compress, lzma.compress])
def test_claims_cost_no_memory(count, fold, tmp_path):
    for raw in (
        claiming(count),
        b"\x80\x04\x8e" + struct.pack("<Q", count) + b"abc",
        b"\x80\x05\x96" + struct.pack("<Q", count) + b"abc",
        b"\x80\x04\x8d" + struct.pack("<Q", count) + b"abc",
        b"\x80\x02\x8b" + struct.pack("<I", min(count, 2**31 - 1)) + b"abc",
    ):
        (tmp_path / "file.joblib").write_bytes(fold(raw + b"."))

        def load():
            with pytest.raises(DataError):
                load_codebook(tmp_path / "file.joblib")

        assert peak_of(load) < 16e6  # of which the buffers of bz2 are most


def test_impossible_shapes(tmp_path):
    for shape in ((-1,), (1 << 64,), ("3",), (2,) * 65, [3], None):
        wrapper = joblib.numpy_pickle.NumpyArrayWrapper(np.ndarray, shape, "C", np.dtype("f8"))
        refusal(pickle.dumps(wrapper, 2)[:-1] + b"\x01\xff" + bytes(64) + b".", tmp_path)
    for shape in ((0, 1 << 62), (0,) * 64, (1 << 62, 0, 1 << 62)):
        wrapper = joblib.numpy_pickle.NumpyArrayWrapper(np.ndarray, shape, "C", np.dtype("f8"))
        refusal(pickle.dumps(wrapper, 2)[:-1] + b"\x01\xff.", tmp_path)


@pytest.mark.parametrize("compress", COMPRESSIONS[1:])
def test_a_bomb_is_not_unfolded(compress, tmp_path, monkeypatch):
    raw = dumped(np.zeros(4_000_000), compress)
    assert len(raw) < 500_000
    monkeypatch.setattr(joblib_source, "MAX_STREAM", 4_000_000)
    (tmp_path / "file.joblib").write_bytes(raw)

    def load():
        with pytest.raises(DataError, match="more than 4000000 bytes"):
            load_codebook(tmp_path / "file.joblib")

    assert peak_of(load) < 12e6
    monkeypatch.undo()
    monkeypatch.setattr(joblib_source, "MAX_ARRAY", 4_000_000)
    assert "an array of 32000000 bytes" in refusal(raw, tmp_path)


def test_a_bomb_of_opcodes_is_not_unfolded(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle_machine, "MAX_STEPS", 10_000)
    for opcode in (b"]", b"}", b"(", b"N", b")", b"N\x85"):
        (tmp_path / "file.joblib").write_bytes(bz2.compress(b"\x80\x02" + opcode * 300_000 + b"."))

        def load():
            with pytest.raises(DataError, match="steps"):
                load_codebook(tmp_path / "file.joblib")

        assert peak_of(load) < 12e6


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


# Refusals


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "truncated"),
        (b"hello, this is text", "damaged, or not written by joblib"),
        (b"\x04\x22\x4d\x18rest", "lz4"),
        (b"ZF0x10                 x", "joblib < 0.10"),
        (b"\x93NUMPY\x01\x00", ".npy"),
        (b"PK\x03\x04rest", ".npz"),
        (b"\x80\x02cjoblib.numpy_pickle\nNDArrayWrapper\n)\x81}(Vfilename\nVx_01.npy\nub.", "other files"),
        (b"\x80\x02cjoblib.numpy_pickle_compat\nZNDArrayWrapper\n)\x81}b.", "other files"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02\x83\x01\x00.", "EXT2"),
        (b"Pid\n.", "PERSID"),
        (b"Nq\x00Q.", "BINPERSID"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x05N\x98.", "READONLY_BUFFER"),
        (b"\x80\x06N.", "protocol is 6"),
        (b"NN.", "2 objects at its end"),
        (b"0.", "POP without its operands"),
        (b"h\x05.", "a reference to nothing"),
        (b"Np%d\n." % (pickle_machine.MAX_STEPS + 1), f"the memo index {pickle_machine.MAX_STEPS + 1}"),
        (b"Np-1\n.", "the memo index -1"),
        (b"Np1%s\n." % (b"0" * 400), "the memo index 10000000000000000000"),
        (b"Nr\xff\xff\xff\xff.", "the memo index 4294967295"),
        (b"Np%d\n." % pickle_machine.MAX_STEPS, "it holds None and no arrays"),
        (b"\xff.", "damaged"),
        (b"\x80\x02cnumpy\ndtype\n(Vbfloat16\n\x89\x88tR.", "'bfloat16'"),
        (dumped({}), "a dict and no arrays"),
        (dumped("text"), "a str and no arrays"),
        (dumped({"centroids": "text"}), "'centroids' is a str"),
        (dumped({"centroids": np.array(["a"])}), "'centroids' is text (1,)"),
        (dumped({"centroids": np.zeros(2, [("x", "f4")])}), "'centroids' is structured (2,)"),
        (dumped(np.float64(3)), "the shape ()"),
        (dumped(np.zeros((2, 2, 2))), "the shape (2, 2, 2)"),
        (dumped(np.zeros((0, 2))), "empty"),
        (dumped(np.zeros(2, complex)), "complex128"),
        (dumped({"centroids": np.array([1.0, np.nan])}), "1 of 2 values are NaN or infinite, the first in entry 1"),
    ],
)  # fmt: skip
def test_refusals(raw, words, tmp_path):
    assert words in refusal(raw, tmp_path)


@pytest.mark.parametrize("name", ["plain", 'it\'s a "name" with $HOME and `x`\\n', "ünï"])
@pytest.mark.parametrize(
    "make",
    [
        lambda array: {"centroids": array.astype(object)},
        lambda array: {"centroids": array.tolist()},
        lambda array: {'a "key"]': {"centroids": array.tolist()}},
        lambda array: [0, Attributes(array.astype(object))],
        lambda array: SimpleNamespace(codebook=torch.tensor(array)),
        lambda array: np.ma.array(array),
        lambda array: array.astype(object),
    ],
)
def test_the_conversion_command_converts(name, make, tmp_path):
    path = tmp_path / f"{name}.joblib"
    joblib.dump(make(CENTROIDS), path)
    with pytest.raises(DataError, match="If you trust the file") as caught:
        load_codebook(path)
    command = shlex.split(str(caught.value).split("convert it: ")[1])
    assert command[:2] == ["python", "-c"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries, about each other
        exec(command[2], {})
    assert torch.equal(load_codebook(path.with_suffix(".npz")), torch.tensor(CENTROIDS, dtype=torch.float32))


def test_the_listing_names_what_is_there(tmp_path):
    path = tmp_path / "many.joblib"
    joblib.dump({"x": CENTROIDS, "y": [1, 2], "z": {"deep": CENTROIDS.astype(">i2")}, "n": None}, path)
    listed = {entry.name: entry.what for entry in joblib_entries(path)}
    assert listed["x"] == "float64 (7, 3)"
    assert listed["z.deep"] == "int16 (7, 3)"
    assert listed["y"] == "a list"
    assert listed["n"] == "None"
    joblib.dump({f"key{i}": CENTROIDS for i in range(16)}, path)
    with pytest.raises(DataError, match=r"and 4 more; pass key_candidates=\('key0',\) or another"):
        load_codebook(path)


def test_all_opcodes_are_decided():
    """An opcode of a later Python is refused, and no opcode of this one was forgotten."""
    known = {*pickle_machine._ACTIONS, *pickle_machine._ACTIONS_WITH_ARGUMENT}
    refused = {"PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
    assert {opcode.name for opcode in pickletools.opcodes} == known | refused
    assert not known & refused
    for name, group in itertools.groupby(sorted(pickletools.opcodes, key=lambda o: o.name), key=lambda o: o.name):
        takes = next(group).arg is not None
        assert name in refused or takes == (name in pickle_machine._ACTIONS_WITH_ARGUMENT)
