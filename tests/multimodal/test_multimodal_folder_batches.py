"""Folders of multimodal data as sources of batches: documents, packed blocks, masks, mixtures, remote files."""

import numpy as np
import pytest
import torch
from folder_samples import VOCAB, reference, samples

from etude import CausalTransformerLM, DataLoader, ScalarTokenizer, VectorTokenizer
from etude.core.errors import DataError
from etude.core.model import ModelCall
from etude.data import combine_streams, load_token_mixture, load_tokens
from etude.multimodal import MultimodalWriter, write_modalities
from etude.multimodal.vocab import build_vocab_spec


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
