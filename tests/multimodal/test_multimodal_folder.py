"""Folders of multimodal data: written, read again, and checked against their vocabulary and tokenizers."""

import json
import shutil

import numpy as np
import pytest
import torch
from folder_samples import VOCAB, reference, samples
from hypothesis import given, strategies as st

from etude.core.errors import ConfigError, DataError
from etude.data import TokenWriter, check_tokens, load_token_mixture, load_tokens, open_tokens
from etude.multimodal import MultimodalWriter, read_modalities, write_modalities
from etude.multimodal.vocab import build_vocab_spec


def test_what_was_written_is_read_again(folder, tokenizers):
    found = read_modalities(folder)
    assert found.vocab == VOCAB
    assert set(found.codebooks) == {"image", "scalar"}
    assert set(found.edges) == {"scalar"}
    assert torch.equal(found.codebooks["image"], tokenizers["image"].values)
    assert torch.equal(found.codebooks["scalar"], tokenizers["scalar"].values)
    assert torch.equal(found.edges["scalar"], tokenizers["scalar"].edges)


def test_the_writer_writes_ids_and_types(folder):
    file = open_tokens(folder / "train.bin")
    assert file.streams == ("types",)
    assert file.meta["num_types"] == VOCAB.num_types
    wanted = [reference(segments) for segments in samples(40, seed=40)]
    assert [sample.ids.tolist() for sample in file] == [ids for ids, _ in wanted]
    starts, lengths = file.spans(np.arange(len(file)))
    assert file.read(starts, lengths, "types").tolist() == [kind for _, types in wanted for kind in types]
    report = check_tokens(folder / "train.bin")
    assert report.vocab_size == VOCAB.vocab_size


@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 2**32))
def test_rows_are_written_as_one_by_one(tmp_path_factory, number, width, seed):
    rng = np.random.default_rng(seed)
    scalar, image = rng.integers(-1, 16, number), rng.integers(-1, 20, (number, width))
    folder = tmp_path_factory.mktemp("rows")
    kinds = {"label": "int8"}
    with MultimodalWriter(folder / "a.bin", VOCAB, sample_labels=kinds, meta={"survey": "x"}) as writer:
        form = ["BOS", ("scalar", torch.from_numpy(scalar)), ("image", image), "EOS"]
        writer.add_rows(form, labels={"label": np.arange(number)})
        assert (writer.num_samples, writer.num_tokens) == (number, number * (3 + width))
    with MultimodalWriter(folder / "b.bin", VOCAB, sample_labels=kinds, meta={"survey": "x"}) as writer:
        for place in range(number):
            writer.add(
                ["BOS", ("scalar", scalar[place]), ("image", image[place]), "EOS"], labels={"label": np.int8(place)}
            )
    assert (folder / "a.bin").read_bytes() == (folder / "b.bin").read_bytes()


def test_large_vocabularies_have_room(tmp_path):
    vocab = build_vocab_spec(v_image=70_000, modalities={f"m{number}": 1 for number in range(300)})
    with MultimodalWriter(tmp_path / "train.bin", vocab) as writer:
        writer.add([("image", 69_999), ("m299", 0), ("m0", -1)])
    file = open_tokens(tmp_path / "train.bin")
    assert file[0].ids.tolist() == [vocab.base_image + 69_999, vocab.vocab_size - 1, vocab.miss_id]
    assert file.read([0], [3], "types").tolist() == [1, 301, 2]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([("image", [20])], "modality 'image'"),
        ([("image", [-2])], "modality 'image'"),
        ([("image", [0.5])], "integers"),
        ([("image", torch.zeros(1))], "integers"),
        ([("image", np.zeros((2, 2), int))], "one code or a row"),
        (["image"], "is a modality and needs codes"),
        (["STOP"], "is not a special token"),
        ([("BOS", [0])], "has no codes"),
    ],
)
def test_segments_that_cannot_be_are_refused_and_leave_no_file(tmp_path, segments, message):
    with pytest.raises(DataError, match=message), MultimodalWriter(tmp_path / "train.bin", VOCAB) as writer:
        writer.add(segments)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_modality_is_refused(tmp_path):
    with (
        pytest.raises(ConfigError, match="no modality 'flux'"),
        MultimodalWriter(tmp_path / "train.bin", VOCAB) as writer,
    ):
        writer.add([("flux", [0])])


def test_rows_of_different_numbers_are_refused(tmp_path):
    with MultimodalWriter(tmp_path / "train.bin", VOCAB) as writer:
        with pytest.raises(DataError, match="found 2 and 3"):
            writer.add_rows([("scalar", [0, 1]), ("image", np.zeros((3, 2), int))])
        with pytest.raises(DataError, match="found none"):
            writer.add_rows(["BOS"])
        with pytest.raises(DataError, match=r"\(N,\) or \(N, length\)"):
            writer.add_rows([("scalar", 1)])


def test_sizes_that_differ_name_both_numbers(tmp_path, tokenizers):
    other = build_vocab_spec(v_image=21, v_scalar=16)
    with pytest.raises(DataError, match="has 20 codes, the vocabulary 21"):
        write_modalities(tmp_path, other, tokenizers)
    assert list(tmp_path.iterdir()) == []
    write_modalities(tmp_path, VOCAB, tokenizers)
    other.save(tmp_path / "vocab.json")
    with pytest.raises(DataError, match="has 20 codes, the vocabulary 21"):
        read_modalities(tmp_path)


def test_a_tokenizer_of_no_modality_is_refused(folder, tokenizers):
    tokenizers["scalar"].save(folder / "tokenizers" / "flux.safetensors")
    with pytest.raises(
        DataError, match=r"'flux', which is not a modality of the vocabulary \(image, scalar, class\)"
    ):
        load_tokens(str(folder))


def test_a_damaged_tokenizer_or_vocabulary_is_refused(folder):
    path = folder / "tokenizers" / "scalar.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"scalar\.safetensors"):
        load_tokens(str(folder))
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"vocab\.json"):
        load_tokens(str(folder))
    with pytest.raises(DataError, match=r"has no vocab\.json"):
        read_modalities(folder / "tokenizers")


def test_the_data_component_tells_of_modalities(folder, tokenizers):
    splits = load_tokens(str(folder), read="documents", length=32)
    assert splits.token_schema.vocab == VOCAB
    assert splits.vocab_size == VOCAB.vocab_size
    assert splits.num_types == 4
    assert set(splits.token_schema.codebooks) == {"image", "scalar"}
    assert torch.equal(splits.token_schema.edges["scalar"], tokenizers["scalar"].edges)
    assert load_tokens(str(folder), length=32, vocab_size=64).vocab_size == 64
    with pytest.raises(DataError, match=r"vocab_size is 40, but the vocabulary has 45"):
        load_tokens(str(folder), vocab_size=40)


def test_a_folder_without_a_vocabulary_is_as_before(tmp_path):
    with TokenWriter(tmp_path / "train.bin", meta={"vocab_size": 9}) as writer:
        writer.add(np.arange(9))
    splits = load_tokens(str(tmp_path), length=4)
    assert (splits.token_schema, splits.num_types) == (None, None)
    assert splits.vocab_size == 9


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_folder_whose_vocabulary_got_lost_is_not_taken_for_text(folder, tmp_path_factory, split):
    lone = tmp_path_factory.mktemp("lone")
    with TokenWriter(lone / "train.bin", meta={"vocab_size": 9, "vocab": "gpt2"}) as writer:  # their own fact
        writer.add(np.arange(9))
    assert load_tokens(str(lone), length=4).token_schema is None
    shutil.copy(folder / "train.bin", lone / f"{split}.bin")
    load = (
        lambda: load_tokens(str(lone), length=4),
        lambda: load_token_mixture({"a": str(lone)}, {"a": 1.0}, length=4),
    )
    for one in load:
        words = (
            rf"{split}\.bin was written for several modalities, but there is no vocab\.json beside it; copy it there"
        )
        with pytest.raises(DataError, match=words) as caught:
            one()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("meta", "expected"), [({}, 4), ({"num_types": 7}, 7)])
def test_the_file_may_tell_how_many_types_there_are(tmp_path, meta, expected):
    VOCAB.save(tmp_path / "vocab.json")
    with TokenWriter(tmp_path / "train.bin", streams={"types": "uint8"}, meta=meta) as writer:
        writer.add(np.arange(9), streams={"types": np.zeros(9, int)})
    assert load_tokens(str(tmp_path), length=4).num_types == expected
    (tmp_path / "vocab.json").unlink()
    assert load_tokens(str(tmp_path), length=4).num_types == meta.get("num_types")


@pytest.mark.parametrize("number", [0, "4", 2.0, True])
def test_a_number_of_types_that_is_none_is_refused(tmp_path, number):
    with TokenWriter(tmp_path / "train.bin", streams={"types": "uint8"}, meta={"num_types": number}) as writer:
        writer.add(np.arange(9), streams={"types": np.zeros(9, int)})
    with pytest.raises(DataError, match="num_types"):
        load_tokens(str(tmp_path), length=4)


def test_files_of_another_vocabulary_are_refused_when_they_are_opened(folder):
    other = build_vocab_spec(v_image=20, v_scalar=16, modalities={"kind": 3})
    assert other.vocab_size == VOCAB.vocab_size
    other.save(folder / "vocab.json")
    with pytest.raises(DataError, match="written for another vocabulary"):
        load_tokens(str(folder))


@pytest.mark.parametrize("form", ["stated", "largest", "headerless"])
def test_ids_beyond_the_vocabulary_are_refused_when_a_file_is_opened(tmp_path, form):
    VOCAB.save(tmp_path / "vocab.json")
    ids = np.arange(VOCAB.vocab_size + 1)
    if form == "headerless":
        (tmp_path / "train.bin").write_bytes(ids.astype("<u2").tobytes())
    else:
        meta = {"vocab_size": VOCAB.vocab_size + 1} if form == "stated" else {}
        with TokenWriter(tmp_path / "train.bin", meta=meta) as writer:
            writer.add(ids)
    with pytest.raises(DataError, match=r"ids up to 45, but vocab\.json beside it has 45 tokens"):
        load_tokens(str(tmp_path), length=4, dtype="uint16")


def test_ids_of_a_file_that_tells_nothing_may_reach_the_last_one(tmp_path):
    VOCAB.save(tmp_path / "vocab.json")
    with TokenWriter(tmp_path / "train.bin") as writer:
        writer.add(np.arange(VOCAB.vocab_size))
    splits = load_tokens(str(tmp_path), length=4)
    assert splits.token_schema.vocab == VOCAB
    assert splits.num_types is None


def test_the_vocabulary_lies_beside_as_plain_json(folder):
    plain = json.loads((folder / "vocab.json").read_text())
    assert plain == VOCAB.to_dict()
    assert open_tokens(folder / "train.bin").meta["vocab"] == plain
