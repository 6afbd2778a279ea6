"""Generating text: the cache changes nothing, tokens come with the probability that the model gives them."""

import pytest
import torch
import torch.nn.functional as F
from small_transformer import draw, make

from etude.core.errors import ConfigError
from etude.models.sampling import next_tokens


@pytest.mark.parametrize("prompt", [1, 5, 32])
def test_the_cache_changes_nothing(prompt):
    """Greedy text is that of the whole forward pass at every step."""
    model, tokens = make(), draw(3, prompt)
    expected = tokens
    for _ in range(32 - prompt):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
    assert model.generate(tokens, 32 - prompt, temperature=0).equal(expected)
    assert model.generate(tokens[0], 32 - prompt, temperature=0).equal(expected[0])


def test_cached_logits_are_those_of_the_whole_forward_pass():
    model, tokens = make(), draw(2, 10)
    cache = model._new_cache()
    parts = [model._next_logits(tokens[:, :4], None, cache)]
    parts += [model._next_logits(tokens[:, place : place + 1], None, cache) for place in range(4, 10)]
    torch.testing.assert_close(torch.stack(parts, 1), model(tokens)[:, 3:])


def test_text_longer_than_the_model_goes_on_from_its_end():
    model = make(max_len=8)
    tokens = draw(2, 11)
    expected, context = tokens, tokens[:, -8:]
    for _ in range(12):
        chosen = model(context)[:, -1:].argmax(-1)
        expected = torch.cat([expected, chosen], 1)
        context = torch.cat([context, chosen], 1) if context.shape[1] < 8 else expected[:, -4:]
    assert model.generate(tokens, 12, temperature=0).equal(expected)


def test_generating_repeats_with_a_generator_and_leaves_the_model_as_it_was():
    model, tokens = make(dropout=0.5).train(), draw(2, 4)
    model.blocks[0].eval()
    state = torch.get_rng_state()
    first, second = (
        model.generate(tokens, 20, generator=torch.Generator().manual_seed(seed), top_k=20) for seed in (1, 1)
    )
    assert first.equal(second)
    assert not first.equal(model.generate(tokens, 20, generator=torch.Generator().manual_seed(2), top_k=20))
    assert torch.get_rng_state().equal(state)
    assert model.training
    assert [block.training for block in model.blocks] == [False, True]
    assert not first.requires_grad
    assert first[:, :4].equal(tokens)


def test_a_row_ends_with_the_stop_token():
    model, tokens = make(), draw(4, 3)
    free = model.generate(tokens, 20, temperature=0)
    stop = int(free[0, 6])
    found = model.generate(tokens, 20, temperature=0, stop_id=stop)
    for row, whole in zip(found.tolist(), free.tolist(), strict=True):
        end = whole.index(stop, 3) + 1 if stop in whole[3:] else len(row)
        assert row[:end] == whole[:end]
        assert set(row[end:]) <= {stop}
    alone = model.generate(tokens[0], 20, temperature=0, stop_id=stop)
    assert len(alone) == free[0].tolist().index(stop, 3) + 1


def test_types_go_on_with_the_last_one():
    model, tokens, types = make(n_types=3), draw(1, 4), torch.tensor([[0, 1, 0, 2]])
    expected, kinds = tokens, types
    for _ in range(6):
        expected = torch.cat([expected, model(expected, kinds)[:, -1:].argmax(-1)], 1)
        kinds = F.pad(kinds, (0, 1), value=2)
    assert model.generate(tokens, 6, temperature=0, types=types).equal(expected)


def frequencies(logits, draws=20_000, **settings):
    rows = torch.tensor(logits).expand(draws, -1)
    drawn = next_tokens(rows, generator=torch.Generator().manual_seed(0), **settings)
    return torch.bincount(drawn, minlength=len(logits)) / draws


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"temperature": 0.5}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.45}, [1]),
        ({"top_p": 0.55}, [1, 2]),
        ({"top_p": 0.85}, [0, 1, 2]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.99, "temperature": 2.0}, [0, 1, 2]),
    ],
)
def test_tokens_come_with_their_probability_among_those_kept(settings, kept):
    probabilities = torch.tensor([0.15, 0.5, 0.3, 0.05])
    expected = torch.zeros(4)
    powers = probabilities ** (1 / settings.get("temperature", 1.0))
    expected[kept] = powers[kept] / powers[kept].sum()
    torch.testing.assert_close(frequencies(probabilities.log().tolist(), **settings), expected, rtol=0, atol=0.012)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
    ],
)
def test_sampling_settings_out_of_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        make().generate(draw(4), 1, **settings)
