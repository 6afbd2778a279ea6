"""Samples of several modalities, and the ids and types that a folder should hold for them."""

import numpy as np

from etude.multimodal.vocab import build_vocab_spec

VOCAB = build_vocab_spec(v_image=20, v_scalar=16, modalities={"class": 3})


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
