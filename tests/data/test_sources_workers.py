"""Map-style datasets: batches and their random augmentations do not depend on who fetches them."""

import gc
import multiprocessing
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader as TorchLoader, Dataset, Subset, default_collate, get_worker_info

from batch_classes import graphs
from etude.core.errors import DataError
from etude.core.random import mix
from etude.data import DataLoader, as_loader
from etude.data.sources.workers import collate_samples

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with few cores
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # Python 3.12 on
]


def batches(dataset, epoch=0, position=0, **options):
    return list(DataLoader(dataset, batch_size=5, seed=3, **options).iterate(epoch, position))


def assert_equal(got, expected):
    assert len(got) == len(expected)
    for (x, y), (x_expected, y_expected) in zip(got, expected, strict=True):
        assert torch.equal(x, x_expected)
        assert torch.equal(y, y_expected)


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state()


class Drawing(Dataset):
    """Sample i is (i, what `draw` makes of it)."""

    def __init__(self, draw, length=22):
        self.draw, self.length = draw, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return float(index), float(self.draw(index) or 0)


class Whole(Drawing):
    """Hands out whole batches, and counts what it is asked for."""

    batches = singles = 0

    def __getitem__(self, index):
        self.singles += 1
        return super().__getitem__(index)

    def __getitems__(self, indices):
        self.batches += 1
        return [Drawing.__getitem__(self, index) for index in indices]


def inherited(_):
    with torch.random.fork_rng(devices=[]):
        return torch.rand(())


def collate_with_noise(samples):
    x, y = default_collate(samples)
    return x, y + np.random.rand() + torch.rand(())


DRAWS = {
    "nothing": lambda _: 0,
    "python": lambda _: random.random(),
    "numpy": lambda _: np.random.rand(),
    "torch": lambda _: torch.rand(()),
    "all": lambda _: random.random() + np.random.rand() + torch.rand(()),
    "sometimes": lambda i: random.random() if i % 7 == 3 else 0,
    "one after the other": lambda i: torch.rand(()) + (np.random.rand() if i % 5 == 2 else 0),
    "normal": lambda _: random.gauss(0, 1) + np.random.randn() + torch.randn(()),
    "its seed": lambda i: (torch.initial_seed() + i) % 1009,
    "inherited": inherited,
    "seeds itself": lambda i: torch.manual_seed(i) and torch.rand(()),
}


def seeded_each_time(dataset, loader, epoch, collate):
    """The definition: all generators are seeded before each sample."""
    for position in range(0, loader.sampler.epoch_samples, loader.batch_size):
        samples = []
        for index in loader.sampler.batch(epoch, position).tolist():
            seed = mix(loader.sampler.seed, epoch, index)
            random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)
            samples.append(dataset[index])
        yield collate(samples)


@pytest.mark.parametrize("collate", [default_collate, collate_with_noise])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_sample_draws_as_if_all_generators_were_seeded_for_it(kind, collate):
    for make, options in ((Drawing, {}), (Whole, {}), (lambda draw: Subset(Drawing(draw), range(22)), {})):
        for size in (1, 5):
            dataset = make(DRAWS[kind])
            loader = DataLoader(dataset, batch_size=size, seed=3, collate_fn=collate, **options)
            for epoch in (0, 1):
                assert_equal(list(loader.iterate(epoch)), list(seeded_each_time(dataset, loader, epoch, collate)))


def test_so_it_does_in_a_worker():
    for kind in ("sometimes", "one after the other", "its seed"):
        dataset = Drawing(DRAWS[kind])
        loader = DataLoader(dataset, batch_size=5, seed=3, collate_fn=collate_with_noise, num_workers=1)
        expected = list(seeded_each_time(dataset, loader, 1, collate_with_noise))
        assert_equal(list(loader.iterate(1)), expected)


def test_only_generators_that_are_drawn_from_are_seeded(monkeypatch):
    seeds, seed = [], np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda value: (seeds.append(value), seed(value)))
    for kind, expected in (("nothing", 1), ("torch", 1), ("numpy", 22)):
        seeds.clear()
        batches(Drawing(DRAWS[kind]))
        assert len(seeds) == expected


def test_each_sample_is_asked_for_once_if_the_first_shows_what_is_drawn():
    for kind in ("nothing", "all"):
        asked = []
        batches(Drawing(lambda i: asked.append(i) or DRAWS[kind](i)))
        assert sorted(asked) == list(range(22))


def test_whole_batches_are_fetched_at_once_unless_they_draw():
    plain, drawing = Whole(DRAWS["nothing"]), Whole(DRAWS["torch"])
    batches(plain)
    batches(drawing)
    assert (plain.batches, plain.singles) == (5, 0)
    assert (drawing.batches, drawing.singles) == (1, 22)


NUMBERS = st.one_of(st.integers(-5, 5), st.integers(), st.floats(width=16), st.booleans())


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_numbers_are_collated_as_torch_does(samples):
    try:
        expected = default_collate([{"x": (value, [value])} for value in samples])
    except (OverflowError, RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            collate_samples([{"x": (value, [value])} for value in samples])
        return
    got = collate_samples([{"x": (value, [value])} for value in samples])
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_samples_come_in_the_samplers_order(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, seed=3)
    got = [x[:, 0].long().tolist() for x, _ in loader.iterate(2)]
    assert got == [loader.sampler.batch(2, p).tolist() for p in range(0, 22, 5)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        {"prefetch": 2},
    ],
)
def test_workers_and_prefetching_change_nothing(random_dataset, options):
    for epoch in (0, 1):
        expected = batches(random_dataset, epoch)
        assert_equal(batches(random_dataset, epoch, **options), expected)
        assert_equal(batches(random_dataset, epoch, position=10, **options), expected[2:])


def test_persistent_workers_serve_epoch_after_epoch(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, seed=3, num_workers=2, persistent_workers=True)
    for epoch, position in ((0, 0), (1, 0), (1, 10), (0, 5)):
        assert_equal(list(loader.iterate(epoch, position)), batches(random_dataset, epoch, position))
    # An epoch broken off does not leak into the next one.
    iterator = loader.iterate(2)
    next(iterator)
    iterator.close()
    assert_equal(list(loader.iterate(3)), batches(random_dataset, 3))


def test_persistent_workers_are_the_same_processes():
    class WhoAmI(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            import os

            return os.getpid(), get_worker_info().id

    loader = DataLoader(WhoAmI(), batch_size=1, num_workers=2, persistent_workers=True)
    seen = [{int(pid) for pid, _ in loader.iterate(epoch)} for epoch in range(3)]
    assert len(seen[0]) == 2
    assert seen[0] == seen[1] == seen[2]


def test_an_iterator_overtaken_by_another_says_so(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, num_workers=1, persistent_workers=True)
    old = loader.iterate(0)
    next(old)
    new = loader.iterate(1)
    with pytest.raises(DataError, match="a new iteration has begun"):
        next(old)
    assert len(list(new)) == 5


def test_iterators_without_persistent_workers_are_independent(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, seed=3, num_workers=1)
    interleaved = list(zip(loader.iterate(0), loader.iterate(1), strict=True))
    assert_equal([a for a, _ in interleaved], batches(random_dataset, 0))
    assert_equal([b for _, b in interleaved], batches(random_dataset, 1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_callers_generators_are_untouched(random_dataset, num_workers):
    before = generators()
    for _ in DataLoader(random_dataset, batch_size=5, num_workers=num_workers).iterate(0):
        after = generators()
        assert before[:3] == after[:3]
        assert torch.equal(before[3], after[3])


def test_the_callers_draws_do_not_change_the_batches(random_dataset):
    iterator = DataLoader(random_dataset, batch_size=5, seed=3).iterate(0)
    got = []
    for batch in iterator:
        got.append(batch)
        random.random(), np.random.random(), torch.rand(3)
    assert_equal(got, batches(random_dataset))


def test_augmentations_change_with_sample_epoch_and_seed(random_dataset):
    def noise(epoch, seed):
        loader = DataLoader(random_dataset, batch_size=22, seed=seed, shuffle=False)
        return next(loader.iterate(epoch))[0][:, 1:]

    one = noise(0, 0)
    assert len(torch.unique(one)) == one.numel()
    assert not torch.any(one == noise(1, 0))
    assert not torch.any(one == noise(0, 1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_together_see_the_same_samples(random_dataset, num_workers):
    alone = batches(random_dataset)
    for world_size in (2, 4):
        ranks = [
            batches(random_dataset, rank=r, world_size=world_size, num_workers=num_workers) for r in range(world_size)
        ]
        joined = [[torch.cat(parts) for parts in zip(*shares, strict=True)] for shares in zip(*ranks, strict=True)]
        assert_equal(joined, alone)
    # 22 samples in batches of 5 leave 2: with four ranks, some get an empty batch of the right form.
    assert {len(batch[-1][0]) for batch in ranks} == {0, 1}
    assert all(rank[-1][0].shape[1:] == (4,) for rank in ranks)


def test_collate_fn_makes_the_batch():
    loader = DataLoader(
        [3, 1, 2], batch_size=2, shuffle=False, collate_fn=lambda samples: {"n": torch.tensor(samples)}
    )
    assert [batch["n"].tolist() for batch in loader] == [[3, 1], [2]]


def test_lists_of_numbers_in_columns_are_tensors():
    rows = [{"x": [float(i), 1.0], "ids": [[i, 2]], "y": i, "words": ["a", "b"], "n": i / 2} for i in range(3)]
    batch = collate_samples(rows)
    assert list(batch) == ["x", "ids", "y", "words", "n"]
    assert torch.equal(batch["x"], torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]))
    assert torch.equal(batch["ids"], torch.tensor([[[0, 2]], [[1, 2]], [[2, 2]]]))
    assert batch["words"] == [("a", "a", "a"), ("b", "b", "b")]


@pytest.mark.parametrize("other", [[1.0], [1.0, None], ["a", "b"]])
def test_lists_that_cannot_be_put_together_are_named(other):
    with pytest.raises(DataError, match=r"'x'.*collate_fn"):
        next(iter(DataLoader([{"x": [1.0, 2.0]}, {"x": other}], batch_size=2, shuffle=False)))


def test_a_dataset_of_hugging_face_is_read_as_in_its_torch_format():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[0.1 * i, 1.0] for i in range(6)], "y": list(range(6))})
    ours, theirs = (list(DataLoader(one, batch_size=3)) for one in (rows, rows.with_format("torch")))
    assert_equal(*([(batch["x"], batch["y"]) for batch in one] for one in (ours, theirs)))


def test_samples_that_torch_cannot_put_together_are_named():
    with pytest.raises(DataError, match=r"GraphBatch.*collate_fn"):
        next(DataLoader([graphs([3]), graphs([4])], batch_size=2).iterate(0))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_dataset_reaches_the_consumer(num_workers):
    class Broken(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 4:
                raise KeyError("no picture 4")
            return index

    iterator = DataLoader(Broken(), batch_size=2, shuffle=False, num_workers=num_workers).iterate(0)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyError, match="no picture 4"):
        next(iterator)
    iterator.close()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", [DataLoader, lambda *args, **options: as_loader(TorchLoader(*args, **options))])
def test_an_error_in_a_worker_ends_all_workers_at_once(make, persistent):
    def sample(index):
        if index == 3 and is_broken:
            raise KeyError("no picture 3")

    is_broken = True
    before = set(multiprocessing.active_children())
    loader = make(Drawing(sample), batch_size=2, shuffle=False, num_workers=2, persistent_workers=persistent)
    iterator = loader.iterate(0)
    next(iterator)
    assert len(set(multiprocessing.active_children()) - before) == 2
    with pytest.raises(KeyError, match="no picture 3"):
        next(iterator)
    assert set(multiprocessing.active_children()) <= before
    iterator.close()
    is_broken = False
    if not persistent:
        assert len(list(loader.iterate(1))) == 11


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("make", [DataLoader, lambda *args, **options: as_loader(TorchLoader(*args, **options))])
def test_workers_in_a_reference_cycle_end_without_waiting(make, persistent, monkeypatch):
    waited = []
    before = set(multiprocessing.active_children())
    loader = make(Drawing(float), batch_size=2, num_workers=1, persistent_workers=persistent)
    iterator = loader.iterate(0)
    next(iterator)
    (worker,) = set(multiprocessing.active_children()) - before
    join = type(worker).join

    def watched(process, timeout=None):
        join(process, timeout)
        waited.append(process.is_alive())

    monkeypatch.setattr(type(worker), "join", watched)
    cycle = [loader, iterator]
    cycle.append(cycle)
    del loader, iterator, cycle
    gc.collect()
    assert waited
    assert not any(waited)  # no time limit was reached
    assert not worker.is_alive()


def test_by_hand_over_a_dataset(random_dataset):
    loader = DataLoader(random_dataset, batch_size=5, seed=3, num_workers=1)
    got = []
    while loader.has_next():
        got.append(loader.next())
    assert_equal(got, batches(random_dataset))


class Ragged(torch.utils.data.Dataset):
    """Images with their boxes, as for object detection."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"image": torch.zeros(3, 2, 2), "labels": {"boxes": torch.zeros(1 + index, 4)}}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_different_sizes_name_the_collate_fn(num_workers):
    with pytest.raises(DataError, match=r"\(\d, 4\), \(\d, 4\).*collate_fn"):
        next(iter(DataLoader(Ragged(), batch_size=2, num_workers=num_workers)))
