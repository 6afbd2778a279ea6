"""Small vocabularies of several modalities, codebooks and folders of data for them."""

import numpy as np
import pytest
import torch
from folder_samples import VOCAB, samples
from star_configs import CLASS, IMAGE, SCALAR

from etude import ScalarTokenizer, VectorTokenizer, build_vocab_spec
from etude.multimodal import MultimodalWriter, write_modalities


@pytest.fixture
def vocab():
    return build_vocab_spec(v_image=12, v_scalar=8, v_spectra=10)


@pytest.fixture
def codebooks():
    draw = torch.Generator().manual_seed(5)
    return {
        "image": torch.randn(12, 3, generator=draw),
        "scalar": torch.linspace(-2, 2, 8),
        "spectrum": torch.randn(10, 4, generator=draw),
    }


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stars(tmp_path, monkeypatch):
    """A folder of multimodal data in the current folder; returns its vocabulary and tokenizers."""
    monkeypatch.chdir(tmp_path)
    vocab = build_vocab_spec(v_image=IMAGE, v_scalar=SCALAR, modalities={"class": CLASS})
    draw = torch.Generator().manual_seed(3)
    tokenizers = {
        "image": VectorTokenizer(torch.randn(IMAGE, 2, generator=draw)),
        "scalar": ScalarTokenizer(torch.tensor([-3, -2, 0, 0.5, 1, 2.5, 3])),
    }
    write_modalities("stars", vocab, tokenizers)
    for split, rows in (("train", 40), ("validation", 16), ("test", 16)):
        kinds = torch.randint(CLASS, (rows,), generator=draw)
        brightness = kinds[:, None] * 2 + torch.randint(2, (rows, 2), generator=draw)
        brightness[torch.rand(rows, 2, generator=draw) < 0.1] = -1
        images = kinds[:, None] * 3 + torch.randint(3, (rows, 4), generator=draw)
        with MultimodalWriter(f"stars/{split}.bin", vocab) as writer:
            writer.add_rows(["BOS", ("class", kinds), ("scalar", brightness), ("image", images), "EOS"])
    return vocab, tokenizers


@pytest.fixture
def tokenizers():
    rng = np.random.default_rng(0)
    return {
        "image": VectorTokenizer.fit(rng.normal(size=(200, 5)), 20),
        "scalar": ScalarTokenizer.fit(rng.normal(size=500), 16),
    }


@pytest.fixture
def folder(tmp_path, tokenizers):
    write_modalities(tmp_path, VOCAB, tokenizers)
    for split, number in (("train", 40), ("validation", 12)):
        with MultimodalWriter(tmp_path / f"{split}.bin", VOCAB) as writer:
            for segments in samples(number, seed=number):
                writer.add(segments)
    return tmp_path
