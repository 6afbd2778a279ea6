"""Batches of any kind through the whole trainer: graphs, packed sequences, dataclasses, lists of images."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader as TorchDataLoader

from batch_classes import GraphBatch, OneGraph, graphs
from etude import Callback, DataLoader, Trainer
from etude.core import DataError, LossTerm, TrainingError
from etude.engine.capture import Capture
from run_files import records, weights
from stub_recorder import RunAgain

SIZES = [3, 5, 2, 4, 6, 3, 2, 5, 4, 3, 6, 2, 3]  # nodes of each graph
BATCH = 4
EPOCHS = 2


class MeanOfNodes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.node, self.out = nn.Linear(4, 8), nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 2))

    def forward(self, graph):
        hidden = self.node(graph.x).relu()
        hidden = hidden + hidden[graph.edge_index[0]]  # every node has one edge
        sums = hidden.new_zeros(graph.num_graphs, 8).index_add(0, graph.batch, hidden)
        return self.out(sums / graph.batch.bincount(minlength=graph.num_graphs)[:, None])


def collate(sizes):
    return graphs(list(sizes), seed=sum(sizes))


def loss_of_batch(output, batch):
    return nn.functional.cross_entropy(output, batch.y)


def task(model, batch, *, metrics):
    values = nn.functional.cross_entropy(model(batch), batch.y, reduction="none")
    return {"loss": LossTerm(values.sum(), len(values))}


LOADERS = {
    "torch": lambda: TorchDataLoader(SIZES, batch_size=BATCH, shuffle=True, collate_fn=collate),
    "list": lambda: [collate(SIZES[start : start + BATCH]) for start in range(0, len(SIZES), BATCH)],
    "etude": lambda: DataLoader(SIZES, batch_size=BATCH, collate_fn=collate, seed=4),
}


class StopAt(Callback):
    def __init__(self, step):
        super().__init__()
        self.step, self.seen = step, 0

    def on_step_end(self, report):
        self.seen += 1
        if self.seen == self.step:
            self.control.request_stop("test")


def trainer(folder=None, loader="torch", callbacks=(), model=None, data=None, validation=None, **options):
    config = {"epochs": EPOCHS, "log_interval": 1, "device": "cpu", "batch_size": BATCH}
    return Trainer(
        MeanOfNodes() if model is None else model,
        LOADERS[loader]() if data is None else data,
        validation,
        config=config,
        callbacks=callbacks,
        output_dir=folder,
        progress=False,
        **options,
    )


@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_on_graphs_stopped_after_any_step_ends_with_the_same_bytes(tmp_path, loader):
    straight = tmp_path / "straight"
    trainer(straight, loader, validation=LOADERS["list"]()).train()
    for step in (1, 3, 4, 6):
        folder = tmp_path / str(step)
        trainer(folder, loader, [StopAt(step)], validation=LOADERS["list"]()).train()
        torch.rand(step)
        second = trainer(folder, loader, validation=LOADERS["list"](), resume=True)
        assert second.state.clock.step == step
        second.train()
        assert weights(folder) == weights(straight)
        assert records(folder) == records(straight)
    assert [record["samples"] for record in records(straight) if "samples" in record][-1] == EPOCHS * len(SIZES)


LOSSES = {
    "by its shapes": {},
    "of torch": {"loss": nn.CrossEntropyLoss()},
    "of the batch": {"loss": loss_of_batch},
    "in a task": {"task": task},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_every_way_to_give_a_loss_is_the_same_loss(options):
    whole = graphs(SIZES)
    model = MeanOfNodes().eval()
    expected = nn.functional.cross_entropy(model(whole), whole.y).item()
    parts = [graphs(SIZES)]  # one batch: the graphs of several would be others
    assert trainer(model=model, **options).evaluate(parts)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_of_the_batch_weighs_batches_by_their_samples():
    parts = LOADERS["list"]()
    model = MeanOfNodes().eval()
    values = torch.cat([nn.functional.cross_entropy(model(part), part.y, reduction="none") for part in parts])
    found = trainer(model=model, loss=loss_of_batch).evaluate(parts)
    assert found["loss"] == pytest.approx(values.mean().item(), rel=1e-5)


class OfOneGraph(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(4, 2)

    def forward(self, graph):
        return self.out(graph.x).mean(0, keepdim=True)


def single_graphs():
    return [OneGraph(torch.full((size, 4), size / 5), torch.tensor([size % 2])) for size in SIZES[:5]]


def test_batches_that_cannot_be_counted_are_counted_as_batches(tmp_path, capsys):
    straight = tmp_path / "straight"
    numbers = trainer(straight, model=OfOneGraph(), data=single_graphs()).train()
    assert numbers["batches_per_s"] > 0
    assert "samples_per_s" not in numbers
    assert [record["samples"] for record in records(straight) if "samples" in record] == list(range(1, 11))
    for step in (2, 5, 8):
        folder = tmp_path / str(step)
        trainer(folder, callbacks=[StopAt(step)], model=OfOneGraph(), data=single_graphs()).train()
        trainer(folder, model=OfOneGraph(), data=single_graphs(), resume=True).train()
        assert weights(folder) == weights(straight)
        assert records(folder) == records(straight)
    Trainer(OfOneGraph(), single_graphs(), config={"epochs": 1, "log_interval": 1, "device": "cpu"}).train()
    shown = capsys.readouterr()
    assert "batches/s" in shown.out + shown.err
    assert "samples/s" not in shown.out + shown.err


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.out = nn.GRU(2, 4), nn.Linear(4, 2)

    def forward(self, packed):
        assert isinstance(packed, PackedSequence)
        return self.out(self.rnn(packed)[1][0])


def test_packed_sequences():
    packed = [pack_sequence([torch.ones(n, 2) for n in lengths]) for lengths in ((4, 2, 1), (3, 3))]
    data = [(one, torch.zeros(int(one.batch_sizes[0]), dtype=torch.long)) for one in packed]
    run = trainer(model=LastState(), data=data)
    run.train()
    assert run.state.clock.samples == EPOCHS * 5
    assert run.evaluate(data)["accuracy"] >= 0

    def to_zero(output, batch):
        assert isinstance(batch, PackedSequence)
        return output.square().mean()

    run = trainer(model=LastState(), data=packed, loss=to_zero)
    run.train()
    assert run.state.clock.samples == EPOCHS * 5


@dataclass(frozen=True)
class Reading:
    x: torch.Tensor
    labels: torch.Tensor
    scale: float = 2.0


class OfReading(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(3, 2)

    def forward(self, reading):
        return self.out(reading.x) * reading.scale


def readings(count=8):
    generator = torch.Generator().manual_seed(1)
    return [
        Reading(torch.randn(5, 3, generator=generator), torch.randint(2, (5,), generator=generator))
        for _ in range(count)
    ]


def test_dataclasses_and_the_same_as_pairs():
    class OfPair(OfReading):
        def forward(self, x):
            return self.out(x) * 2.0

    one = trainer(model=OfReading(), data=readings())
    other = trainer(model=OfPair(), data=[(reading.x, reading.labels) for reading in readings()])
    assert one.train()["loss"] == other.train()["loss"]
    assert one.state.clock.samples == EPOCHS * 40


def captured(data, model):
    run = trainer(model=model, data=data)
    notices = []
    run.step.capture = Capture(run.step, RunAgain(run.step, 1.0))
    run.step.notice = notices.append
    for _ in range(3):
        for batch in data:
            run.step([batch])
    about_capture = [one for one in notices if not one.startswith("loss: ")]
    return about_capture, [param.detach().clone() for param in model.parameters()]


def test_steps_on_dataclasses_are_captured_and_those_on_objects_are_not():
    data = readings()
    plain = trainer(model=OfReading(), data=data)
    for _ in range(3):
        for batch in data:
            plain.step([batch])
    notices, found = captured(data, OfReading())
    assert notices == ["steps are captured as CUDA graphs"]
    for one, other in zip(found, plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach())
    notices, _ = captured(LOADERS["list"](), MeanOfNodes())
    assert len(notices) == 1
    assert GraphBatch.__name__ in notices[0]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(3, 4)

    def forward(self, images):
        return [self.out(image.mean((1, 2))) for image in images]


def test_lists_of_images_count_as_many_as_they_are():
    samples = [(torch.rand(3, 4 + n, 5), {"boxes": torch.rand(n + 1, 4)}) for n in range(5)]

    def boxes(output, batch):
        distances = [(one - target["boxes"]).abs().mean() for one, target in zip(output, batch[1], strict=True)]
        return torch.stack(distances).mean()

    loader = TorchDataLoader(samples, batch_size=2, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    run = trainer(model=Detector(), data=loader, loss=boxes)
    run.train()
    assert run.state.clock.samples == EPOCHS * 5


def test_an_object_without_labels_says_what_was_found_and_what_to_do():
    class Unlabelled:
        x = torch.zeros(2, 4)

        def to(self, device):
            return self

    with pytest.raises(TrainingError, match=r"Unlabelled.*\(output, batch\)"):
        trainer(model=OfOneGraph(), data=[Unlabelled()], loss=nn.CrossEntropyLoss()).train()


def test_a_share_of_no_graphs_is_refused_with_the_remedy():
    share = DataLoader(SIZES[:5], batch_size=4, shuffle=False, collate_fn=collate, rank=0, world_size=2)
    batches = share.iterate(0)
    assert next(batches).num_graphs == 2
    with pytest.raises(DataError, match="drop_last"):
        list(batches)


@pytest.mark.filterwarnings("ignore")
def test_graphs_of_pytorch_geometric(tmp_path):
    data, loader = pytest.importorskip("torch_geometric.data"), pytest.importorskip("torch_geometric.loader")
    source = torch.Generator().manual_seed(0)
    rows = [
        data.Data(x=torch.randn(size, 4, generator=source), y=torch.tensor([size % 2]), num_nodes=size)
        for size in SIZES
    ]

    class Net(MeanOfNodes):
        def forward(self, batch):
            nodes = self.node(batch.x)
            sums = nodes.new_zeros(batch.num_graphs, nodes.shape[1]).index_add(0, batch.batch, nodes)
            return self.out(sums)

    class StopAt(Callback):
        left = 5

        def on_step_end(self, report):
            self.left -= 1
            if self.left == 0:
                self.control.request_stop("test")

    def run(folder, *callbacks, resume=False):
        torch.manual_seed(1)
        batches = loader.DataLoader(rows, batch_size=BATCH, shuffle=True)
        options = {"output_dir": folder, "resume": resume, "callbacks": callbacks, "progress": False}
        trainer = Trainer(Net(), batches, config={"epochs": EPOCHS, "device": "cpu"}, **options)
        return trainer.train(), trainer.model

    logs, straight = run(tmp_path / "straight")
    assert "samples_per_s" in logs
    run(tmp_path / "parts", StopAt())
    _, resumed = run(tmp_path / "parts", resume=True)
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))
