"""Streams from config files and from Python: data sets combined, and the loaders made of them."""

import json
import shutil

import pytest
import torch
from token_samples import numbered

from etude.config import build_component
from etude.core.errors import ConfigError, DataError, EtudeError
from etude.data import (
    DataLoader,
    DataLoaderFactory,
    DataSplits,
    StreamLoader,
    Streams,
    TensorData,
    TokenWriter,
    combine_streams,
    make_loader,
)


def folder(path, *, lengths=(40, 60), tokenizer=None, splits=("train", "validation"), digest=None, vocab_size=500):
    """A folder of token files, as `etude tokenize` makes it."""
    path.mkdir()
    for split in splits:
        meta = {"vocab_size": vocab_size} | ({} if digest is None else {"tokenizer_sha256": digest})
        with TokenWriter(path / f"{split}.bin", dtype="uint16", meta=meta) as out:
            for ids in numbered(lengths):
                out.add(ids)
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def section(**roots):
    return {
        "name": "streams",
        "streams": {name: {"name": "tokens", "root": str(root), "length": 8} for name, root in roots.items()},
    }


def test_a_section_of_data_sections(tmp_path):
    code = folder(tmp_path / "code", tokenizer={"a": 1})
    prose = folder(tmp_path / "prose", tokenizer={"a": 1}, splits=("train",), vocab_size=700)
    wanted = section(code=code, prose=prose) | {
        "weights": {"code": 3, "prose": 1},
        "draw": "together",
        "epoch_samples": 40,
    }
    wanted["streams"]["prose"] |= {"read": "documents", "length": 16}
    splits = build_component("data", wanted)
    assert isinstance(splits.train, Streams)
    assert splits.train.weights == {"code": 3, "prose": 1}
    assert (splits.train.draw, len(splits.train)) == ("together", 40)
    assert set(splits.validation.parts) == {"code"}
    assert splits.validation.absent == {"prose"}
    assert splits.test is None
    assert splits.vocab_size == 700
    assert splits.tokenizer == code / "tokenizer.json"
    loader = splits.make_loader("train", 8)
    assert len(loader) == 5
    widths = [{part["stream"]: part["input_ids"].shape for part in batch} for batch in loader.iterate(0)]
    assert all(one["code"] == (6, 8) and len(one["prose"]) == 2 for one in widths)
    assert {batch["stream"] for batch in splits.make_loader("validation", 8).iterate(0)} == {"code"}
    with pytest.raises(DataError, match="no test split"):
        splits.make_loader("test", 8)


def test_mistakes_in_a_section_are_reported_with_their_place(tmp_path):
    code = folder(tmp_path / "code")
    wrong = section(code=code)
    wrong["streams"]["code"]["lenght"] = 3
    with pytest.raises(ConfigError, match=r"streams\.code.*lenght.*length"):
        build_component("data", wrong)
    with pytest.raises(EtudeError, match=r"data: data 'streams': weights.*'cod'.*did you mean 'code'"):
        build_component("data", section(code=code) | {"weights": {"cod": 1}})
    with pytest.raises(ConfigError, match="draw"):
        build_component("data", section(code=code) | {"draw": "both"})
    with pytest.raises(EtudeError, match=r"data\.streams\.other.*has no train\.bin"):
        build_component("data", section(code=code, other=tmp_path))
    with pytest.raises(EtudeError, match="no streams"):
        build_component("data", {"name": "streams", "streams": {}})


@pytest.mark.parametrize("how", ["files", "digests", "mixed"])
def test_different_tokenizers_are_refused(tmp_path, how):
    one = {"files": {"tokenizer": {"a": 1}}, "digests": {"digest": "x"}, "mixed": {"digest": "x"}}[how]
    other = {"files": {"tokenizer": {"b": 1}}, "digests": {"digest": "y"}, "mixed": {"tokenizer": {"a": 1}}}[how]
    first, second = folder(tmp_path / "a", **one), folder(tmp_path / "b", **other)
    silent = folder(tmp_path / "c")
    with pytest.raises(EtudeError, match="'a' and 'b' have different tokenizers"):
        build_component("data", section(c=silent, a=first, b=second))
    shutil.copytree(first, tmp_path / "d")
    build_component("data", section(a=first, c=silent, d=tmp_path / "d"))


def images(number, **more):
    return DataSplits(
        TensorData(torch.zeros(number, 3), torch.zeros(number, dtype=torch.int64)), input_shape=(3,), **more
    )


def test_what_data_sets_agree_on_is_kept():
    splits = combine_streams({"a": images(4, num_classes=2), "b": images(6, num_classes=3)})
    assert (splits.input_shape, splits.num_classes, splits.vocab_size) == ((3,), None, None)
    assert combine_streams({"a": images(4, num_classes=2), "b": images(6, num_classes=2)}).num_classes == 2
    assert splits.validation is None
    with pytest.raises(DataError, match="stream 'b' is a list"):
        combine_streams({"a": images(4), "b": [1]})


def test_factories_make_loaders_of_streams():
    streams = combine_streams({"a": images(40), "b": images(21)}).train
    factory = DataLoaderFactory(batch_size=8, seed=3, drop_last=True, prefetch=2, rank=1, world_size=2)
    training, evaluation = factory.create(streams), factory.create(streams, training=False)
    assert isinstance(training, StreamLoader)
    assert isinstance(evaluation, StreamLoader)
    assert (training.seed, training.rank, training.world_size, training.prefetch) == (3, 1, 2, 2)
    assert len(training) == 61 // 8
    assert len(evaluation) == 5 + 3
    assert (training.training, training.shuffle, evaluation.training, evaluation.shuffle) == (
        True,
        True,
        False,
        False,
    )
    assert sum(len(batch["input"]) for batch in training.iterate(0)) == 7 * 4
    with pytest.raises(DataError, match=r"num_workers is 2.*set it to 0"):
        DataLoaderFactory(num_workers=2).create(streams)
    assert isinstance(factory.create(torch.arange(40)), DataLoader)


def test_make_loader_trains_where_it_shuffles():
    streams = Streams({"a": torch.arange(5), "b": torch.arange(4)})
    assert [len(batch["input"]) for batch in make_loader(streams, 4).iterate(0)] == [4, 4, 4]
    assert [len(batch["input"]) for batch in make_loader(streams, 4, shuffle=False).iterate(0)] == [4, 1, 4]
    ordered = make_loader(streams, 4, shuffle=False, training=True)
    assert [len(batch["input"]) for batch in ordered.iterate(0)] == [4, 4, 4]


@pytest.mark.parametrize("way", [{}, {"read": "documents", "bucket_batches": 2}, {"read": "packed"}])
def test_a_token_mixture_is_a_mixed_draw_of_streams(tmp_path, way):
    roots = {"code": folder(tmp_path / "code", lengths=(90, 60)), "prose": folder(tmp_path / "prose")}
    weights = {"code": 3.0, "prose": 1.0}
    streams = section(**roots) | {"weights": weights, "draw": "mixed", "epoch_samples": 30}
    for one in streams["streams"].values():
        one |= way
    mixture = {
        "name": "token_mixture",
        "roots": {name: str(root) for name, root in roots.items()},
        "length": 8,
        **way,
    }
    mixed, expected = (
        build_component("data", one) for one in (streams, mixture | {"weights": weights, "epoch_samples": 30})
    )
    assert mixed.vocab_size == expected.vocab_size == 500
    for split in ("train", "validation"):
        batches = [splits.make_loader(split, 4, seed=2).iterate(1, 8) for splits in (mixed, expected)]
        for one, other in zip(*batches, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def test_only_token_data_is_mixed_into_one_batch():
    with pytest.raises(DataError, match=r"'a'.*draw"):
        combine_streams({"a": images(4)}, draw="mixed")
