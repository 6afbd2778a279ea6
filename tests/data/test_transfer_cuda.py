"""Delivery to a CUDA device: the same batches as on the CPU, safe beside a busy device, without waiting."""

import pytest
import torch

from etude.data import DataLoader, Normalize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

IMAGES = torch.randint(0, 256, (500, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(500)


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return IMAGES[index], LABELS[index]


def expected(epoch=0, position=0, transform=None):
    return list(DataLoader(IMAGES, LABELS, 64, transform=transform).iterate(epoch, position))


def assert_same(got, wanted):
    assert len(got) == len(wanted)
    for (data, labels), (data_wanted, labels_wanted) in zip(got, wanted, strict=True):
        assert data.is_cuda
        assert labels.is_cuda
        torch.testing.assert_close(data.cpu(), data_wanted)
        assert torch.equal(labels.cpu(), labels_wanted)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("pin_memory", [None, False, True])
@pytest.mark.parametrize("transform", [None, Normalize(0.1307, 0.3081), Normalize([0.1307], [0.3081])])
def test_tensors_in_host_memory(prefetch, pin_memory, transform):
    loader = DataLoader(
        IMAGES, LABELS, 64, prefetch=prefetch, pin_memory=pin_memory, transform=transform, device="cuda"
    )
    for epoch, position in ((0, 0), (1, 128)):
        assert_same(list(loader.iterate(epoch, position)), expected(epoch, position, transform))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_tensors_on_the_device(prefetch):
    data = IMAGES.cuda()
    loader = DataLoader(data, LABELS.cuda(), 64, prefetch=prefetch, device="cuda")
    assert_same(list(loader.iterate(2)), expected(2))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_datasets(prefetch, num_workers):
    loader = DataLoader(Pictures(), batch_size=64, prefetch=prefetch, num_workers=num_workers, device="cuda")
    assert_same(list(loader.iterate(1, 64)), expected(1, 64))


@pytest.mark.parametrize("source", ["tensors", "dataset"])
def test_memory_is_not_reused_while_the_device_is_busy(source):
    """Each batch is consumed late, by work queued behind a long kernel, and dropped at once by the host."""
    options = {"batch_size": 64, "prefetch": 2, "device": "cuda"}
    loader = DataLoader(IMAGES, LABELS, **options) if source == "tensors" else DataLoader(Pictures(), **options)
    totals = []
    for epoch in range(3):
        for data, labels in loader.iterate(epoch):
            torch.cuda._sleep(20_000_000)
            totals.append(data.double().sum() + labels.double().sum() * 1000)
            del data, labels
    wanted = [
        batch.data.double().sum() + batch.labels.double().sum() * 1000
        for epoch in range(3)
        for batch in expected(epoch)
    ]
    assert torch.stack(totals).tolist() == torch.stack(wanted).tolist()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_host_never_waits(prefetch):
    loader = DataLoader(IMAGES, LABELS, 64, prefetch=prefetch, transform=Normalize(0.1307, 0.3081), device="cuda")
    list(loader.iterate(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(loader.iterate(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(batches, expected(1, transform=Normalize(0.1307, 0.3081)))


@pytest.mark.parametrize("transform", [None, lambda data: data.float()])
def test_pinned_batches_for_whoever_moves_them(transform):
    for prefetch in (0, 2):
        batch = next(
            DataLoader(IMAGES, LABELS, 64, prefetch=prefetch, transform=transform, pin_memory=True).iterate(0)
        )
        assert batch.data.is_pinned()
        assert batch.labels.is_pinned()


def test_random_transforms_draw_on_the_device():
    def jitter(data, *, generator):
        return data + torch.rand(data.shape, generator=generator, device=data.device)

    runs = [
        [
            batch.data
            for batch in DataLoader(IMAGES, LABELS, 64, prefetch=p, transform=jitter, device="cuda").iterate(0)
        ]
        for p in (0, 2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_closing_early():
    iterator = DataLoader(IMAGES, LABELS, 64, prefetch=2, device="cuda").iterate(0)
    next(iterator)
    iterator.close()
    assert list(iterator) == []
