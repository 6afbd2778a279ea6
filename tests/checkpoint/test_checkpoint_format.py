"""A tree goes into tensors and JSON and comes back exactly, or is refused by its dotted path."""

import json
import math
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_helpers import assert_same
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn

from etude.checkpoint import pack, read_checkpoint, unpack
from etude.checkpoint.store import write_checkpoint
from etude.core import CheckpointError
from etude.core.random import rng_state, set_rng_state, set_seed

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.complex64,
    torch.complex128,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of every type with arbitrary bits, of 0 to 3 dimensions, some empty, some not contiguous."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    if draw(st.integers(0, 8)) == 0:
        tensor = torch.zeros(shape, dtype=torch.bool)
        tensor.view(-1)[::2] = True
    else:
        tensor = torch.empty(shape, dtype=draw(st.sampled_from(TYPES)))
        data = draw(st.binary(min_size=tensor.nbytes, max_size=tensor.nbytes))
        if data:
            tensor = torch.frombuffer(bytearray(data), dtype=tensor.dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "transposed", "strided", "expanded"]))
    if form == "transposed" and tensor.dim() >= 2:
        tensor = tensor.transpose(0, -1)
    elif form == "strided" and tensor.dim():
        tensor = tensor[::2]
    elif form == "expanded":
        tensor = tensor.expand(2, *tensor.shape)
    return tensor


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.text(st.characters())
    | st.sets(st.text(st.characters(), max_size=4) | st.integers(-(2**70), 2**70), max_size=4)
    | tensors()
)
KEYS = st.text(st.characters(), max_size=4) | st.integers() | st.sampled_from(["a", "b", "a.b", "0", "__metadata__"])
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(TREES)
def test_round_trip_is_exact(tree: Any) -> None:
    tensors, structure = pack(tree)
    assert_same(unpack(tensors, json.loads(json.dumps(structure, allow_nan=False))), tree)


@given(st.dictionaries(st.text(st.characters(), max_size=4), tensors(), max_size=3), TREES)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_round_trip_through_files_is_exact(model_state: dict[str, Tensor], tree: Any) -> None:
    with TemporaryDirectory() as root:
        folder = Path(root) / "step-00000001"
        write_checkpoint(folder, model_state, tree, {})
        checkpoint = read_checkpoint(folder)
    assert_same(checkpoint.model_state, model_state)
    assert_same(checkpoint.state, tree)


@pytest.mark.parametrize(
    "value", [1 << 20_000, -(1 << 20_000), 2**63, -(2**63) - 1, 2**63 - 1], ids=lambda n: f"{n.bit_length()}bits"
)
def test_integers_of_any_size(value: int) -> None:
    tensors, structure = pack({"n": value})
    assert unpack(tensors, json.loads(json.dumps(structure))) == {"n": value}


def test_structure_is_standard_json() -> None:
    _, structure = pack([math.inf, -math.inf, math.nan, -0.0, 1e-320])
    text = json.dumps(structure, allow_nan=False)
    back = unpack({}, json.loads(text))
    assert_same(back, [math.inf, -math.inf, math.nan, -0.0, 1e-320])


def test_shared_memory_is_stored_once_and_shared_again() -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    tensors, structure = pack({"head": weight, "embedding": weight.data, "row": weight[0]})
    assert list(tensors) == ["head", "row"]
    back = unpack({name: tensor.clone() for name, tensor in tensors.items()}, structure)
    assert back["head"].data_ptr() == back["embedding"].data_ptr()
    assert torch.equal(back["row"], weight[0])


def test_conjugate_and_negative_views_are_not_taken_for_their_base() -> None:
    base = torch.randn(4, dtype=torch.complex64)
    tree = {"base": base, "conj": base.conj(), "imag": base.imag, "neg": base.conj().imag}
    assert tree["neg"].is_neg()
    assert_same(unpack(*pack(tree)), tree)


def test_paths_that_read_alike_do_not_collide() -> None:
    tree = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1), 0: torch.ones(2), "0": torch.zeros(2)}}
    tensors, _ = pack(tree)
    assert len(tensors) == 4
    assert_same(unpack(*pack(tree)), tree)


def test_subclasses_come_back_as_what_they_hold() -> None:
    class Colour(IntEnum):
        RED = 3

    tree = {"od": OrderedDict(x=1), "np": np.float64(0.1), "enum": Colour.RED, "size": torch.Size([2, 3])}
    assert_same(unpack(*pack(tree)), {"od": {"x": 1}, "np": 0.1, "enum": 3, "size": (2, 3)})


def test_nothing_is_copied_by_packing() -> None:
    weight = torch.ones(3)
    tensors, _ = pack([weight])
    weight.add_(1)
    assert torch.equal(tensors["0"], torch.full((3,), 2.0))


def test_random_state_of_every_generator_survives() -> None:
    set_seed(5)
    np.random.randn(3)  # leaves a cached gaussian
    expected_state = rng_state()
    expected = (torch.rand(4), np.random.randn(4).tolist())
    set_rng_state(unpack(*pack(expected_state)))
    assert_same((torch.rand(4), np.random.randn(4).tolist()), expected)


def _itself() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    return tree


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"optim": {"groups": [{"fn": print}]}}, "state.optim.groups.0.fn"),
        ({"a": (1, object())}, "state.a.1: it is a builtins.object"),
        ({"array": np.zeros(2)}, "state.array: it is a numpy.ndarray"),
        ({"n": np.int64(3)}, "state.n: it is a numpy.int64"),
        ({"pair": Pair(1, 2)}, "state.pair"),
        ({"s": {1, 2.5}}, "state.s: it is a set with 2.5"),
        ({"s": frozenset()}, "state.s: it is a builtins.frozenset"),
        ({"b": b"bytes"}, "state.b"),
        ({"d": {(1, 2): 3}}, r"state.d: it has the key \(1, 2\)"),
        ({"d": {True: 3}}, "state.d: it has the key True"),
        ({"t": torch.ones(2).to_sparse()}, "state.t: it has the layout"),
        ({"t": torch.ones(2, device="meta")}, "state.t: it is on the meta device"),
        ({"t": nn.LazyLinear(3).weight}, "state.t: it has no shape yet"),
        (_itself(), "nested more than 100 deep"),
    ],
)
def test_what_is_not_data_is_refused_by_path(tree: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as error:
        pack(tree)
    assert "\n" not in str(error.value)


def test_a_node_from_the_future_is_refused() -> None:
    with pytest.raises(CheckpointError, match="unknown kind of node 'deque'"):
        unpack({}, {"deque": [1]})
