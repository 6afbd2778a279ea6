"""What is asserted of checkpoints inside several processes: tensors are divided among them in many layouts."""

import errno
import os
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from etude.checkpoint import CheckpointManager, load_model_state, read_checkpoint
from etude.checkpoint.durable import HashedFile
from etude.checkpoint.optimizer import load_optimizer_state, optimizer_state
from etude.checkpoint.saved_tensor import SavedTensor, copy_of, fill
from etude.checkpoint.store import verify_checkpoint, write_checkpoint
from etude.core import CheckpointError
from etude.distributed import World, join_world, leave_world
from etude.distributed.shards import block_of, local_of, sharded_like

FOLDER = "ETUDE_TEST_FOLDER"
SHAPES = {"even": (8, 4), "uneven": (7, 5), "small": (2, 3), "one": (1,), "vector": (5,), "empty": (0, 3)}
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


@contextmanager
def world():
    found = join_world("cpu")
    if found.size == 1:  # for meshes of one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    leave_world()


def folder() -> Path:
    return Path(os.environ[FOLDER])


def values() -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.{str(dtype).removeprefix('torch.')}": (torch.randn(shape, generator=generator) * 100).to(dtype)
        for (name, shape), dtype in product(SHAPES.items(), DTYPES)
    }


def layouts(size: int, dims: int):
    """Meshes of this many ranks, and every way to divide a tensor of so many dimensions among them."""
    places = [Replicate(), *(Shard(dim) for dim in range(dims))]
    for shape in {(size,), (size // 2, 2), (2, size // 2)} if size > 1 else {(1,)}:
        mesh = init_device_mesh("cpu", shape)
        for placements in product(places, repeat=len(shape)):
            yield mesh, placements


def strided(tensor: torch.Tensor, mesh) -> DTensor:
    """FSDP over tensor parallelism on the same dimension, by hand: divided by the second mesh dimension first."""
    first, second = mesh.get_coordinate()

    def nth(one, n, i):
        return dict(enumerate(one.chunk(n))).get(i, one[:0])

    local = nth(nth(tensor, mesh.size(1), second), mesh.size(0), first)
    placements = _StridedShard(0, split_factor=mesh.size(1)), Shard(0)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def divided(size: int):
    """Trees of tensors with DTensors of one layout each, by name."""
    for mesh, placements in layouts(size, 2):
        made = {
            name: distribute_tensor(one, mesh, placements)
            for name, one in values().items()
            if all(p.is_replicate() or p.dim < one.dim() for p in placements)
        }
        yield f"{tuple(mesh.shape)} {placements}", made
        if mesh.ndim == 2 and placements == (Shard(0), Shard(0)):
            yield f"{tuple(mesh.shape)} strided", {name: strided(one, mesh) for name, one in values().items()}


def written_and_read_in_any_layout() -> None:
    """Each layout is written, read whole and lazily into every other one, and by torch's own reader."""
    with world() as w:
        all_layouts = list(divided(w.size))
        for number, (name, made) in enumerate(all_layouts):
            path = folder() / f"step-{number:08d}"
            state = {"moments": {key: [one] for key, one in made.items()}, "plain": torch.arange(3), "number": 7}
            write_checkpoint(path, made, state, {"step": number}, world=w)
            whole = read_checkpoint(path, world=w)
            expected = {key: one for key, one in values().items() if key in made}
            for found in (whole.model_state, {key: one[0] for key, one in whole.state["moments"].items()}):
                torch.testing.assert_close(
                    found, expected, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
                )
            assert torch.equal(whole.state["plain"], torch.arange(3))
            files = sorted(one.name for one in path.glob("*.safetensors"))
            one = [f"-{rank + 1:05d}-of-{w.size:05d}" for rank in range(w.size)] if w.size > 1 else [""]
            assert files == [f"{part}{rank}.safetensors" for part in ("model", "state") for rank in one]
            into_other_layouts(read_checkpoint(path, lazy=True, world=w), expected, all_layouts)
            by_torch(path, expected, all_layouts[-number])


def into_other_layouts(checkpoint, expected, all_layouts) -> None:
    for name, made in all_layouts:
        for key, target in made.items():
            if key in expected:
                saved = checkpoint.model_state[key]
                assert isinstance(saved, SavedTensor)
                assert (saved.shape, saved.dtype) == (target.shape, target.dtype)
                new = sharded_like(target, torch.zeros_like(local_of(target)))
                fill(new, saved)
                assert torch.equal(local_of(new), local_of(target)), (name, key)


def by_torch(path: Path, expected, layout) -> None:
    """torch.distributed.checkpoint finds the same values in these files."""
    targets = {
        key: sharded_like(one, torch.zeros_like(local_of(one)))
        for key, one in layout[1].items()
        if key in expected and one.numel()
    }
    dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(path)))
    for key, one in targets.items():
        assert torch.equal(local_of(one), local_of(layout[1][key])), (layout[0], key)


def what_is_refused() -> None:
    with world() as w:
        mesh = init_device_mesh("cpu", (w.size,))
        partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
        with pytest.raises(CheckpointError, match="not yet summed"):
            write_checkpoint(folder() / "step-00000001", {"w": partial}, {}, {}, world=w)
        odd = DTensor.from_local(torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
        with pytest.raises(CheckpointError, match="not into blocks"):
            block_of(odd)
        shard = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        with pytest.raises(CheckpointError, match=r"w: it is a DTensor, with values on other ranks"):
            write_checkpoint(folder() / "alone", {"w": shard}, {}, {})  # as if there were no other ranks
        with pytest.raises(CheckpointError, match=r"state\.x: it is a builtins\.object"):
            write_checkpoint(folder() / "object", {"w": shard}, {"x": object() if w.rank == 1 else 1}, {}, world=w)
        assert list(folder().glob("*")) == []


def failing_on_one_rank() -> None:
    """A full disk on any one rank: all ranks raise, nothing of the checkpoint is left, the one before is intact."""
    with world() as w:
        shard = distribute_tensor(torch.ones(8, 2), init_device_mesh("cpu", (w.size,)), [Shard(0)])
        manager = CheckpointManager(folder(), keep_best=0)
        manager.save(1, model_state={"w": shard}, state={}, world=w)
        real = HashedFile.sync, HashedFile.write
        for rank, kind in product(range(w.size), ("sync", "write")):

            def full(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            setattr(HashedFile, kind, full if w.rank == rank else getattr(HashedFile, kind))
            with pytest.raises(CheckpointError, match="No space left on device; free some space") as caught:
                manager.save(2, model_state={"w": shard}, state={}, world=w)
            HashedFile.sync, HashedFile.write = real
            assert caught.value.reported_elsewhere == (w.rank != rank)
            w.barrier()
            assert sorted(one.name for one in folder().iterdir()) == ["last", "step-00000001"]
        manager.save(2, model_state={"w": shard}, state={}, world=w)
        w.barrier()
        assert sorted(one.name for one in folder().iterdir()) == ["last", "step-00000002"]
        assert torch.equal(read_checkpoint(folder() / "last", world=w).model_state["w"], torch.ones(8, 2))


def damage_is_found_by_one_rank_and_raised_by_all() -> None:
    with world() as w:
        shard = distribute_tensor(torch.ones(8, 2), init_device_mesh("cpu", (w.size,)), [Shard(0)])
        path = folder() / "step-00000001"
        write_checkpoint(path, {"w": shard}, {"w": shard}, {}, world=w)
        verify_checkpoint(path, w)
        for file in sorted(path.iterdir()):
            content = file.read_bytes()
            w.barrier()
            if w.is_main:
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            w.barrier()
            with pytest.raises(CheckpointError, match=f"is damaged: {file.name}"):
                read_checkpoint(path, lazy=True, world=w)
            w.barrier()
            if w.is_main:
                file.unlink()
            w.barrier()
            with pytest.raises(CheckpointError, match=file.name):
                read_checkpoint(path, world=w)
            w.barrier()
            if w.is_main:
                file.write_bytes(content)
            w.barrier()
        read_checkpoint(path, world=w)


class Net(nn.Module):
    """Layers for tensor parallelism, a tied weight, a bias that is too short for all ranks, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3, bias=False)
        self.tied = nn.Linear(6, 3, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("steps", torch.tensor(5))

    def forward(self, x):
        return self.head(x + self.down(self.up(x).relu()))


def sharded_net(kind: str, size: int) -> nn.Module:
    net = Net()
    if kind == "tp_fsdp" and size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    elif kind != "plain":
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of aliases of local shards, with a state that depends on values and names."""
    aliases = []
    for param in net.parameters():
        alias = nn.Parameter(local_of(param.detach()))
        if isinstance(param, DTensor):
            alias.sharded = param
        alias.grad = alias.detach() * 2 + 1
        aliases.append(alias if isinstance(param, DTensor) else param)
        param.grad = None if isinstance(param, DTensor) else param.detach() * 2 + 1
    optimizer = torch.optim.AdamW([{"params": aliases[:2]}, {"params": aliases[2:], "lr": 0.1}])
    optimizer.step()
    return optimizer


def modules_of_any_layout() -> None:
    """FSDP2, and tensor parallelism under it: model and optimizer go from any layout into any other one."""
    with world() as w:
        kinds = ["plain", "fsdp", "tp_fsdp"]
        reference = Net()
        expected = optimizer_state(optimizer_of(reference), reference)
        for kind in kinds:
            net = sharded_net(kind, w.size)
            optimizer = optimizer_of(net)
            state = {"optimizer": optimizer_state(optimizer, net)}
            path = folder() / kind
            write_checkpoint(path, net.state_dict(), state, {}, world=w)
            whole = read_checkpoint(path, world=w)
            for name, one in reference.state_dict().items():
                torch.testing.assert_close(whole.model_state[name], one, rtol=1e-6, atol=1e-6)
            assert whole.model_state["tied.weight"] is whole.model_state["head.weight"]
            assert whole.state["optimizer"]["shapes"] == expected["shapes"]
            torch.testing.assert_close(
                whole.state["optimizer"]["state"], expected["state"], rtol=1e-6, atol=1e-6, check_device=False
            )
            for other, lazy in product(kinds, (False, True)):
                load_elsewhere(path, other, lazy, w, whole)


def load_elsewhere(path: Path, kind: str, lazy: bool, w: World, whole) -> None:
    """Load a checkpoint into a net of another layout with other values, and save that: it is the same."""
    net = sharded_net(kind, w.size)
    optimizer = optimizer_of(net)
    optimizer.step()
    with torch.no_grad():
        for param in net.parameters():
            local_of(param).fill_(9)
    checkpoint = read_checkpoint(path, lazy=lazy, world=w)
    load_model_state(net, checkpoint.model_state)
    load_optimizer_state(optimizer, net, checkpoint.state["optimizer"])
    again = folder() / f"again-{kind}"
    write_checkpoint(again, net.state_dict(), {"optimizer": optimizer_state(optimizer, net)}, {}, world=w)
    found = read_checkpoint(again, world=w)
    torch.testing.assert_close(found.model_state, whole.model_state, rtol=0, atol=0)
    left, right = found.state["optimizer"], whole.state["optimizer"]
    torch.testing.assert_close(left["state"], right["state"], rtol=0, atol=0)
    assert left["groups"] == right["groups"]
    kept = {name: copy_of(one) for name, one in net.state_dict().items()}
    with torch.no_grad():
        for param in net.parameters():
            local_of(param).fill_(9)
    load_model_state(net, kept)
    write_checkpoint(again, net.state_dict(), {}, {}, world=w)
    torch.testing.assert_close(read_checkpoint(again, world=w).model_state, whole.model_state, rtol=0, atol=0)


def mismatches_change_nothing() -> None:
    with world() as w:
        net = sharded_net("fsdp", w.size)
        path = folder() / "step-00000001"
        wrong = {
            **net.state_dict(),
            "up.weight": distribute_tensor(torch.ones(8, 5), net.up.weight.device_mesh, [Shard(0)]),
        }
        write_checkpoint(path, wrong, {}, {}, world=w)
        before = {name: local_of(one).clone() for name, one in net.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"up\.weight: checkpoint \(8, 5\), model \(8, 6\)"):
            load_model_state(net, read_checkpoint(path, lazy=True, world=w).model_state)
        for name, one in net.state_dict().items():
            assert torch.equal(local_of(one), before[name])
        optimizer = optimizer_of(net)
        tree = optimizer_state(optimizer, net)
        with pytest.raises(CheckpointError, match=r"up\.bias: checkpoint \(9,\), model \(8,\)"):
            load_optimizer_state(optimizer, net, {**tree, "shapes": {**tree["shapes"], "up.bias": (9,)}})
        param = optimizer.param_groups[0]["params"][0]
        optimizer.state[param]["row"] = torch.ones(3)
        with pytest.raises(CheckpointError, match=r"optimizer\.state\.up\.weight\.row: its shape \(3,\)"):
            optimizer_state(optimizer, net)


def write_for_other_sizes() -> None:
    """Write a net that is divided among these processes, for a run of another number."""
    with world() as w:
        net = sharded_net("fsdp", w.size)
        write_checkpoint(
            folder() / "saved", net.state_dict(), {"optimizer": optimizer_state(optimizer_of(net), net)}, {}, world=w
        )


def read_of_other_sizes() -> None:
    with world() as w:
        path = folder() / "saved"
        whole = read_checkpoint(path, world=w)
        reference = Net()
        expected = optimizer_state(optimizer_of(reference), reference)
        torch.testing.assert_close(whole.model_state, reference.state_dict(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(whole.state["optimizer"]["state"], expected["state"], rtol=1e-6, atol=1e-6)
        for kind, lazy in product(("plain", "fsdp", "tp_fsdp"), (False, True)):
            load_elsewhere(path, kind, lazy, w, whole)


def write_until_killed() -> None:
    """Save again and again, until someone kills one of the processes; the others lose it."""
    with world() as w:
        number = 0
        mesh = init_device_mesh("cpu", (w.size,))
        manager = CheckpointManager(folder() / "run", keep_best=1)
        print(os.getpid(), flush=True)
        while True:
            number += 1
            shard = distribute_tensor(torch.full((20_000, 2), float(number)), mesh, [Shard(0)])
            manager.save(number, model_state={"w": shard}, state={"w": shard, "number": number}, world=w)
            if w.is_main:
                (folder() / "finished").write_text(str(number))
