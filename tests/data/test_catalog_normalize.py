"""Normalising against the plain formula in float64."""

import pytest
import torch

from etude.data import Normalize

IMAGES = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def plain(images, mean, std):
    mean, std = (torch.tensor(value, dtype=torch.float64).reshape(-1, 1, 1) for value in (mean, std))
    return (images.double() - mean) / std


@pytest.mark.parametrize(
    ("mean", "std"),
    [(0.1307, 0.3081), ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), ([0.1, 0.2, 0.3], 0.5), (0.0, 1.0)],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_formula(mean, std, dtype):
    images = IMAGES.to(dtype) if not dtype.is_floating_point else (IMAGES.double() / 255).to(dtype)
    before = images.clone()
    got = Normalize(mean, std)(images)
    expected = plain(images.double() / 255 if not dtype.is_floating_point else images, mean, std)
    assert got.dtype == torch.float32
    assert got.shape == images.shape
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(images, before)


def test_one_number_works_for_any_shape():
    assert Normalize(0.5, 0.5)(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == pytest.approx([-1, 1])
    assert Normalize(0.5, 0.5)(torch.empty(0, 28, 28, dtype=torch.uint8)).shape == (0, 28, 28)


@pytest.mark.parametrize("std", [0.0, -1.0, [0.1, 0.0, 0.2]])
def test_std_must_be_positive(std):
    with pytest.raises(ValueError, match="positive"):
        Normalize(0.5, std)


def test_it_says_what_it_is():
    assert repr(Normalize(0.1, 0.2)) == "Normalize(mean=0.1, std=0.2)"
