"""`image_folder`: finding, decoding, normalising, broken files; augmentations need no Pillow."""

import io

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from etude.core import ConfigError, DataError
from etude.data import make_loader
from etude.data.catalog import images
from etude.data.catalog.augment import Augmentations, ColorJitter, HorizontalFlip, RandomCrop, VerticalFlip, uniform
from etude.data.catalog.images import load_image_folder
from etude.data.catalog.rows import ArrayRows, Scaling
from etude.experiment.from_data import look_at

# ------------------------------------------------------------------------------------------------ augmentation

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 6), dtype=np.uint8)
KEYS = np.arange(20, dtype=np.uint64)


@pytest.mark.parametrize(
    "augment", [HorizontalFlip(), VerticalFlip(), RandomCrop(2), RandomCrop(2, reflect=True), ColorJitter()]
)
def test_an_augmentation_depends_on_the_key_of_each_image_only(augment):
    before = PIXELS.copy()
    whole = augment(PIXELS, KEYS)
    assert whole.shape == PIXELS.shape
    assert whole.dtype == np.uint8
    assert np.array_equal(before, PIXELS)
    assert not np.array_equal(whole, PIXELS)
    for place in (0, 7, 19):
        assert np.array_equal(augment(PIXELS[[place]], KEYS[[place]])[0], whole[place])


def test_flips_are_flips_with_their_probability():
    for flip, mirrored in ((HorizontalFlip, PIXELS[..., ::-1]), (VerticalFlip, PIXELS[:, :, ::-1])):
        assert np.array_equal(flip(1.0)(PIXELS, KEYS), mirrored)
        assert np.array_equal(flip(0.0)(PIXELS, KEYS), PIXELS)
    keys = np.arange(100_000, dtype=np.uint64)
    assert abs((uniform(keys) < 0.3).mean() - 0.3) < 0.01
    assert abs(np.corrcoef(uniform(keys), uniform(keys, 1))[0, 1]) < 0.01


def test_a_crop_is_a_window_of_the_padded_image():
    padded = np.pad(PIXELS, ((0, 0), (0, 0), (2, 2), (2, 2)))
    places = set()
    for image, around in zip(RandomCrop(2)(PIXELS, KEYS), padded, strict=True):
        found = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if np.array_equal(around[:, top : top + 8, left : left + 6], image)
        ]
        assert len(found) == 1
        places.add(found[0])
    assert len(places) > 5


def test_jitter_of_nothing_changes_nothing():
    assert np.array_equal(ColorJitter(0.0, 0.0, 0.0)(PIXELS, KEYS), PIXELS)


def test_batches_do_not_depend_on_how_they_are_cut_or_when_they_are_made():
    augment = Augmentations([RandomCrop(2), HorizontalFlip(), ColorJitter()])
    rows = ArrayRows(PIXELS, np.arange(20), scaling=Scaling(np.zeros(3), np.ones(3)), augment=augment)

    def epoch(number, size, position=0):
        batches = list(make_loader(rows, size, seed=3, prefetch=number).iterate(epoch=number, position=position))
        return torch.cat([batch.data for batch in batches])

    assert torch.equal(epoch(1, 4), epoch(1, 20))
    assert torch.equal(epoch(1, 4)[8:], epoch(1, 4, position=8))
    assert not torch.equal(epoch(1, 4).sort(0)[0], epoch(2, 4).sort(0)[0])


class Undecoded:
    """Images that are decoded when they are asked for; says whether that happened in a worker process."""

    ndim, dtype, shape = PIXELS.ndim, PIXELS.dtype, PIXELS.shape

    def __init__(self):
        self.here = 0

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, rows):
        self.here += get_worker_info() is None
        return PIXELS[rows]


@pytest.mark.parametrize(
    "workers", [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_decode_the_same_batches(workers):
    scaling, augment = Scaling(np.zeros(3), np.ones(3)), Augmentations([RandomCrop(2), HorizontalFlip()])

    def rows(inputs):
        return ArrayRows(inputs, np.arange(20), np.arange(3, 20), scaling=scaling, augment=augment)

    undecoded = Undecoded()
    loader, expected = make_loader(rows(undecoded), 4, seed=3, **workers), make_loader(rows(PIXELS), 4, seed=3)
    for place in ((0, 0), (1, 0), (1, 8)):
        batches = [list(one.iterate(*place)) for one in (loader, expected)]
        assert len(batches[0]) == len(batches[1])
        for one, two in zip(*batches, strict=True):
            assert torch.equal(one.data, two.data)
            assert torch.equal(one.labels, two.labels)
    assert undecoded.here == 0
    shares = [list(loader.shared(rank, 2).iterate(0)) for rank in (0, 1)]
    assert sorted(torch.cat([batch.labels for share in shares for batch in share]).tolist()) == list(range(3, 20))
    assert sum(len(batch.labels) for batch in shares[1]) < 17


def test_images_that_are_decoded_are_made_beforehand():
    assert make_loader(ArrayRows(Undecoded(), np.arange(20)), 4).prefetch > 0
    assert make_loader(ArrayRows(PIXELS, np.arange(20)), 4).prefetch == 0


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture
def pillow():
    return pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(pillow, tmp_path):
    """Fill a folder with small images: {"cat/1.png": (height, width), …}."""

    def fill(files, root="pictures"):
        source = np.random.default_rng(0)
        for name, shape in files.items():
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = source.integers(0, 256, (*shape, 3), dtype=np.uint8)
            pillow.fromarray(pixels).save(path)
        return tmp_path / root

    return fill


def classes(number, size=(6, 5)):
    return {f"{name}/{place}.png": size for name in ("cat", "dog") for place in range(number)}


def everything(part):
    return part.gather(np.arange(len(part)), epoch=0, seed=0)


def pixels_of(pillow, path):
    return np.asarray(pillow.open(path).convert("RGB")).transpose(2, 0, 1)


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_are_decoded_and_normalised(folder, pillow, in_memory):
    root = folder(classes(10))
    splits = load_image_folder(str(root), in_memory=in_memory)
    assert splits.facts["rows"] == {"train": 16, "validation": 2, "test": 2}
    assert (splits.num_classes, splits.input_shape, splits.facts["classes"]) == (2, (3, 6, 5), ["cat", "dog"])
    mean, std = (np.array(splits.facts[name])[:, None, None] for name in ("mean", "std"))
    files = {pixels_of(pillow, file).tobytes(): file for file in root.rglob("*.png")}
    seen, train = set(), []
    for part in (splits.train, splits.validation, splits.test):
        batch = everything(part)
        raw = batch.data.numpy() * std + mean
        pixels = np.rint(raw * 255).astype(np.uint8)
        np.testing.assert_allclose(raw * 255, pixels, atol=1e-3)
        for image, label in zip(pixels, batch.labels, strict=True):
            file = files[image.tobytes()]
            assert file.parent.name == splits.facts["classes"][label]
            seen.add(file)
        train += [pixels] if part is splits.train else []
    assert len(seen) == 20
    np.testing.assert_allclose(mean[:, 0, 0], (train[0] / 255).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(std[:, 0, 0], (train[0] / 255).std((0, 2, 3)), rtol=1e-6)


def test_parts_depend_on_paths_and_seed_only(folder):
    one = load_image_folder(str(folder(classes(10))))
    more = folder(dict(reversed(classes(10).items())), "again")  # made in another order
    found = images.find_images(more, 0.1, 0.1, 0)
    names = {part: [str(file.relative_to(more)) for file in files] for part, files in found.parts.items()}
    first = images.find_images(folder(classes(10)), 0.1, 0.1, 0)
    other = images.find_images(more, 0.1, 0.1, 1)
    assert names["test"] == [str(file.relative_to(first.roots["train"])) for file in first.parts["test"]]
    assert names["test"] != [str(file.relative_to(more)) for file in other.parts["test"]]
    assert one.facts["rows"]["test"] == len(names["test"])


def test_folders_of_parts(folder):
    root = folder({f"{part}/{name}": size for part in ("train", "val", "test") for name, size in classes(3).items()})
    splits = load_image_folder(str(root))
    assert splits.facts["rows"] == {"train": 6, "validation": 3 * 2, "test": 6}
    (root / "val").rename(root / "elsewhere")
    splits = load_image_folder(str(root), validation=0.5)
    assert splits.facts["rows"] == {"train": 3, "validation": 3, "test": 6}
    splits = load_image_folder(str(root), validation=str(root / "elsewhere"))
    assert splits.facts["rows"] == {"train": 6, "validation": 6, "test": 6}


@pytest.mark.parametrize(("fit", "same"), [("crop", True), ("stretch", False)])
def test_sizes(folder, fit, same):
    root = folder({**classes(2, (8, 4)), "cat/wide.png": (8, 16)})
    splits = load_image_folder(str(root), size=[8, 4], channels=1, fit=fit, validation=0.0, test=0.0)
    assert splits.input_shape == (1, 8, 4)
    wide = everything(splits.train).data[2, 0]
    raw = wide * splits.facts["std"][0] + splits.facts["mean"][0]
    from PIL import Image

    middle = np.asarray(Image.open(root / "cat" / "wide.png").convert("L"))[:, 6:10] / 255
    assert np.allclose(raw, middle, atol=1e-3) is same


def test_given_mean_and_std(folder):
    root = folder(classes(3))
    splits = load_image_folder(str(root), mean=[0.5] * 3, std=[0.25] * 3)
    assert splits.facts["mean"] == [0.5] * 3
    assert everything(splits.train).data.abs().max() <= 2.0 + 1e-6


def test_only_training_images_are_augmented(folder):
    splits = load_image_folder(str(folder(classes(10))), augment=[RandomCrop(2)])

    def twice(part):
        return [part.gather(np.arange(2), epoch=epoch, seed=0).data for epoch in (0, 1)]

    assert not torch.equal(*twice(splits.train))
    assert torch.equal(*twice(splits.validation))


# ------------------------------------------------------------------------------------------------ hostile folders


def damage(root, how):
    path = root / "cat" / "1.png"
    raw = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": raw[: len(raw) // 2], "text": b"not an image"}[how])
    return path


@pytest.mark.parametrize("how", ["empty", "truncated", "text"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_broken_images(folder, how, in_memory, caplog):
    root = folder(classes(5))
    path = damage(root, how)
    options = {"size": 4, "validation": 0.0, "test": 0.0, "in_memory": in_memory}

    def read():
        everything(load_image_folder(str(root), mean=[0.5] * 3, std=[0.5] * 3, **options).train)

    with pytest.raises(DataError, match=r"cat/1\.png.*skip_broken"):
        read()
    splits = load_image_folder(str(root), skip_broken=True, **options)
    assert splits.facts["rows"] == {"train": 9}
    assert len(everything(splits.train).data) == 9
    assert str(path) in caplog.text
    assert "1 of 10" in caplog.text


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ({"1.png": (4, 4)}, ["0 classes"]),
        ({"cat/1.png": (4, 4)}, ["1 classes", "one folder per class"]),
        ({"train/cat/1.png": (4, 4), "train/dog/1.png": (4, 4), "test/cow/1.png": (4, 4)}, ["test/cow", "cat, dog"]),
    ],
)
def test_folders_without_classes(folder, files, facts):
    with pytest.raises(DataError) as caught:
        load_image_folder(str(folder(files)), validation=0.0, test=0.0)
    for fact in facts:
        assert fact in str(caught.value)


def test_mistakes_in_arguments(folder, tmp_path):
    root = str(folder(classes(3)))
    with pytest.raises(ConfigError, match="mean has 2 numbers"):
        load_image_folder(root, mean=[0.5, 0.5])
    with pytest.raises(DataError, match="is not a folder"):
        load_image_folder(str(tmp_path / "nothing"))


def test_a_class_that_is_held_out_whole(folder):
    root = folder({**{f"cat/{i}.png": (4, 4) for i in range(8)}, "dog/1.png": (4, 4)})
    seeds = [
        seed for seed in range(50) if "dog/1.png" in str(images.find_images(root, 0.2, 0.0, seed).parts["validation"])
    ]
    with pytest.raises(DataError, match="'dog' has no training image"):
        load_image_folder(str(root), validation=0.2, test=0.0, seed=seeds[0])


def test_forms_of_images(pillow, tmp_path):
    for name, mode in (("a", "L"), ("b", "RGBA"), ("c", "P"), ("d", "CMYK")):
        for label in ("x", "y"):
            (tmp_path / label).mkdir(exist_ok=True)
            image = pillow.new("RGB", (5, 4), (200, 10, 10)).convert(mode)
            image.save(tmp_path / label / f"{name}.{'jpg' if mode == 'CMYK' else 'png'}")
    upright = pillow.new("RGB", (6, 3))
    exif = upright.getexif()
    exif[0x0112] = 6  # turned by a quarter
    raw = io.BytesIO()
    upright.save(raw, "jpeg", exif=exif)
    (tmp_path / "x" / "z.jpg").write_bytes(raw.getvalue())
    splits = load_image_folder(str(tmp_path), validation=0.0, test=0.0)
    assert splits.input_shape == (3, 4, 5)
    assert images._open(tmp_path / "x" / "z.jpg").size == (3, 6)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sixteen_bits_become_eight(pillow, tmp_path, dtype):
    pixels = np.arange(0, 65536, 257, dtype=dtype).reshape(16, 16)
    path = tmp_path / f"deep.{'png' if dtype is np.uint16 else 'tif'}"
    pillow.fromarray(pixels).save(path)
    for channels in (1, 3):
        found = images.decode_image(path, (channels, 16, 16), "crop")
        assert np.array_equal(found, np.broadcast_to(np.arange(256).reshape(16, 16), (channels, 16, 16)))


def test_floating_point_pixels_have_no_known_range(pillow, tmp_path):
    pillow.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(DataError, match=r"float\.tif.*8 bits"):
        images.decode_image(tmp_path / "float.tif", (3, 4, 4), "crop")


def test_a_large_jpeg_is_decoded_in_part_and_looks_the_same(pillow, tmp_path):
    small = pillow.fromarray(np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8))
    image = small.resize((1200, 900), pillow.Resampling.BICUBIC)
    image.save(tmp_path / "large.jpg", quality=95)
    image.save(tmp_path / "large.png")
    found, expected = (
        images.decode_image(tmp_path / f"large.{kind}", (3, 60, 60), "crop") for kind in ("jpg", "png")
    )
    assert np.abs(found.astype(int) - expected).mean() < 2
    assert images.first_image([tmp_path / "large.jpg"], skip_broken=False)[1] == (900, 1200)


def test_the_size_is_that_of_the_first_image_that_is_not_broken(folder):
    root = folder(classes(5))
    (root / "cat" / "0.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"cat/0\.png.*skip_broken"):
        load_image_folder(str(root))
    assert load_image_folder(str(root), skip_broken=True, validation=0.0, test=0.0).input_shape == (3, 6, 5)
    for file in root.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="none of the 10 images"):
        load_image_folder(str(root), skip_broken=True, validation=0.0, test=0.0)


def test_folders_without_images_are_named(folder, caplog):
    root = folder({**classes(5), "cat/.DS_Store.png": (4, 4)})
    (root / "cow").mkdir()
    (root / ".git").mkdir()
    assert load_image_folder(str(root)).facts["classes"] == ["cat", "dog"]
    assert "cow" in caplog.text
    assert ".git" not in caplog.text


def test_pictures_that_are_not_read_are_counted(folder, caplog):
    root = folder(classes(5))
    for name in ("cat/a.heic", "cat/b.HEIC", "dog/c.svg", "dog/.d.heic", "dog/notes.txt"):
        (root / name).write_bytes(b"x")
    load_image_folder(str(root))
    (record,) = caplog.records
    assert "2 .heic, 1 .svg" in record.getMessage()
    assert "txt" not in record.getMessage()


def test_a_config_for_a_folder_with_broken_images_leaves_them_out(folder):
    root = folder(classes(10))
    (root / "cat" / "0.png").write_bytes(b"")
    finding = look_at(root)
    assert finding.data["skip_broken"]
    assert finding.splits.facts["rows"]["train"] == 15
    assert "cat/0.png" in "".join(finding.words)
    (root / "cat" / "0.png").unlink()
    assert "skip_broken" not in look_at(root).data


def test_without_pillow(folder, monkeypatch):
    root = folder(classes(2))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"etude\[data\]"):
        load_image_folder(str(root), validation=0.0, test=0.0)
