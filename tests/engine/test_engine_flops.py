"""FLOPs of a forward pass: equal to formulas worked out by hand, and found without touching the model or its run."""

import functools
import logging

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from etude.core.random import rng_state
from etude.engine import peak
from etude.engine.meter import MAX_LENGTHS, ForwardFlops, count_forward, matrix_parameters
from etude.engine.peak import listed_flops, peak_flops
from etude.engine.recompute import recompute_activations

WIDTH, LAYERS, VOCABULARY = 32, 3, 96


def transformer_flops(rows: int, length: int) -> int:
    """QKV, output and a fourfold MLP: 24·L·d² per layer; attention to all positions: 4·L²·d; the head: 2·L·d·V."""
    layer = 24 * length * WIDTH**2 + 4 * length**2 * WIDTH
    return rows * (LAYERS * layer + 2 * length * WIDTH * VOCABULARY)


class TorchTransformer(nn.Module):
    """Made of torch's own layers, with dropout, a running statistic and a habit of remembering things."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.calls = 0

    def forward(self, input_ids):
        self.calls += 1
        self.last = self.embed(input_ids)
        torch.rand(1)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        hidden = self.layers(self.last, mask=mask, is_causal=True)
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


def gpt2(**settings):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_head": 4, "n_embd": WIDTH, "vocab_size": VOCABULARY, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, **settings))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4,
            intermediate_size=4 * WIDTH * 2 // 3 // 2 * 2, vocab_size=VOCABULARY,
        )
    )  # fmt: skip


def ids(rows=2, length=16):
    return torch.zeros(rows, length, dtype=torch.long)


def test_an_mlp_over_tokens_is_two_flops_per_weight_and_token():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 50))
    flops = ForwardFlops(model)((ids(3, 7), ids(3, 7)), rows=3, length=7)
    assert flops == 3 * 7 * 2 * (8 * 24 + 24 * 50)


@pytest.mark.parametrize("make", [TorchTransformer, gpt2, functools.partial(gpt2, attn_implementation="eager")])
def test_a_transformer_equals_the_formula(make):
    model = make()
    model(input_ids=ids(2, 16))  # whatever it remembers of a pass before
    assert ForwardFlops(model)({"input_ids": ids(2, 16)}, rows=2, length=16) == transformer_flops(2, 16)


def test_grouped_projections_are_counted_as_they_are():
    model = llama()
    middle = model.config.intermediate_size
    rotary = 2 * 16 * (WIDTH // 4 // 2)  # angles: positions times frequencies
    layer = 16 * (2 * 4 * WIDTH**2 + 2 * 3 * WIDTH * middle) + 4 * 16**2 * WIDTH
    assert (
        ForwardFlops(model)({"input_ids": ids(1, 16)}, rows=1, length=16)
        == LAYERS * layer + 2 * 16 * WIDTH * 96 + rotary
    )


@pytest.mark.parametrize("make", [gpt2, llama])
def test_padding_masks_do_not_stop_the_counting(make):
    model = make()
    batch = {"input_ids": ids(), "attention_mask": torch.ones(2, 16, dtype=torch.long), "labels": ids()}
    assert count_forward(model, batch) == count_forward(model, {"input_ids": ids()}) > 0


def test_a_next_token_batch_counts_what_the_model_sees():
    model = gpt2()
    assert count_forward(model, {"tokens": ids(2, 17)}) == transformer_flops(1, 16)


def test_the_model_and_its_random_numbers_are_as_before():
    torch.manual_seed(3)
    model = TorchTransformer().train()
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before, attributes = rng_state(), set(vars(model))
    count_forward(model, {"input_ids": ids()})
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"]["words"], after["python"]["words"])
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.calls == 0
    assert set(vars(model)) == attributes
    assert seen == []
    assert all(module.training for module in model.modules())
    assert all(param.grad is None and type(param) is nn.Parameter for param in model.parameters())


def test_a_compiled_model_is_not_compiled_for_it(monkeypatch):
    model = gpt2()
    model.compile(backend=lambda *_: pytest.fail("compiled"))
    assert count_forward(model, {"input_ids": ids()}) == transformer_flops(1, 16)
    assert model._compiled_call_impl is not None


def test_activations_computed_twice_count_once():
    model = gpt2()
    recompute_activations(model)
    assert count_forward(model, {"input_ids": ids()}) == transformer_flops(1, 16)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12), rows=st.integers(0, 9))
def test_every_length_is_exact_and_few_are_counted(lengths, rows):
    model, counted = nn.Identity(), []

    def formula(model, batch, run):
        counted.append(batch.shape[1])
        return transformer_flops(1, batch.shape[1])

    flops = ForwardFlops(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("etude.engine.meter.count_forward", formula)
        for length in lengths:
            found = flops(ids(rows, length), rows=rows, length=length)
            assert found == pytest.approx(transformer_flops(rows, length), rel=1e-12)
    assert len(counted) == min(len(set(lengths)), MAX_LENGTHS)


def test_a_model_that_looks_at_values_is_estimated_from_its_parameters(caplog):
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)

        def forward(self, input_ids):
            hidden = self.embed(input_ids)
            return self.head(hidden if input_ids.sum().item() > 3 else 2 * hidden)

    flops = ForwardFlops(Routed())
    with caplog.at_level(logging.DEBUG, "etude"):
        found = [flops({"input_ids": ids(2, length)}, rows=2, length=length) for length in (5, 6, 5)]
    assert found == [2 * length * 2 * 8 * 50 for length in (5, 6, 5)]
    assert len(caplog.records) == 1
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_a_tied_embedding_is_a_product_too():
    assert matrix_parameters(gpt2()) == sum(p.numel() for p in gpt2().parameters()) - 128 * WIDTH


# --- peaks


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312),
        ("NVIDIA A100-PCIE-40GB", torch.float32, True, 156),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989.4),
        ("NVIDIA H100 PCIe", torch.float16, False, 756),
        ("NVIDIA H200", torch.float32, False, 66.9),
        ("NVIDIA B200", torch.bfloat16, False, 2250),
        ("NVIDIA L4", torch.bfloat16, False, 121),
        ("NVIDIA L40S", torch.bfloat16, False, 362.1),
        ("NVIDIA A10", torch.bfloat16, False, 125),
        ("NVIDIA A10G", torch.bfloat16, False, 70),
        ("Tesla T4", torch.float16, False, 65),
        ("Tesla T4", torch.float32, True, 8.1),
        ("Tesla V100-SXM2-16GB", torch.float16, False, 125),
        ("NVIDIA GeForce RTX 3090", torch.bfloat16, False, 71),
        ("NVIDIA GeForce RTX 4090", torch.float32, True, 82.6),
    ],
)
def test_devices_are_known_by_name(name, dtype, tf32, tflops):
    assert listed_flops(name, dtype, tf32=tf32) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16),
        ("Tesla T4", torch.bfloat16),  # has none
        ("NVIDIA A100-SXM4-80GB", torch.float64),
        ("Some Future GPU", torch.bfloat16),
        ("NVIDIA A1000", torch.bfloat16),
    ],
)
def test_other_devices_are_not_guessed(name, dtype):
    assert listed_flops(name, dtype) is None


def test_the_cpu_is_measured_once_quickly_and_without_random_numbers(monkeypatch):
    peak._measured.cache_clear()
    before = torch.get_rng_state()
    first = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < first < 1e15
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(torch, "mm", None)  # a second measurement would fail
    assert peak_flops(torch.device("cpu"), torch.float32) == first
