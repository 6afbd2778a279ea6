"""FLOPs: those of a model for a token, and the peak of a device."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from etude.engine import flops
from etude.engine.flops import FLOPS_PER_WEIGHT, listed_flops, matrix_parameters, peak_flops


def test_the_formula_agrees_with_the_counter_of_torch_where_nothing_attends():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 24, bias=False), nn.GELU(), nn.Linear(24, 50, bias=False))
    ids = torch.zeros(3, 7, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == FLOPS_PER_WEIGHT * matrix_parameters(model) * ids.numel()


def test_a_tied_embedding_is_a_product_too():
    embedding, head = nn.Embedding(96, 32), nn.Linear(32, 96, bias=False)
    assert matrix_parameters(nn.Sequential(embedding, head)) == 96 * 32
    head.weight = embedding.weight
    assert matrix_parameters(nn.Sequential(embedding, head)) == 96 * 32


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
    flops._measured.cache_clear()
    before = torch.get_rng_state()
    first = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < first < 1e15
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(torch, "mm", None)  # a second measurement would fail
    assert peak_flops(torch.device("cpu"), torch.float32) == first


def test_a_machine_that_is_busy_for_longer_than_the_measurement_is_measured_once(monkeypatch):
    flops._measured.cache_clear()
    monkeypatch.setattr(flops, "MEASURE_S", 0.0)
    assert 0 < peak_flops(torch.device("cpu"), torch.float32) < float("inf")
    flops._measured.cache_clear()
