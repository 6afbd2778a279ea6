"""Loading into a module: in place, tied weights tied, wrappers' names removed, mismatches explained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import assert_same
from torch import Tensor, nn

from etude.checkpoint import load_model_state, pack, unpack
from etude.checkpoint.match import explain_mismatch
from etude.core import CheckpointError
from etude.core.model import clean_state_dict, unwrap


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.fc2 = nn.Linear(width, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.wte.weight


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in clean_state_dict(module).items()}


def test_loading_is_exact_and_in_place() -> None:
    source, target = Net(), Net()
    source.norm.running_mean += 1
    before = {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()}
    load_model_state(target, snapshot(source))
    assert_same(snapshot(target), snapshot(source))
    assert {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()} == before


def test_tied_weights_stay_tied_through_pack() -> None:
    source, target = Tied(), Tied()
    tensors, structure = pack(clean_state_dict(source))
    assert list(tensors) == ["wte.weight"]
    load_model_state(target, unpack({name: t.clone() for name, t in tensors.items()}, structure))
    assert target.head.weight is target.wte.weight
    assert torch.equal(target.wte.weight, source.wte.weight)


def test_a_buffer_whose_elements_share_memory() -> None:
    source, target = nn.Module(), nn.Module()
    for module, value in ((source, 2.0), (target, 1.0)):
        module.register_buffer("scale", torch.tensor([value]).expand(3))
    load_model_state(target, snapshot(source))
    assert torch.equal(target.scale, torch.full((3,), 2.0))


@pytest.mark.parametrize("kept", ["wte.weight", "head.weight"])
def test_a_tied_weight_saved_under_one_of_its_names(kept: str) -> None:
    target, weight = Tied(), torch.randn(5, 3)
    load_model_state(target, {kept: weight})
    assert torch.equal(target.head.weight, weight)


def test_weights_that_are_tied_here_but_differ_in_the_checkpoint() -> None:
    target = Tied()
    before = snapshot(target)
    saved = {"wte.weight": torch.zeros(5, 3), "head.weight": torch.ones(5, 3)}
    with pytest.raises(CheckpointError, match=r"wte.weight and head.weight are tied in this model but differ"):
        load_model_state(target, saved)
    assert_same(snapshot(target), before)


def test_agreement_needs_no_explanation() -> None:
    assert explain_mismatch(Net().state_dict(), Net().state_dict()) is None


def test_shapes_and_names_are_explained_and_nothing_is_changed() -> None:
    target, saved = Net(width=4), dict(Net(width=6).state_dict())
    del saved["fc2.bias"]
    saved["conv.weight"] = torch.zeros(1)
    before = snapshot(target)
    with pytest.raises(CheckpointError) as error:
        load_model_state(target, saved)
    message = str(error.value)
    assert message.startswith("this checkpoint belongs to another architecture: ")
    assert "fc1.weight: checkpoint (6, 3), model (4, 3)" in message
    assert "fc2.bias: missing in the checkpoint" in message
    assert "conv.weight: not in the model" in message
    assert "\n" not in message
    assert_same(snapshot(target), before)


def test_a_long_list_is_cut_but_shows_every_kind() -> None:
    own = {f"a{i}": torch.zeros(1) for i in range(20)} | {f"both{i}": torch.zeros(2) for i in range(20)}
    saved = {f"b{i}": torch.zeros(1) for i in range(20)} | {f"both{i}": torch.zeros(3) for i in range(20)}
    message = explain_mismatch(own, saved)
    assert message is not None
    assert all(words in message for words in ("both0: checkpoint (3,), model (2,)", "a0: missing", "b0: not in"))
    assert message.endswith("(and 52 more)")
    assert message.count(";") == 7


def test_a_child_named_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    source, target = Holder(), Holder()
    assert list(clean_state_dict(source)) == ["module.weight", "module.bias"]
    load_model_state(target, snapshot(source))
    assert_same(snapshot(target), snapshot(source))


def test_names_saved_by_other_tools_with_a_wrapper_prefix() -> None:
    source, target = Net(), Net()
    load_model_state(target, {f"module._orig_mod.{name}": value for name, value in source.state_dict().items()})
    assert_same(snapshot(target), snapshot(source))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch by the first torch.compile
def test_data_parallel_and_compile_wrappers_are_seen_through() -> None:
    plain = Net()
    wrapped = nn.DataParallel(plain)
    assert unwrap(wrapped) is plain
    assert list(clean_state_dict(wrapped)) == list(plain.state_dict())
    compiled = torch.compile(plain)
    assert next(iter(compiled.state_dict())).startswith("_orig_mod.")
    assert list(clean_state_dict(compiled)) == list(plain.state_dict())
    inner = nn.Sequential(torch.compile(Net()))
    assert list(clean_state_dict(inner)) == [f"0.{name}" for name in plain.state_dict()]
    other = nn.Sequential(Net())
    load_model_state(inner, snapshot(other))
    assert_same(snapshot(inner), snapshot(other))
    load_model_state(compiled, snapshot(other[0]))
    assert_same(snapshot(plain), snapshot(other[0]))


@pytest.mark.distributed
def test_distributed_data_parallel_is_seen_through(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain, source = Net(), Net()
        wrapped = nn.parallel.DistributedDataParallel(plain)
        assert list(clean_state_dict(wrapped)) == list(plain.state_dict())
        load_model_state(wrapped, snapshot(source))
        assert_same(snapshot(plain), snapshot(source))
    finally:
        torch.distributed.destroy_process_group()


def test_state_that_is_not_a_tensor_is_loaded_too() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    source, target = Counter(), Counter()
    source.count = 3
    load_model_state(target, unpack(*pack(clean_state_dict(source))))
    assert target.count == 3


def test_a_lazy_module_takes_its_shape_from_the_checkpoint() -> None:
    source, target = nn.Linear(3, 2), nn.LazyLinear(2)
    load_model_state(target, snapshot(source))
    assert_same(snapshot(target), snapshot(source))


class Refuses(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        args[-1].append("not today")


def test_a_module_that_refuses_is_heard() -> None:
    with pytest.raises(CheckpointError, match="not today"):
        load_model_state(Refuses(3, 2), snapshot(nn.Linear(3, 2)))


class Growing(nn.Module):
    """Has buffers that hold nothing until it is trained."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.inner = nn.Module()
        self.inner.register_buffer("seen", torch.zeros(0, 3, dtype=dtype))
        self.inner.register_buffer("mean", None)
        self.register_buffer("scratch", torch.zeros(0), persistent=False)


def grown() -> Growing:
    module = Growing()
    module.inner.seen, module.inner.mean = torch.randn(5, 3), torch.randn(3)
    module.scratch = torch.zeros(7)
    return module


@pytest.mark.parametrize(
    "wrap", [lambda one: one, nn.DataParallel, torch.compile], ids=["plain", "parallel", "compiled"]
)
def test_buffers_without_elements_take_any_shape(wrap: Any) -> None:
    source, target = grown(), Growing()
    load_model_state(wrap(target), snapshot(source))
    assert_same(snapshot(target), snapshot(source))
    assert target.scratch.numel() == 0
    load_model_state(Growing(), snapshot(Growing()))  # nor need they


def test_a_load_that_fails_leaves_them_without_elements() -> None:
    saved = snapshot(grown())
    for spoiled in ({**saved, "fc.bias": torch.zeros(9)}, {**saved, "more": torch.zeros(1)}):
        target = Growing()
        with pytest.raises(CheckpointError, match=r"fc\.bias|more"):
            load_model_state(target, spoiled)
        assert target.inner.seen.shape == (0, 3)
        assert target.inner.mean is None
    with pytest.raises(CheckpointError, match=r"inner\.seen"):
        load_model_state(Growing(torch.int64), saved)
