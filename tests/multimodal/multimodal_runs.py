"""A small model over several modalities, and batches for it."""

import torch

from etude import CausalTransformerLM

SHORT = {"image": "img", "scalar": "sca", "spectrum": "spec"}
LENGTH = 14


def make_batches(vocab, count, rows=4, seed=0):
    """Batches of (tokens, types, attn_mask): tokens of all kinds at random, with padding at the end of rows."""
    draw, batches = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        tokens = torch.randint(1, vocab.vocab_size, (rows, LENGTH), generator=draw)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=draw)
        mask = torch.arange(LENGTH) < lengths
        tokens = tokens.masked_fill(~mask, vocab.pad_id)
        batches.append({"tokens": tokens, "types": vocab.types(tokens), "attn_mask": mask})
    return batches


def make_model(vocab, **options):
    torch.manual_seed(1)
    size = {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_len": 16, "dropout": 0.0, **options}
    return CausalTransformerLM(vocab_size=vocab.vocab_size, n_types=vocab.num_types, **size)
