"""ScalarTokenizer: bins as numpy and scikit-learn make them, codes that survive, files that are whole or refused."""

import contextlib
import json
import logging
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st
from sklearn.preprocessing import KBinsDiscretizer

from etude import ScalarTokenizer, VectorTokenizer
from etude.core.errors import DataError
from etude.multimodal import load_tokenizer

FLOAT32_MAX = float(np.finfo(np.float32).max)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
few = st.sampled_from([0.0, 1.0, -2.5, 7.0, 1e-30, 3e38])
samples = st.lists(numbers | few, min_size=1, max_size=60)
strategies = st.sampled_from(["quantile", "uniform"])


def float32(values):
    return np.asarray(values, np.float32)


def reference_codes(values, edges):
    """Bins by comparing every value with every edge: the last bin includes its end, the outer ones what is outside."""
    inner = edges[1:-1].tolist()
    return [sum(value >= edge for edge in inner) for value in float32(values).tolist()]


@given(samples, st.integers(1, 40), strategies)
def test_any_values_fall_in_the_bin_whose_edges_surround_them(values, bins, strategy):
    tokenizer = ScalarTokenizer.fit(values, bins, strategy)
    edges, codes = tokenizer.edges, tokenizer.encode(values)
    assert 1 <= tokenizer.size <= bins
    assert bool((edges[1:] > edges[:-1]).all())
    given_values = torch.tensor(values, dtype=torch.float32)
    assert bool((edges[codes] <= given_values).all())
    last = codes == tokenizer.size - 1
    assert bool((given_values < edges[codes + 1]).logical_or(last & (given_values <= edges[codes + 1])).all())
    assert codes.tolist() == reference_codes(values, edges)


@given(samples, st.integers(1, 40), strategies)
def test_codes_survive_decoding_and_encoding(values, bins, strategy):
    tokenizer = ScalarTokenizer.fit(values, bins, strategy)
    every = torch.arange(tokenizer.size)
    assert torch.equal(tokenizer.encode(tokenizer.decode(every)), every)
    once = tokenizer.decode(tokenizer.encode(values))
    assert torch.equal(tokenizer.decode(tokenizer.encode(once)), once)


@given(st.lists(numbers, min_size=1, max_size=80, unique=True), st.integers(1, 20))
def test_quantile_bins_of_distinct_values_hold_equally_many(values, bins):
    tokenizer = ScalarTokenizer.fit(values, bins)
    counts = torch.bincount(tokenizer.encode(values), minlength=tokenizer.size)
    if len(values) > 1:
        adjacent = np.diff(np.sort(float32(values)).view(np.int32)).min() if len(values) > 1 else 2
        assert tokenizer.size == bins or len(values) < bins or adjacent == 1
    if tokenizer.size == bins:
        assert int(counts.max() - counts.min()) <= 1


@given(samples, st.integers(1, 40))
def test_a_value_on_which_several_quantiles_fall_has_a_bin_of_its_own(values, bins):
    ordered = np.sort(float32(values))
    tokenizer = ScalarTokenizer.fit(values, bins)
    quantiles = np.quantile(ordered.astype(np.float64), np.arange(bins + 1) / bins)
    for value in np.unique(ordered):
        neighbours = ordered[ordered != value]
        apart = not neighbours.size or min(abs(neighbours.astype(np.float64) - value)) > abs(value) * 1e-6 + 1e-40
        if apart and (quantiles == value).sum() > 1:
            code = int(tokenizer.encode(value))
            assert not (tokenizer.encode(neighbours) == code).any()
            assert float(tokenizer.decode(code)) == value


def test_edges_and_codes_are_those_of_numpy():
    values = np.random.default_rng(0).lognormal(size=5000).astype(np.float32)
    quantile = ScalarTokenizer.fit(values, 64)
    np.testing.assert_allclose(quantile.edges, np.quantile(values, np.linspace(0, 1, 65)), rtol=1e-6)
    uniform = ScalarTokenizer.fit(values, 64, "uniform")
    np.testing.assert_allclose(uniform.edges, np.linspace(values.min(), values.max(), 65), rtol=1e-6)
    other = np.random.default_rng(1).lognormal(sigma=2, size=999).astype(np.float32)
    for tokenizer in (quantile, uniform):
        np.testing.assert_array_equal(tokenizer.encode(other), np.digitize(other, tokenizer.edges[1:-1].numpy()))


@pytest.mark.parametrize("strategy", ["quantile", "uniform"])
def test_bins_are_those_of_scikit_learn(strategy):
    values = np.random.default_rng(2).normal(size=(4001, 1)).astype(np.float32)
    options = {"quantile_method": "linear"} if strategy == "quantile" else {}
    theirs = KBinsDiscretizer(32, encode="ordinal", strategy=strategy, subsample=None, **options).fit(values)
    ours = ScalarTokenizer.fit(values, 32, strategy)
    np.testing.assert_allclose(ours.edges, theirs.bin_edges_[0], rtol=1e-5, atol=1e-6)
    assert np.mean(ours.encode(values).numpy() == theirs.transform(values)) > 0.999
    if strategy == "uniform":
        np.testing.assert_allclose(ours.values, theirs.inverse_transform(np.arange(32)[:, None])[:, 0], atol=1e-6)


def test_centres_of_quantile_bins_are_means_and_so_lower_the_error():
    values = np.random.default_rng(3).exponential(size=3000).astype(np.float32)
    tokenizer = ScalarTokenizer.fit(values, 10)
    codes = tokenizer.encode(values).numpy()
    means = [values[codes == code].astype(np.float64).mean() for code in range(10)]
    np.testing.assert_allclose(tokenizer.values, means, rtol=1e-6)
    middles = ScalarTokenizer(tokenizer.edges)
    errors = [np.square(one.decode(codes).numpy() - values).mean() for one in (tokenizer, middles)]
    assert errors[0] < 0.9 * errors[1]


def test_an_empty_bin_has_its_middle_as_centre():
    tokenizer = ScalarTokenizer.fit([0.0, 4.0], 4)
    assert tokenizer.values.tolist() == [0.0, 1.5, 2.5, 4.0]


def test_missing_and_outside_values():
    tokenizer = ScalarTokenizer.fit(torch.linspace(0, 1, 101), 10)
    codes = tokenizer.encode([[math.nan, -5.0, 5.0], [math.inf, -math.inf, 0.55]])
    assert codes.tolist() == [[-1, 0, 9], [9, 0, 5]]
    assert codes.dtype == torch.int64
    decoded = tokenizer.decode(codes)
    assert decoded.dtype == torch.float32
    assert decoded.isnan().tolist() == [[True, False, False], [False, False, False]]


def test_nan_and_infinite_values_do_not_change_what_is_fitted(caplog):
    values = torch.arange(50.0)
    with_others = torch.cat((values, torch.tensor([math.nan, math.inf, -math.inf])))
    with caplog.at_level(logging.WARNING, "etude"):
        assert torch.equal(ScalarTokenizer.fit(with_others, 5).edges, ScalarTokenizer.fit(values, 5).edges)
    assert "2 values are infinite" in caplog.text


def test_ties_make_fewer_bins_and_are_logged(caplog):
    values = [0.0] * 900 + np.linspace(0.01, 1, 100).tolist()
    with caplog.at_level(logging.WARNING, "etude"):
        tokenizer = ScalarTokenizer.fit(values, 20)
    assert tokenizer.size < 20
    assert f"{tokenizer.size} bins instead of 20" in caplog.text
    assert int((tokenizer.encode(values) == 0).sum()) == 900
    assert float(tokenizer.values[0]) == 0.0


def test_without_ties_nothing_is_reported(caplog):
    ScalarTokenizer.fit(np.arange(1000), 256)
    assert not caplog.records


def test_many_equal_largest_values_have_a_bin():
    values = [0.0, *[1.0] * 20]
    tokenizer = ScalarTokenizer.fit(values, 4)
    assert tokenizer.encode(values).tolist() == [0] + [tokenizer.size - 1] * 20
    assert tokenizer.decode(tokenizer.encode([0.0, 1.0])).tolist() == [0.0, 1.0]
    assert float(tokenizer.edges.diff().min()) > 1e-3


@pytest.mark.parametrize("value", [0.0, -3.25, 1e-40, 1e30, FLOAT32_MAX, -FLOAT32_MAX])
@pytest.mark.parametrize("strategy", ["quantile", "uniform"])
def test_constant_values_have_one_bin(value, strategy):
    tokenizer = ScalarTokenizer.fit([value] * 7, 16, strategy)
    assert tokenizer.size == 1
    assert tokenizer.encode([value]).tolist() == [0]
    low, high = tokenizer.edges.tolist()
    assert low <= float(tokenizer.values[0]) <= high
    if strategy == "quantile":
        assert float(tokenizer.values[0]) == float(np.float32(value))


@pytest.mark.parametrize("values", [[2.0], [2.0, 3.0], [[1.0], [2.0], [3.0]]])
def test_tiny_inputs(values):
    tokenizer = ScalarTokenizer.fit(values, 256)
    assert tokenizer.encode(values).shape == np.shape(values)
    np.testing.assert_allclose(tokenizer.decode(tokenizer.encode(values)), values, rtol=1e-2)


@pytest.mark.parametrize("strategy", ["quantile", "uniform"])
def test_huge_values(strategy):
    tokenizer = ScalarTokenizer.fit([-FLOAT32_MAX, -1.0, 0.0, 1e300, FLOAT32_MAX], 4, strategy)
    assert bool(tokenizer.values.isfinite().all())
    assert bool(tokenizer.edges.isfinite().all())
    assert tokenizer.encode([1e300, -1e300]).tolist() == [tokenizer.size - 1, 0]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int64", "uint8", ">f4", "bool"])
def test_other_types_of_numbers(dtype):
    values = np.arange(100).astype(dtype)
    expected = ScalarTokenizer.fit(values.astype(np.float32), 8)
    tokenizer = ScalarTokenizer.fit(values, 8)
    assert torch.equal(tokenizer.edges, expected.edges)
    assert torch.equal(tokenizer.encode(values), expected.encode(values.astype(np.float32)))


def test_tensors_of_half_precision_and_arrays_that_cannot_be_written():
    values = torch.arange(100)
    expected = ScalarTokenizer.fit(values.float(), 8).edges
    assert torch.equal(ScalarTokenizer.fit(values.to(torch.bfloat16).float(), 8).edges, expected)
    assert torch.equal(ScalarTokenizer.fit(values.half(), 8).edges, expected)
    assert torch.equal(ScalarTokenizer.fit(values.float().requires_grad_(), 8).edges, expected)
    locked = values.float().numpy()[::-1]
    locked.flags.writeable = False
    assert torch.equal(ScalarTokenizer.fit(locked, 8).edges, expected)


def test_a_scalar_has_a_scalar_as_code():
    tokenizer = ScalarTokenizer.fit(np.arange(10), 2)
    assert tokenizer.encode(7.0).shape == ()
    assert float(tokenizer.decode(tokenizer.encode(7))) == 7.0
    assert tokenizer.encode([]).tolist() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0],), "two or more"),
        (([[0.0, 1.0]],), "two or more"),
        (([0.0, 1.0, 1.0],), "increasing.*1.0, 1.0"),
        (([0.0, 1.0, 1.0 + 1e-12],), "increasing"),
        (([0.0, math.inf],), "finite"),
        (([0.0, math.nan],), "finite"),
        (([0.0, 1.0, 2.0], [0.5]), "3 edges need 2 centres"),
        (([0.0, 1.0, 2.0], [0.5, 2.5]), "the centre of bin 1 is 2.5"),
        (([0.0, 1.0, 2.0], [1.0, 1.5]), "the centre of bin 0 is 1.0"),
        (([0.0, 1.0, 2.0], [0.5, math.nan]), "the centre of bin 1 is nan"),
        ((["a", "b"],), "array of real numbers"),
        (([0j, 1j],), "array of real numbers"),
    ],
)
def test_wrong_edges_and_centres_are_refused_in_one_line(arguments, message):
    with pytest.raises(DataError, match=message) as caught:
        ScalarTokenizer(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "no finite values"),
        ([math.nan, math.inf], {}, "no finite values"),
        ([1.0], {"bins": 0}, "bins is 0"),
        ([1.0], {"strategy": "kmeans"}, "'quantile' or 'uniform'"),
    ],
)
def test_what_cannot_be_fitted_is_refused(values, options, message):
    with pytest.raises(DataError, match=message):
        ScalarTokenizer.fit(values, **options)


@pytest.mark.parametrize("codes", [[4], [-2], [0.5], torch.tensor([True])])
def test_wrong_codes_are_refused(codes):
    with pytest.raises(DataError, match="codes"):
        ScalarTokenizer.fit(np.arange(10), 4).decode(codes)


@given(samples, st.integers(1, 40), strategies)
def test_saved_and_loaded_bit_for_bit(tmp_path_factory, values, bins, strategy):
    path = tmp_path_factory.mktemp("tokenizer") / "deep" / "period.safetensors"
    tokenizer = ScalarTokenizer.fit(values, bins, strategy)
    tokenizer.save(path)
    raw = path.read_bytes()
    for loaded in (ScalarTokenizer.load(path), load_tokenizer(path)):
        assert isinstance(loaded, ScalarTokenizer)
        for name in ("edges", "values"):
            assert torch.equal(getattr(loaded, name).view(torch.int32), getattr(tokenizer, name).view(torch.int32))
    loaded.save(path)
    assert path.read_bytes() == raw
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_facts_lie_in_the_metadata(tmp_path):
    path = tmp_path / "a.safetensors"
    ScalarTokenizer.fit(np.arange(10), 4).save(path)
    with safetensors.safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["tokenizer"])
        assert set(file.keys()) == {"edges", "centers"}
    assert (facts["kind"], facts["version"]) == ("scalar", 1)


def test_every_damage_to_a_file_is_found(tmp_path):
    path = tmp_path / "a.safetensors"
    tokenizer = ScalarTokenizer.fit(np.arange(10), 4)
    tokenizer.save(path)
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        problem = ""
        with contextlib.suppress(DataError):  # what can be read has changed in white space, or in facts nobody needs
            problem = "" if torch.equal(load_tokenizer(path).values, tokenizer.values) else "other values"
        assert not problem
    for size in range(0, len(raw), 7):
        path.write_bytes(raw[:size])
        with pytest.raises(DataError, match=r"a\.safetensors"):
            ScalarTokenizer.load(path)


def _facts(**changes):
    return {"tokenizer": json.dumps({"kind": "scalar", "version": 1, **changes})}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"weight": torch.ones(2)}, None, "is not a"),
        ({"weight": torch.ones(2)}, {"tokenizer": "{"}, "is not a"),
        ({"weight": torch.ones(2)}, {"tokenizer": "[1]"}, "is not a"),
        ({"weight": torch.ones(2)}, _facts(), "weight"),
        ({"weight": torch.ones(2)}, _facts(version=9), "version 9"),
        ({"weight": torch.ones(2)}, _facts(kind="wavelet"), "'wavelet'.*expected scalar or vector"),
        ({"edges": torch.ones(2), "centers": torch.ones(1)}, _facts(), "checksum"),
    ],
)
def test_foreign_files_are_refused(tmp_path, tensors, metadata, message):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(DataError, match=message):
        load_tokenizer(path)


def test_missing_and_other_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no tokenizer"):
        load_tokenizer(tmp_path / "none.safetensors")
    VectorTokenizer(torch.eye(3)).save(tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=r"kind 'vector'.*expected scalar"):
        ScalarTokenizer.load(tmp_path / "a.safetensors")


def test_a_file_that_cannot_be_written_is_reported_and_the_earlier_one_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    ScalarTokenizer.fit(np.arange(10), 4).save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match="No space left"):
        ScalarTokenizer.fit(np.arange(10), 5).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
