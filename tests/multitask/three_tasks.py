"""Three small tasks with missing labels, a model for them, and their losses by hand."""

import torch
import torch.nn.functional as F
from torch import nn

from etude.losses import BinaryLoss, ClassificationLoss, MultiLabelLoss
from etude.models import CausalTransformerLM
from etude.multitask import LanguageModelHead, LinearHead, MultiTaskModel, SequenceClassifier, TaskSpec

NAN = float("nan")


class Trunk(nn.Module):
    """One layer; counts its calls."""

    feature_dim = 5

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5, dtype=torch.float64)
        self.calls = []

    def features(self, x, causal=None):
        self.calls.append(causal)
        return torch.tanh(self.layer(x))

    def forward(self, x, causal=None):
        return self.features(x, causal)


def make_model(weighting=None):
    torch.manual_seed(0)
    sizes = {"kind": 3, "flags": 2, "belongs": 1, "kind:simple": 2, "size": 1}
    heads = {name: LinearHead(size, in_features=5).double() for name, size in sizes.items()}
    model = MultiTaskModel(Trunk(), heads)
    model.weighting = weighting
    model.head_calls = []
    for name, head in model.heads.items():
        head.register_forward_hook(lambda *_, name=name: model.head_calls.append(name))
    return model


def specs(**changes):
    found = {
        "kind": TaskSpec("kind", ClassificationLoss(), labels="kind"),
        "flags": TaskSpec("flags", MultiLabelLoss(), labels="flags", weight=0.5),
        "belongs": TaskSpec("belongs", BinaryLoss(), labels="belongs", weight=2.0),
    }
    return found | changes


def make_batch(samples=8, seed=1, missing=0.4, **extra):
    generator = torch.Generator().manual_seed(seed)
    gone = torch.rand(3, samples, 2, generator=generator) < missing
    kind = torch.randint(3, (samples,), generator=generator)
    flags = (torch.rand(samples, 2, generator=generator) < 0.5).double()
    belongs = (torch.rand(samples, generator=generator) < 0.5).double()
    return {
        "input": torch.randn(samples, 4, generator=generator, dtype=torch.float64),
        "kind": kind.masked_fill(gone[0, :, 0], -100),
        "flags": flags.masked_fill(gone[1], NAN),
        "belongs": belongs.masked_fill(gone[2, :, 0], NAN),
        **extra,
    }


def by_hand(model, batch):
    """Sums and counts of the three losses, each over the labels that are there."""
    hidden = torch.tanh(model.trunk.layer(batch["input"]))
    found = {}
    there = batch["kind"] != -100
    logits = model.heads["kind"].layer(hidden)
    found["kind"] = F.cross_entropy(logits[there], batch["kind"][there], reduction="sum"), int(there.sum())
    for name in ("flags", "belongs"):
        there = ~batch[name].isnan()
        logits = model.heads[name].layer(hidden).view(batch[name].shape)
        found[name] = (
            F.binary_cross_entropy_with_logits(logits[there], batch[name][there], reduction="sum"),
            int(there.sum()),
        )
    return found


def gradients(model, loss):
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True, materialize_grads=True)


def language_model():
    torch.manual_seed(0)
    trunk = CausalTransformerLM(vocab_size=9, d_model=8, n_layers=1, n_heads=2, dropout=0.0, max_len=8)
    heads = {"code": LanguageModelHead(), "quality": SequenceClassifier(3, in_features=8)}
    return MultiTaskModel(trunk, heads)
