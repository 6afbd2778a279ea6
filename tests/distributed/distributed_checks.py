"""What is asserted inside the processes of a run: each function is called by all of them."""

import json
import logging
import os
import tempfile
import weakref
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from distributed_tasks import many_tasks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader as TorchDataLoader, DistributedSampler, TensorDataset

from etude import DataLoader, Trainer, predict
from etude.callbacks import NaNDebugger
from etude.core import CheckpointError, ConfigError, DataError, TrainingError
from etude.core.task import LossTerm, Task
from etude.data import LoaderData, as_loader
from etude.distributed import World, join_world, leave_world
from etude.distributed.sharing import share_buffers
from etude.distributed.world import run_collective
from etude.engine.callback import Callback
from etude.engine.evaluation import evaluate
from etude.engine.stopping import Interrupted, Interrupts
from etude.experiment import resume_run, train_experiment
from etude.metrics.metric_set import MetricSet
from etude.optim import AdamW, clip_gradients
from etude.optim.kernels import choose_kernel

__all__ = ["many_tasks"]


@contextmanager
def world():
    yield join_world("cpu")
    leave_world()


def words() -> None:
    """What ranks can say to each other."""
    with world() as w:
        assert w.gather_text("é" * w.rank) == ["é" * rank for rank in range(w.size)]
        assert w.share_text(f"from {w.rank}") == "from 0"
        assert w.share_text("") == ""
        assert w.host_max([w.rank, -w.rank]) == [w.size - 1, 0]
        assert w.union(["loss", "rare"][: w.rank]) == ["loss", "rare"][: w.size - 1]
        assert w.sum(torch.tensor([1.0, w.rank])).tolist() == [w.size, sum(range(w.size))]
        assert sum(map(int, w.gather_text(str(int(w.claim("a task")))))) == 1


def forks() -> None:
    """No thread of gloo holds a tensor while a process is forked, as data workers are: it might never start."""
    held = []

    def collective(*rows):
        held.extend(map(weakref.ref, rows))
        dist.group.WORLD.allreduce_coalesced([*rows]).wait()

    with world():
        run_collective(collective, *torch.zeros(5000, 1))
        if (pid := os.fork()) == 0:
            os._exit(sum(ref() is not None for ref in held) > 0)
        assert os.waitpid(pid, 0)[1] == 0


def attempts() -> None:
    """An error of any rank is raised on all, by its class; one of them tells it."""
    with world() as w:
        assert w.attempt(lambda: w.rank) == w.rank
        assert w.attempt(lambda: "main", here=w.is_main) == ("main" if w.is_main else None)

        def fail():
            raise CheckpointError(f"rank {w.rank}: no") if w.rank else DataError("empty: rank 0")

        with pytest.raises(DataError, match=r"^empty: rank 0$") as caught:
            w.attempt(fail)
        assert caught.value.reported_elsewhere == (w.rank != 0)
        with pytest.raises(CheckpointError, match="rank 1: no") as caught:
            w.attempt(fail, here=w.rank > 0)
        assert caught.value.reported_elsewhere == (w.rank != 1)
        assert w.attempt(lambda: 5) == 5


def rank() -> int:
    return int(os.environ["RANK"])


def refused(make, *words) -> None:
    """All ranks raise the same error, and one reports it."""
    with pytest.raises(ConfigError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
    assert caught.value.reported_elsewhere == (rank() != 0)


def different_versions() -> None:
    """A machine that was forgotten in an update."""
    version = torch.__version__
    torch.__version__ = version if rank() == 0 else "1.0"
    refused(lambda: join_world("cpu"), f"torch: {version} on rank 0, 1.0 on ranks 1, 2;", "the same versions")
    leave_world()


def differences() -> None:
    """Ranks that differ in what must be the same are refused, on all of them, before they train."""
    refused(lambda: trainer(data(), config={"seed": rank() // 2}), "training.seed: 0 on ranks 0, 1, 1 on rank 2")
    refused(lambda: trainer(data(24 + rank())), "training samples: 24 on rank 0, 25 on rank 1, 26 on rank 2")
    refused(lambda: trainer(data(), data(3 + rank())), "validation samples: 3 on rank 0")
    refused(lambda: trainer([data(2)] * (3 + rank())), "batches per epoch: 3 on rank 0")
    refused(lambda: trainer(data(), model=nn.Linear(4, 2 + rank())), "10 parameters", "15 parameters", "on rank 1")
    refused(lambda: trainer(data(), model=nn.Linear(4, 2).to(torch.float64 if rank() else None)), "shapes")
    trainer(data(), config={"num_workers": 0, "prefetch": rank()}).train()
    leave_world()


def evaluations() -> None:
    """Each sample counts once, whatever the remainder, also with a torch sampler that repeats samples."""
    made = trainer(data())
    made.model.eval()
    for samples in (1, 2, 3, 7, 8):
        x, y = data(samples)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(made.model(x), y).item()
        whole = TensorDataset(x, y)
        padded = TorchDataLoader(whole, batch_size=2, sampler=DistributedSampler(whole, shuffle=samples % 2 == 0))
        for one in ((x, y), whole, padded, DataLoader((x, y), batch_size=8)):
            assert made.evaluate(one)["loss"] == pytest.approx(expected, rel=1e-6), (samples, type(one))
    leave_world()


def different_configs() -> None:
    """Every rank has a config file of its own, and one of them is another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        config = {"model": "lenet5", "data": "mnist", "optimizer": {"name": "sgd", "lr": 0.1 * (1 + rank())}}
        path.write_text(json.dumps(config | {"name": "it", "training": {"device": "cpu"}}))
        with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.1 on rank 0, 0\.2 on rank 1; .* same command"):
            train_experiment(path, run_dir=Path(folder, "run"))
        assert not Path(folder, "run").exists()


def warnings_of_ranks() -> None:
    """Rank 0 shows what any rank warns of, once; identical warnings have no rank."""
    logger, lines = logging.getLogger("etude"), []
    with world() as w:
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        if w.rank == 0:
            logger.addHandler(handler)
        for _ in range(2):
            logger.warning("all of us")
        if w.rank > 0:
            logger.warning("some of us")
            logger.warning("only %d", w.rank)
        w.log.show()
        w.log.show()
        expected = ["all of us", "all of us", "[rank 1] some of us", "[rank 1] only 1", "[rank 2] only 2"]
        assert lines == (expected if w.rank == 0 else [])
        logger.removeHandler(handler)


class Buffers(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        for name, value in self.values(rank).items():
            self.register_buffer(name, value)

    @staticmethod
    def values(rank: int) -> dict[str, torch.Tensor]:
        return {
            "count": torch.tensor(rank),
            "flag": torch.tensor([rank == 0, True]),
            "short": torch.full((3,), rank + 0.5, dtype=torch.bfloat16),
            "nothing": torch.zeros(0, 4),
            "turned": torch.arange(6.0).view(2, 3).mul(rank + 1).t(),
            "long": torch.full((2, 2), rank + 1 / 3, dtype=torch.float64),
            "wave": torch.full((2,), complex(rank, 1)),
        }


def buffers() -> None:
    """Every rank gets those of rank 0, whatever their type and layout."""
    with world() as w:
        model = Buffers(w.rank)
        share_buffers(model, w)
        for name, value in Buffers.values(0).items():
            assert torch.equal(getattr(model, name), value), name


def data(samples: int = 24):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, 4, generator=generator), torch.randint(2, (samples,), generator=generator)


def trainer(train, validation=None, **arguments) -> Trainer:
    torch.manual_seed(0)
    config = {"epochs": 1, "batch_size": 8, "device": "cpu", **arguments.pop("config", {})}
    model = arguments.pop("model", None) or nn.Linear(4, 2)
    return Trainer(model, train, validation, config=config, progress=False, **arguments)


def collectives_of_a_step() -> None:
    """Gradients are summed once, after the last of the micro-batches, and the count of samples with them."""
    made = trainer(data(), config={"grad_accum_steps": 3})
    made.step.model.register_comm_hook(None, allreduce_hook)  # brings the sums of gradients through Python
    batches = [data(8)] * 3
    made.step(batches)
    calls = []
    original = dist.all_reduce

    def counted(tensor, **options):
        calls.append(tensor.numel())
        return original(tensor, **options)

    dist.all_reduce = counted
    made.step(batches)
    dist.all_reduce = original
    assert calls == [10 + 1]
    leave_world()


class Penalised(Task):
    """A loss with a penalty that is no number of the run; some micro-batches of a step have no weight at all."""

    def __init__(self, weighs=lambda place: True) -> None:
        self.weighs, self.calls = weighs, 0

    def __call__(self, model, batch, *, metrics):
        weight = float(self.weighs(self.calls))
        self.calls += 1
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        bias = next(param for name, param in model.named_parameters() if name.endswith("bias"))
        penalty = LossTerm(bias.square().sum() * len(losses), len(losses), weight, reported=False)
        rare = LossTerm(losses.detach().sum() * 0, 0.0, 0.0, optional=True)
        return {"loss": LossTerm(losses.sum(), len(losses), weight), "penalty": penalty, "rare": rare}

    def counts(self, batch):
        return {"loss": len(batch[1]), "penalty": len(batch[1])}


def terms_without_numbers() -> None:
    """A rank without samples makes no number of a term that is none."""
    numbers = []
    made = trainer(data(9), data(9), task=Penalised(), config={"log_interval": 1})
    made.callbacks.on_log = numbers.append
    result = made.train()
    names = {name.removeprefix("val_") for one in (result, *numbers) for name in one}
    assert "loss" in names
    assert not {"penalty", "rare"} & names, names
    leave_world()


def micro_batches_without_weight() -> None:
    """Ranks meet in a step whose last micro-batch has nothing to learn from: none goes its own way."""
    for pattern in ((1, 0), (0, 1), (1, 0, 0)):
        config = {"grad_accum_steps": len(pattern)}
        task = Penalised(lambda place, pattern=pattern: pattern[place % len(pattern)])
        made = trainer(data(16 * len(pattern)), task=task, config=config)
        alone = Penalised(task.weighs)
        reference = trainer(data(16 * len(pattern)), task=alone, world=World(), config=config)
        made.train()
        reference.train()
        for mine, theirs in zip(made.model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
    leave_world()


class Scheduled(Task):
    """Two terms whose weights are those of the epoch."""

    def __init__(self, weights, *, detaches=False, counts=True) -> None:
        self.weights, self.detaches, self.knows_counts, self.epoch = weights, detaches, counts, 0

    def __call__(self, model, batch, *, metrics):
        out, weights = model(batch[0]), self.weights[self.epoch]
        sums = [(out[:, 0] - batch[1]).square().sum(), out[:, 1].square().sum()]
        return {
            name: LossTerm(total if weight or not self.detaches else total.detach(), len(out), weight)
            for name, total, weight in zip(("first", "second"), sums, weights, strict=True)
        }

    def counts(self, batch):
        return dict.fromkeys(("first", "second"), len(batch[1])) if self.knows_counts else None


class NextEpoch(Callback):
    def __init__(self, task) -> None:
        self.task = task

    def on_epoch_end(self, *_) -> None:
        self.task.epoch += 1


WEIGHTS = {
    "falls": [(1.0, 1.0), (1.0, 0.0), (1.0, 2.0)],
    "rises": [(1.0, 0.0), (1.0, 1.0), (1.0, 0.0)],
    "swap": [(1.0, 0.0), (0.0, 1.0), (2.0, 0.0)],
    "both": [(1.0, 1.0), (0.0, 2.0), (2.0, 0.0)],
}


def weights_that_become_zero() -> None:
    """A rank without samples does the same as the others, whatever the weights are by then."""
    cases = [(name, case) for name in WEIGHTS for case in ((1, {}), (1, {"detaches": True}), (3, {}))]
    for name, (accumulate, options) in [*cases, ("swap", (3, {"counts": False}))]:
        models = []
        for alone in (World(), None):
            task = Scheduled(WEIGHTS[name], **options)
            config = {"epochs": 3, "batch_size": 4, "grad_accum_steps": accumulate}
            made = trainer(data(9), task=task, world=alone, config=config, callbacks=[NextEpoch(task)])
            made.train()
            assert task.epoch == 3
            models.append(made.model)
        for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")
    leave_world()


def loaders() -> None:
    """Every way to bring data divides it among the ranks; what cannot be divided is refused."""
    x, y = data()
    validation = list(TorchDataLoader(TensorDataset(*data(9)), batch_size=4))
    results = []
    for source in (
        (x, y),
        TensorDataset(x, y),
        DataLoader(x, y, batch_size=8),
        DataLoader(x, y, batch_size=8, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])),
    ):
        made = trainer(source, validation)
        seen = [len(batch[0]) for batch in made.loaders.train.iterate(epoch=0)]
        assert seen == [8 // made.machine.world.size] * 3
        results.append(made.train())
    assert all(result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6) for result in results)
    assert results[0]["val_loss"] == pytest.approx(evaluated_by_hand(trainer((x, y)), validation), rel=1e-5)

    whole = TensorDataset(x, y)
    for refused in (
        TorchDataLoader(whole, batch_size=4, shuffle=True),
        TorchDataLoader(whole, batch_size=4),
        TorchDataLoader(whole, batch_size=None),
        TorchDataLoader(whole, batch_sampler=DataLoader(x, y, batch_size=8).sampler),
    ):
        with pytest.raises(ConfigError, match="DistributedSampler"):
            trainer(refused)
    trainer(TorchDataLoader(whole, batch_size=4, sampler=DistributedSampler(whole))).train()
    with pytest.raises(ConfigError, match="for 5 processes, but there are 2"):
        trainer(DataLoader(x, y, batch_size=8, rank=1, world_size=5))
    with pytest.raises(ConfigError, match="at least 2"):
        trainer(DataLoader(x, y, batch_size=1))
    with pytest.raises(ConfigError, match="outside the model"):
        trainer((x, y), optimizer=lambda params: torch.optim.SGD([*params, nn.Parameter(torch.zeros(1))], lr=0.1))
    leave_world()


def evaluated_by_hand(made: Trainer, validation) -> float:
    made.train()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(made.model(x), y, reduction="sum") for x, y in validation]
    return float(torch.stack(losses).sum()) / sum(len(y) for _, y in validation)


def interrupted_validation() -> None:
    """A signal to one rank ends the validation of all, though they have different numbers of batches."""
    with world() as w:
        x, y = torch.randn(3, 4), torch.tensor([0, 1, 0])
        loader = as_loader([(x, y)] * (w.rank + 2))

        def task(model, batch, *, metrics):
            losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return {"loss": LossTerm(losses.sum(), len(losses))}

        interrupts = Interrupts()
        interrupts.may_cut_off = True
        assert "loss" in evaluate(nn.Linear(4, 2), task, loader, world=w, interrupts=interrupts)
        interrupts.requested = "SIGTERM" if w.rank == 1 else ""
        with pytest.raises(Interrupted):
            evaluate(nn.Linear(4, 2), task, loader, world=w, interrupts=interrupts)
        w.barrier()


def metrics_of_an_empty_share() -> None:
    """A rank without samples does not know that predictions are class ids: it must gather what the others do."""
    ids, labels = torch.tensor([2, 1, 2, 0, 1]), torch.tensor([2, 1, 0, 0, 2])
    with world() as w:
        for training in (True, False):
            measures = MetricSet.of(["accuracy", "f1", "mae"], in_training=True)
            for _ in range(2):  # the second time after a reset
                measures.begin(training=training)
                if w.rank == 0:
                    measures.update(ids, labels, training=training)
                found = measures.results(w, torch.device("cpu"), training=training)
                assert found["accuracy"] == 3 / 5
                assert found["mae"] == pytest.approx(3 / 5)


class Longest(torchmetrics.Metric):
    """Keeps a list that is not reduced, as metrics of detection do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", default=[], dist_reduce_fx=None)
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions, labels) -> None:
        self.kept += [predictions, labels]
        self.total += 1

    def compute(self):
        flat = torch.cat(self.kept)
        return {"sum": (flat * torch.arange(len(flat))).sum(), "batches": self.total}


def lists_of_different_lengths() -> None:
    """Ranks with different numbers of batches gather the lists of a metric of torchmetrics, in their order."""
    with world() as w:
        measures = MetricSet.of({"longest": Longest()})
        batches = [[], [(torch.ones(2), torch.zeros(3)), (torch.arange(2.0), torch.ones(1))]]
        for _ in range(2):
            measures.begin(training=False)
            for batch in batches[w.rank]:
                measures.update(*batch, training=False)
            found = measures.results(w, torch.device("cpu"), training=False)
            flat = [one for batch in batches[1] for part in batch for one in part.tolist()]
            assert found == {"sum": sum(place * one for place, one in enumerate(flat)), "batches": 2}


def sharded_parameters() -> None:
    """Parameters in shards (DTensor) have the norm, the clipping and the update of whole ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with world() as w:
        mesh = init_device_mesh("cpu", (w.size,))
        whole = [nn.Parameter(torch.arange(12.0).view(6, 2) - 5), nn.Parameter(torch.linspace(-1, 1, 7))]
        parts = [nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])) for param in whole]
        assert choose_kernel(parts) == "fused"
        assert choose_kernel([parts[0], whole[1]]) == "loop"
        optimizers = AdamW(whole, lr=0.1), AdamW(parts, lr=0.1)
        for step in range(3):
            for full, part in zip(whole, parts, strict=True):
                full.grad = torch.sin(full.detach() + step) * 10
                part.grad = distribute_tensor(full.grad, mesh, [Shard(0)])
            norms = clip_gradients(whole, 1.0), clip_gradients(parts, 1.0)
            assert type(norms[1]) is torch.Tensor
            torch.testing.assert_close(norms[0], norms[1])
            for optimizer in optimizers:
                optimizer.step()
        for full, part in zip(whole, parts, strict=True):
            torch.testing.assert_close(part.full_tensor(), full.detach())


def predictions() -> None:
    """Several processes return what one returns: every sample once, in order, on every rank."""

    class Forms(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

        def forward(self, x):
            logits = self.layers(x)
            return {"logits": logits, "class": logits.argmax(1), "pair": (x[:, :1], x.double())}

    class Padded(nn.Module):
        def forward(self, x):
            return x[:, : int(x[:, 0].max())]

    with world() as w:
        for size in (1, 2, 7, 22):
            inputs = torch.arange(float(3 * size)).view(size, 3)
            sources = (
                inputs,
                TensorDataset(inputs, inputs[:, 0]),
                DataLoader(inputs, batch_size=4, shuffle=True),
                TorchDataLoader(TensorDataset(inputs), 4, sampler=DistributedSampler(inputs, w.size, w.rank)),
                TorchDataLoader(TensorDataset(inputs), 4, shuffle=True, drop_last=True),
            )
            model = Forms()
            alone = model.eval()(inputs)
            for source in sources:
                found = Trainer(model, config={"batch_size": 4}, progress=False, world=w, device="cpu").predict(
                    source
                )
                torch.testing.assert_close(found, alone)
                assert found["class"].dtype == torch.int64
        ragged = torch.tensor([[2.0, 0, 0], [2, 1, 1], [3, 2, 2], [3, 3, 3], [1, 4, 4]])
        found = predict(Padded(), ragged, batch_size=2)
        assert [len(row) for row in found][-1] == 1
        assert [row[0].item() for row in found] == ragged[:, 0].tolist()
        documents = [{"input_ids": torch.arange(1, 1 + length)} for length in (2, 5, 3, 4, 2, 1, 6)]
        found = predict(Tokens(), LoaderData(Documents(documents), {"collate_fn": padded}), batch_size=4)
        assert [row[:, 0].tolist() for row in found] == [one["input_ids"].tolist() for one in documents]
        with pytest.raises(ConfigError, match="list"):
            Trainer(model, progress=False, world=w, device="cpu").predict([inputs])


class Documents(list, torch.utils.data.Dataset):
    pass


class Tokens(nn.Module):
    def forward(self, input_ids, attention_mask):
        return input_ids[:, :, None].float().expand(-1, -1, 3)


def padded(documents):
    ids = nn.utils.rnn.pad_sequence([one["input_ids"] for one in documents], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


class Limited(nn.Module):
    """Has memory for only some samples at once, on one rank less than on the others; it has buffers too."""

    def __init__(self, most: int, fails_in: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.register_buffer("seen", torch.zeros(()))
        self.most, self.fails_in = most, fails_in

    def forward(self, x):
        if self.training and len(x) > self.most and self.fails_in == "forward":
            raise torch.OutOfMemoryError("out of memory")
        if self.training:
            self.seen += len(x)
        y = self.layers(x.double())
        if self.training and len(x) > self.most:
            y.register_hook(self.fail)
        return y

    @staticmethod
    def fail(gradient):
        raise torch.OutOfMemoryError("out of memory")


def out_of_memory_on_one_rank() -> None:
    """Both ranks do the step again in smaller parts: the weights are those of one process with enough memory."""
    logging.getLogger("etude").setLevel(logging.ERROR)
    with world() as w:
        for place, unused in (("forward", False), ("backward", False), ("backward", True)):
            # 17 samples: the last batch of 1 leaves a rank without samples
            options = {
                "config": {"epochs": 2, "batch_size": 8, "device": "cpu"},
                "progress": False,
                "optimizer": "sgd",
            }
            alone = Trainer(Limited(99), data(17), world=World(), **options)
            alone.train()
            options["config"] |= {"on_out_of_memory": "split", "find_unused_parameters": unused}
            made = Trainer(Limited(1 if w.rank else 3, place), data(17), world=w, **options)
            made.train()
            assert made.step.splitter.size == 2, made.step.splitter.size
            for one, other in zip(alone.model.parameters(), made.model.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


class Two(Task):
    """Has two terms."""

    def __call__(self, model, batch, *, metrics):
        output = model(batch[0])
        terms = {"loss": output.square(), "other": output[:, :1].cos()}
        return {name: LossTerm(term.sum(), term.numel()) for name, term in terms.items()}


class Counted(Two):
    """Tells their counts without the model."""

    def counts(self, batch):
        return {"loss": 2 * len(batch[0]), "other": len(batch[0])}


def out_of_memory_with_several_terms() -> None:
    """A step is done again if the counts of all terms are known beforehand: they are exchanged during a step."""
    logging.getLogger("etude").setLevel(logging.ERROR)
    with world() as w:
        options = {"config": {"epochs": 2, "batch_size": 8, "device": "cpu"}, "progress": False, "optimizer": "sgd"}
        alone = Trainer(Limited(99), data(17), task=Two(), world=World(), **options)
        alone.train()
        options["config"] |= {"on_out_of_memory": "split"}
        made = Trainer(Limited(1 if w.rank else 3), data(17), task=Counted(), world=w, **options)
        made.train()
        for one, other in zip(alone.model.parameters(), made.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
        made = Trainer(nn.Linear(4, 2), data(16), task=Two(), world=w, **options)
        with pytest.raises(TrainingError, match=r"several terms.*on_out_of_memory"):
            made.train()


def automatic_size_of_two_ranks() -> None:
    """The size is one that fits on every rank."""
    with world() as w:
        config = {"epochs": 1, "batch_size": "auto", "device": "cpu"}
        made = Trainer(Limited(3 if w.rank else 40), data(30), config=config, progress=False, world=w)
        assert made.config.batch_size == 4, made.config.batch_size  # 2 samples on each
        made.train()
        config = {"epochs": 1, "micro_batch_size": "auto", "batch_size": 17, "device": "cpu"}
        made = Trainer(Limited(3 if w.rank else 40), data(30), config=config, progress=False, world=w)
        assert made.config.micro_batch_size == 6, made.config.micro_batch_size
        made.train()


class Heard(Callback):
    """Keeps what is found."""

    shows_notices = True

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def on_notice(self, message, facts):
        if facts.get("finding"):
            self.found.append((message, facts))


class ReadsLater(NaNDebugger):
    """Looks at a skipped step when the log is read, as on CUDA."""

    def on_train_begin(self, run):
        super().on_train_begin(run)
        self._reads = False


def nan_on_one_rank() -> None:
    """Whichever rank has the sample, the process that writes the run folder names it."""
    with world() as w:
        for bad, debugger in ((1, NaNDebugger()), (6, NaNDebugger()), (6, ReadsLater())):
            x, y = data(16)
            x[bad] = float("nan")
            heard, folder = Heard(), w.share_text(tempfile.mkdtemp())
            loader = DataLoader((x, y), batch_size=8, shuffle=False)
            trainer(loader, callbacks=[debugger, heard], world=w, output_dir=f"{folder}/run").train()
            if not w.is_main:
                continue
            ((message, facts),) = heard.found
            assert f"the batch contains non-finite values (part 0); sample {bad % 4}, on rank {bad // 4}" in message
            assert facts["rows"] == [bad % 4]
            assert bool(facts["file"]) == (bad < 4), message  # the other rank's batch is not here


def resumed_on_one_machine() -> None:
    """A launcher starts `train` again, while the script of a machine that comes again has found the run."""
    folder = os.environ["TOY_FOLDER"]
    if os.environ["RANK"] == os.environ["TOY_RESUMES"]:
        outcome = resume_run(folder, progress=False)
    else:
        outcome = train_experiment(os.environ["TOY_CONFIG"], run_dir=folder, progress=False)
    assert outcome.status == "finished"


def resumed_elsewhere() -> None:
    """The run that one process resumes is not that which another one begins."""
    resumes, config = os.environ["RANK"] == "1", os.environ["TOY_CONFIG"]
    begin = partial(resume_run, os.environ["TOY_FOLDER"]) if resumes else partial(train_experiment, config)
    with pytest.raises(ConfigError, match="differ in the run folder"):
        begin(progress=False)
