"""The text classifier: padding has no part in its answer, and it learns."""

import torch
import torch.nn.functional as F

from etude.models import TextClassifier


def small(**options):
    torch.manual_seed(0)
    return TextClassifier(
        **{"vocab_size": 30, "num_classes": 3, "d_model": 16, "n_layers": 2, "n_heads": 2, **options}
    )


def test_padding_changes_nothing():
    model = small().eval()
    tokens = torch.randint(1, 30, (2, 5))
    mask = torch.ones_like(tokens)
    padded, longer = F.pad(tokens, (0, 4), value=7), F.pad(mask, (0, 4))
    torch.testing.assert_close(model(tokens), model(tokens, mask))
    torch.testing.assert_close(model(padded, longer), model(tokens, mask), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(padded), model(tokens), atol=1e-5)


def test_a_text_is_the_mean_over_its_tokens_which_all_see_each_other():
    model = small().eval()
    tokens, mask = torch.randint(1, 30, (2, 6)), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    for row in range(2):
        hidden = model.trunk.features(tokens[row : row + 1, : mask[row].sum()], causal=False)[0]
        torch.testing.assert_close(model.features(tokens, mask)[row], hidden.mean(0), rtol=1e-4, atol=1e-5)


def test_a_text_without_tokens_is_finite():
    model = small()
    logits = model(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]]))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_it_learns_which_token_is_there():
    model = small(dropout=0.0)
    tokens = torch.randint(4, 30, (64, 8), generator=torch.Generator().manual_seed(1))
    labels = torch.arange(64) % 3
    tokens[torch.arange(64), torch.arange(64) % 8] = labels + 1
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    assert (model(tokens).argmax(1) == labels).float().mean() > 0.95
