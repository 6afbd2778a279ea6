"""Folders of multimodal data: written, checked against their vocabulary, and read as batches a model can take."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from etude import CausalTransformerLM, DataLoader, ScalarTokenizer, VectorTokenizer
from etude.core.errors import ConfigError, DataError
from etude.core.model import ModelCall
from etude.data import (
    TokenWriter,
    check_tokens,
    combine_streams,
    load_token_mixture,
    load_tokens,
    open_tokens,
)
from etude.multimodal import MultimodalWriter, read_modalities, write_modalities
from etude.multimodal.vocab import build_vocab_spec

VOCAB = build_vocab_spec(v_image=20, v_scalar=16, modalities={"class": 3})


@pytest.fixture
def tokenizers():
    rng = np.random.default_rng(0)
    return {
        "image": VectorTokenizer.fit(rng.normal(size=(200, 5)), 20),
        "scalar": ScalarTokenizer.fit(rng.normal(size=500), 16),
    }


def samples(number, seed=0):
    """Samples of different lengths with missing values: lists of segments."""
    rng = np.random.default_rng(seed)
    return [
        [
            "BOS",
            ("scalar", rng.integers(-1, 16, rng.integers(1, 4))),
            "SEP",
            ("image", rng.integers(0, 20, rng.integers(0, 6))),
            ("class", int(rng.integers(-1, 3))),
            "EOS",
        ]
        for _ in range(number)
    ]


def reference(segments, vocab=VOCAB):
    """Ids and types of a sample by plain loops."""
    ids, types = [], []
    for segment in segments:
        if isinstance(segment, str):
            ids.append(vocab.special[segment])
            types.append(0)
            continue
        name, codes = segment
        for code in np.atleast_1d(codes).tolist():
            ids.append(vocab.special["MISS"] if code == -1 else vocab.modalities[name].base + code)
            types.append(1 + list(vocab.modalities).index(name))
    return ids, types


@pytest.fixture
def folder(tmp_path, tokenizers):
    write_modalities(tmp_path, VOCAB, tokenizers)
    for split, number in (("train", 40), ("validation", 12)):
        with MultimodalWriter(tmp_path / f"{split}.bin", VOCAB) as writer:
            for segments in samples(number, seed=number):
                writer.add(segments)
    return tmp_path


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


def test_a_batch_of_documents_is_right_for_next_token_training(tmp_path):
    vocab = build_vocab_spec(
        v_image=20, v_scalar=16, modalities={"class": 3}, special=("MISS", "BOS", "PAD", "SEP", "EOS")
    )
    assert vocab.pad_id == 2
    vocab.save(tmp_path / "vocab.json")
    with MultimodalWriter(tmp_path / "train.bin", vocab, sample_labels={"label": "int8", "number": "int8"}) as writer:
        for place, segments in enumerate(samples(25)):
            writer.add(segments, labels={"label": place % 3, "number": place})
    splits = load_tokens(str(tmp_path), read="documents", length=32)
    seen = 0
    for batch in splits.make_loader("train", 4):
        longest = batch["input_ids"].shape[1]
        for row in range(len(batch["input_ids"])):
            found = {key: batch[key][row].tolist() for key in ("input_ids", "attention_mask", "labels", "types")}
            place = int(batch["number"][row])
            ids, types = reference(samples(25)[place], vocab)
            padding = longest - len(ids)
            assert found["input_ids"] == ids + [vocab.pad_id] * padding
            assert found["attention_mask"] == [1] * len(ids) + [0] * padding
            assert found["labels"] == ids[1:] + [-100] * (1 + padding)
            assert found["types"] == types + [0] * padding
            assert int(batch["label"][row]) == place % 3
            seen += 1
    assert seen == 25


def test_packed_blocks_are_padded_with_the_vocabulary_s_token(tmp_path):
    vocab = build_vocab_spec(v_scalar=16, special=("MISS", "PAD"))
    vocab.save(tmp_path / "vocab.json")
    with MultimodalWriter(tmp_path / "train.bin", vocab) as writer:
        for _ in range(3):
            writer.add([("scalar", np.arange(5))])
    splits = load_tokens(str(tmp_path), read="packed", packing="fit", length=8)
    batch = next(iter(splits.make_loader("train", 3)))
    padding = batch["document_ids"] < 0
    assert int(padding.sum()) == 9
    assert torch.equal(padding, batch["input_ids"] == 1)
    assert torch.equal(batch["types"], (~padding).long())
    assert bool((batch["labels"][padding] == -100).all())


def test_values_can_be_masked_and_special_tokens_are_not(folder):
    splits = load_tokens(str(folder), read="documents", length=32, mask_rate=0.9)
    batch = next(iter(splits.make_loader("train", 40)))
    hidden = batch["labels"] != -100
    assert bool((batch["labels"][hidden] >= VOCAB.base_image).all())
    assert bool((batch["input_ids"][hidden] == VOCAB.special["MASK"]).any())


def test_from_a_folder_to_logits(folder):
    splits = load_tokens(str(folder), read="documents", length=32)
    model = CausalTransformerLM(
        splits.vocab_size, n_types=splits.num_types, d_model=16, n_layers=1, n_heads=2, d_ff=32, max_len=32
    ).eval()
    call = ModelCall(model)
    loader = splits.make_loader("train", 8)
    assert isinstance(loader, DataLoader)
    for batch in loader:
        logits = call(model, batch)
        assert logits.shape == (*batch["input_ids"].shape, VOCAB.vocab_size)
        other = {**batch, "types": torch.zeros_like(batch["types"])}
        assert not torch.equal(call(model, other), logits)
        real = batch["attention_mask"].bool()
        plain = model(batch["input_ids"], batch["types"], batch["attention_mask"])
        torch.testing.assert_close(plain[real], logits[real])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        assert bool(loss.isfinite())


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


def test_mixtures_share_vocabulary_and_tokenizers(folder, tmp_path_factory, tokenizers):
    second = tmp_path_factory.mktemp("second")
    write_modalities(second, VOCAB, tokenizers)
    with MultimodalWriter(second / "train.bin", VOCAB) as writer:
        for segments in samples(9):
            writer.add(segments)
    roots, weights = {"a": str(folder), "b": str(second)}, {"a": 1.0, "b": 1.0}
    splits = load_token_mixture(roots, weights, read="documents", length=32)
    assert splits.token_schema.vocab == VOCAB
    assert set(splits.token_schema.codebooks) == {"image", "scalar"}
    assert splits.num_types == 4
    streams = combine_streams({"a": load_tokens(str(folder), length=8), "b": load_tokens(str(second), length=8)})
    assert (streams.token_schema.vocab, streams.num_types, set(streams.token_schema.edges)) == (VOCAB, 4, {"scalar"})
    (second / "vocab.json").unlink()
    with pytest.raises(DataError, match=r"'a' and 'b'.*vocab\.json"):
        load_token_mixture(roots, weights)


def other_edges(edges, values, how):
    """Edges that are not those of the first stream, with the same centres of bins."""
    changed = edges.clone()
    if how == "nearly":
        changed[3] = torch.nextafter(changed[3], changed[4])
    else:
        changed[3] = (changed[3] + values[3]) / 2
    return ScalarTokenizer(changed, values)


@pytest.mark.parametrize("how", ["equal", "nearly", "different", "missing", "kind", "values", "vocabulary"])
def test_ids_of_streams_and_mixtures_mean_the_same(folder, tmp_path_factory, tokenizers, how):
    vocab, scalar = VOCAB, tokenizers["scalar"]
    if how in ("nearly", "different"):
        tokenizers["scalar"] = other_edges(scalar.edges, scalar.values, how)
    elif how == "values":
        tokenizers["scalar"] = ScalarTokenizer(scalar.edges, (scalar.edges[1:] + scalar.edges[:-1]) / 2)
    elif how == "kind":
        tokenizers["scalar"] = VectorTokenizer(scalar.values[:, None])
    elif how == "missing":
        del tokenizers["scalar"]
    elif how == "vocabulary":
        vocab = build_vocab_spec(v_image=20, v_scalar=16, modalities={"kind": 3})
    second = tmp_path_factory.mktemp("second")
    write_modalities(second, vocab, tokenizers)
    with MultimodalWriter(second / "train.bin", vocab) as writer:
        writer.add_rows(["BOS", ("scalar", np.zeros((9, 9), int))])
    roots = {"stars": str(folder), "galaxies": str(second)}
    loads = (
        lambda: combine_streams({name: load_tokens(root, length=8) for name, root in roots.items()}),
        lambda: load_token_mixture(roots, dict.fromkeys(roots, 1.0), length=8),
    )
    modality = "class" if how == "vocabulary" else "scalar"
    for load in loads:
        if how == "equal":
            assert set(load().token_schema.edges) == {"scalar"}
            continue
        with pytest.raises(DataError, match=f"'stars' and 'galaxies'.*'{modality}'.*; create both") as caught:
            load()
        assert "\n" not in str(caught.value)


def test_a_folder_may_be_remote(folder, tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe(f"/stars/{path.relative_to(folder)}", path.read_bytes())
    remote = load_tokens("memory://stars", read="documents", length=32)
    local = load_tokens(str(folder), read="documents", length=32)
    assert remote.token_schema.vocab == local.token_schema.vocab
    assert {name: book.tolist() for name, book in remote.token_schema.codebooks.items()} == {
        name: book.tolist() for name, book in local.token_schema.codebooks.items()
    }
    ours, theirs = (next(iter(splits.make_loader("train", 8))) for splits in (local, remote))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_vocabulary_lies_beside_as_plain_json(folder):
    plain = json.loads((folder / "vocab.json").read_text())
    assert plain == VOCAB.to_dict()
    assert open_tokens(folder / "train.bin").meta["vocab"] == plain
