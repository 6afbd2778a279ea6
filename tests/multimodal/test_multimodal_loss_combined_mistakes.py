"""Arguments of the combined loss that cannot be: one line each."""

import re

import numpy as np
import pytest
import torch
from combined_problem import BOOKS, IMAGE, SCALAR, SPECTRUM, VOCAB, make

from etude.core import ConfigError, DataError, TrainingError
from etude.multimodal import build_vocab_spec
from etude.multimodal.loss import combined_loss, make_reconstructions


def run(**options):
    hidden, weight, targets = make(torch.float32)
    return combined_loss(
        options.pop("logits", (hidden @ weight.T).detach()), options.pop("targets", targets), VOCAB, **options
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"scalar_centers": SCALAR[:4]},
            DataError,
            "of the modality 'scalar' does not fit: there are 4 values for its 5",
        ),
        (
            {"image_codebook": torch.randn(3, 7)},
            DataError,
            "'image' does not fit: there are 3 values for its 7 tokens",
        ),
        ({"image_codebook": torch.randn(7, 2, 2)}, DataError, r"'image' .* floating-point numbers .* \(7, 2, 2\)"),
        ({"image_codebook": torch.zeros(7, 0)}, DataError, r"'image' .* floating-point numbers .* \(7, 0\)"),
        ({"scalar_centers": torch.tensor(3.0)}, DataError, r"'scalar' .* floating-point numbers .* \(\)"),
        (
            {"scalar_centers": torch.zeros(5, dtype=torch.complex64)},
            DataError,
            r"'scalar' .* floating-point numbers .* torch.complex64 \(5,\)",
        ),
        (
            {"scalar_centers": np.arange(5, dtype=complex)},
            DataError,
            "'scalar' .* floating-point numbers .*complex128",
        ),
        (
            {"scalar_centers": "values.npz"},
            DataError,
            "values.npz",
        ),
        ({"codebooks": {"scalar": None}}, DataError, "'scalar' .* found a NoneType"),
        (
            {"scalar_centers": SCALAR.clone().index_fill(0, torch.tensor([3]), float("nan"))},
            DataError,
            "of code 3 is not",
        ),
        (
            {"image_codebook": IMAGE.clone().index_fill(0, torch.tensor([2]), float("inf"))},
            DataError,
            "of code 2 is not",
        ),
        (
            {"codebooks": {"spectra": SPECTRUM}},
            ConfigError,
            "a codebook is given for the modality 'spectra', .* mean 'spectrum'",
        ),
        (
            {"codebooks": {"scalar": SCALAR}, "scalar_centers": SCALAR},
            ConfigError,
            "'scalar' is given twice",
        ),
        ({"config": {"weight_imag": 1.0}}, ConfigError, r"config\.weight_imag: .*did you mean 'weight_image'"),
        ({"config": {"sample": 1}}, ConfigError, r"config\.sample: "),
        (
            {"config": {"weights": {"imag": 1.0}}},
            ConfigError,
            "a weight is given for the modality 'imag', .* mean 'image'",
        ),
        ({"config": {"kind": "msee"}}, ConfigError, r"config\.kind: .*did you mean 'mse'"),
        ({"config": {"kind": {"scaler": "mse"}}}, ConfigError, "a kind of loss is given for the modality 'scaler'"),
        ({"config": {"kind": {"scalar": "l2"}}}, ConfigError, r"config\.kind"),
        ({"config": {"kind": None}}, ConfigError, r"config\.kind"),
        ({"config": {"kind": ["huber"]}}, ConfigError, r"config\.kind"),
        ({"config": {"weight_image": -0.1}}, ConfigError, r"config\.weight_image: "),
        ({"config": {"weight_image": float("nan")}}, ConfigError, r"config\.weight_image: "),
        ({"config": {"weight_image": float("inf")}}, ConfigError, r"config\.weight_image: "),
        ({"config": {"weight_image": "0.1"}}, ConfigError, r"config\.weight_image: "),
        ({"config": {"sample_k": 0}}, ConfigError, r"config\.sample_k: .*at least 1"),
        ({"config": {"sample_k": True}}, ConfigError, r"config\.sample_k: "),
        ({"config": {"sample_k_per_modality": -1}}, ConfigError, r"config\.sample_k"),
        (
            {"config": {"kind": "huber", "huber_delta": 0}},
            ConfigError,
            r"config\.huber_delta: ",
        ),
        ({"config": {"kind": "huber", "huber_delta": "1"}}, ConfigError, r"config\.huber_delta: "),
        ({"config": {"kind": "huber", "huber_delta": float("nan")}}, ConfigError, r"config\.huber_delta: "),
        (
            {"config": {"kind": "hl_gauss", "hl_sigma": -1.0}},
            ConfigError,
            r"config\.hl_sigma: ",
        ),
        ({"config": {"kind": "hl_gauss", "hl_sigma": float("inf")}}, ConfigError, r"config\.hl_sigma: "),
        ({"config": {"kind": "hl_gauss", "hl_sigma": None}}, ConfigError, r"config\.hl_sigma: "),
        (
            {"scalar_centers": SCALAR.flip(0), "config": {"kind": "hl_gauss"}},
            DataError,
            "'scalar' .* bins in increasing order",
        ),
        (
            {"scalar_centers": torch.ones(5), "config": {"kind": "hl_gauss"}},
            DataError,
            "'scalar' .* bins in increasing order",
        ),
        (
            {"logits": torch.zeros(3, 11, VOCAB.vocab_size - 1)},
            TrainingError,
            "has 31 tokens, the model's output only 30",
        ),
        ({"targets": torch.zeros(3, 11)}, TrainingError, "floating-point labels"),
        ({"targets": torch.zeros(3, 10, dtype=torch.int64)}, TrainingError, r"labels of shape \(3, 10\) do not fit"),
        ({"codebooks": {}, "use_ce": False}, TrainingError, "nothing would be trained: use_ce is off"),
        (
            {"use_ce": False, "scalar_centers": SCALAR, "config": {"weight_scalar": 0}},
            TrainingError,
            "nothing would be trained",
        ),
    ],
)
def test_mistakes_are_one_line(options, error, message):
    books = {} if "codebooks" in options or "use_ce" in options else BOOKS
    with pytest.raises(error, match=message) as found:
        run(**{**books, **options})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["ce", "total"])
def test_a_modality_cannot_take_the_name_of_another_number(name):
    vocab = build_vocab_spec(modalities={name: 3})
    with pytest.raises(ConfigError, match=f"'{name}' would report loss_{name}"):
        make_reconstructions(vocab, {name: torch.zeros(3)})
    assert make_reconstructions(vocab, {}) == {}  # without a codebook it reports nothing
    both = build_vocab_spec(v_image=3, modalities={"img": 3})
    with pytest.raises(ConfigError, match="'img' would report loss_img"):
        make_reconstructions(both, {"image": torch.zeros(3), "img": torch.zeros(3)})
    assert list(make_reconstructions(both, {"img": torch.zeros(3)})) == ["img"]


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([0.0, 1.0, 2.0], "3 bins need 4 edges, found (3,)"),
        ([0.0, 1.0, 1.0, 3.0], "bins in increasing order"),
        ([0.0, 1.0, float("nan"), 3.0], "finite bins"),
        ([float("-inf"), 1.0, 2.0, float("inf")], "finite bins"),
        ([100.0, 101.0, 102.0, 103.0], "the value 0.5 lies outside its bin, 100 … 101"),
        ([0.0, 1.0, 2.0, 2.2], "the value 2.5 lies outside its bin, 2 … 2.2"),
        ([0.0, 1.0, 1.8, 3.0], None),
        ("edges", "expected a tensor or an array of numbers, found a str"),
    ],
)
def test_edges_that_do_not_belong_to_the_bins(edges, message):
    vocab = build_vocab_spec(v_scalar=3)
    centres = {"scalar": torch.tensor([0.5, 1.5, 2.5])}
    if message is None:
        found = make_reconstructions(vocab, centres, "hl_gauss", edges={"scalar": edges})["scalar"]
        assert float(found.sigmas[1]) == pytest.approx(0.75 * 0.8)
        return
    with pytest.raises(DataError, match=re.escape(message)):
        make_reconstructions(vocab, centres, "hl_gauss", edges={"scalar": edges})
    with pytest.raises(ConfigError, match="edges is given for the modality 'scaler'"):
        make_reconstructions(vocab, centres, "hl_gauss", edges={"scaler": edges})


def test_edges_of_float32_centres_may_be_rounded():
    edges = torch.linspace(1e5, 1e5 + 1, 11, dtype=torch.float64)
    centres = edges[:-1].float()  # at the lower edge, as quantile bins of equal values have them
    make_reconstructions(build_vocab_spec(v_scalar=10), {"scalar": centres}, "hl_gauss", edges={"scalar": edges})
