"""joblib files that want to execute something: nothing is imported, nothing is called."""

import contextlib
import copyreg
import io
import pickle
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from joblib_parts import CENTROIDS, COMPRESSIONS, PROTOCOLS, dumped, joblib, load_bytes, refusal


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
def test_a_call_beside_the_array_does_nothing(compress, protocol, mark, tmp_path):
    armed = object.__new__(Trap)
    for value in ({"trap": armed, "centroids": CENTROIDS}, {"objects": np.array([armed]), "centroids": CENTROIDS}):
        raw = dumped(value, compress, protocol)
        joblib.load(io.BytesIO(raw))
        assert mark.exists()
        mark.rmdir()
        assert torch.equal(load_bytes(raw, tmp_path), torch.tensor(CENTROIDS, dtype=torch.float32))
        assert not mark.exists()


class Armed(Trap):
    """An object that does something when it is made and when its state is set, but is no call."""

    def __reduce__(self):
        return copyreg.__newobj__, (Armed,), {"centroids": CENTROIDS}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_stay_inert(protocol, mark, tmp_path):
    raw = dumped({"it": object.__new__(Armed)}, protocol=protocol)
    joblib.load(io.BytesIO(raw))
    assert mark.exists()
    mark.rmdir()
    assert torch.equal(load_bytes(raw, tmp_path), torch.tensor(CENTROIDS, dtype=torch.float32))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "subprocess.Popen", "posix.system", "joblib.load"])
def test_what_a_file_asks_for_is_named(name, tmp_path):
    module, _, function = name.rpartition(".")
    for call in (f"c{module}\n{function}\n(Vtrue\ntR.", f"(Vtrue\ni{module}\n{function}\n."):
        assert name in refusal(call.encode(), tmp_path)


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


@pytest.mark.parametrize(
    "name", ["os system", "posix system", "subprocess Popen", "builtins eval", "importlib import_module"]
)
def test_names_that_no_array_needs_are_refused(tmp_path, name):
    module, function = name.split()
    content = b"\x80\x04" + short(module.encode()) + short(function.encode()) + b"\x93."
    assert f"{module}.{function}" in refusal(content, tmp_path)
