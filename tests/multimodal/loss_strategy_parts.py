"""A vocabulary with codebooks, a model, batches of every form, and the formula of the meaningful loss."""

import torch
import torch.nn.functional as F
from torch import nn

from etude.losses import SupervisedTask
from etude.losses.functional import mean_of
from etude.multimodal import build_vocab_spec

VOCAB = build_vocab_spec(v_image=6, v_scalar=5, modalities={"class": 3})
IMAGE = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
SCALAR = torch.tensor([0.0, 0.5, 2.0, 3.0, 9.0])
BOOKS = {"image": IMAGE, "scalar": SCALAR}
WIDTH = 8


class Model(nn.Module):
    """Embedding and output layer; what comes next is guessed from the token alone."""

    def __init__(self, seed=0, dtype=torch.float64, names_head=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB.vocab_size, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCAB.vocab_size, dtype=dtype)
        self.seen = []
        if names_head:
            self.get_output_embeddings = lambda: self.head

    def forward(self, tokens):
        return self.after(self.head(self.before(tokens)))

    def before(self, tokens):
        self.seen.append(tuple(tokens.shape))
        return torch.tanh(self.embedding(tokens))

    def after(self, logits):
        return logits


def tokens_of(shape=(4, 21), seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB.vocab_size, shape, generator=g)
    tokens[1, -6:] = VOCAB.pad_id
    tokens[2, :3] = VOCAB.miss_id
    return tokens


def batches():
    """(batch, inputs, next tokens with -100 where they do not count) for every form of a batch."""
    tokens = tokens_of()
    inputs, nexts = tokens[:, :-1], tokens[:, 1:].clone()
    nexts[nexts == VOCAB.pad_id] = -100
    types, mask = VOCAB.types(tokens), (tokens != VOCAB.pad_id).long()
    hidden = mask.clone()
    hidden[3, 10:] = 0  # also masks tokens that are not padding
    masked = nexts.masked_fill(hidden[:, 1:] == 0, -100)
    shifted = F.pad(nexts, (0, 1), value=-100)
    labels = tokens.masked_fill(tokens == VOCAB.pad_id, -100)
    return {
        "tokens": ({"tokens": tokens, "types": types, "attn_mask": mask}, inputs, nexts),
        "tokens, mask": ({"tokens": tokens, "types": types, "attn_mask": hidden}, inputs, masked),
        "tokens alone": ({"tokens": tokens}, inputs, nexts),
        "input_ids alone": ({"input_ids": tokens}, tokens, shifted),
        "input_ids, mask": (
            {"input_ids": tokens, "attention_mask": hidden},
            tokens,
            shifted.masked_fill(F.pad(hidden[:, 1:], (0, 1)) == 0, -100),
        ),
        "labels that repeat": ({"input_ids": tokens, "attention_mask": mask, "labels": labels}, tokens, shifted),
        "labels that are next": ({"input_ids": inputs, "labels": nexts}, inputs, nexts),
        "labels with PAD": ({"input_ids": inputs, "labels": tokens[:, 1:]}, inputs, nexts),
        "tuple of next": ((inputs, nexts), inputs, nexts),
        "tuple that repeats": ((tokens, tokens), tokens, shifted),
        "tensor": (tokens, tokens, shifted),
        "int32": ({"tokens": tokens.int()}, inputs, nexts),
    }


def by_hand(model, inputs, nexts, weights):
    """Sums and counts by name, from the formula."""
    logits = F.linear(torch.tanh(model.embedding(inputs)), model.head.weight, model.head.bias)
    counted = nexts != -100
    ce = F.cross_entropy(logits[counted], nexts[counted], reduction="sum")
    found = {"loss_ce": (ce, int(counted.sum()))}
    found["accuracy"] = ((logits.argmax(-1) == nexts).sum(), int(counted.sum()))
    for name, values in BOOKS.items():
        short = {"image": "img", "scalar": "sca"}[name]
        codes = VOCAB.decode(name, nexts)
        own = codes >= 0
        values = values.double().reshape(len(values), -1)
        probs = torch.softmax(logits[own][:, VOCAB.range_of(name).slice], 1)
        loss = (probs @ values - values[codes[own]]).square().mean(1).sum()
        found[f"loss_{short}"] = (loss, int(own.sum()))
    total = sum(weights[name] * found[name][0] / max(found[name][1], 1) for name in weights)
    return found, total


def run(loss, model, batch, metrics=True):
    return SupervisedTask(loss)(model, batch, metrics=metrics)


def objective(terms):
    return sum(term.weight * mean_of(term) for term in terms.values())
