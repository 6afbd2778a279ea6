"""VectorTokenizer: as good as scikit-learn's k-means, the same every time, and exact about what is nearest."""

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.datasets import load_digits, make_blobs

from etude import ScalarTokenizer, VectorTokenizer
from etude.core.errors import DataError
from etude.multimodal import load_tokenizer
from etude.multimodal.tokenizers import kmeans

coordinates = st.floats(-1e6, 1e6, width=32)
matrices = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 30), st.integers(1, 4)), elements=coordinates | st.sampled_from([0.0, 1.0])
)


def blobs(count=2000, width=6, centers=12):
    return make_blobs(count, width, centers=centers, cluster_std=0.5, random_state=0)[0].astype(np.float32)


def curves(count=3000, points=24):
    """Smooth curves of various forms and noise: no clusters, as real data often has none."""
    rng = np.random.default_rng(1)
    phase = np.linspace(0, 2 * np.pi, points)
    parts = [rng.normal(size=(count, 1)) / k * np.sin(k * phase + rng.uniform(0, 7, (count, 1))) for k in (1, 2, 3)]
    return (sum(parts) + 0.05 * rng.normal(size=(count, points)) + 100).astype(np.float32)


def inertia(vectors, centroids):
    """The sum of squared distances in float64, from differences."""
    differences = np.asarray(vectors, np.float64)[:, None] - np.asarray(centroids, np.float64)
    return float((differences**2).sum(2).min(1).sum())


@pytest.mark.parametrize(
    ("vectors", "size", "within"),
    [(blobs(), 12, 1.001), (blobs(), 40, 1.03), (load_digits().data, 32, 1.03), (curves(), 64, 1.02)],
    ids=["blobs", "more", "digits", "curves"],
)
def test_as_good_as_scikit_learn(vectors, size, within):
    theirs = np.median([KMeans(size, random_state=seed).fit(vectors).inertia_ for seed in range(3)])
    fitted = [VectorTokenizer.fit(vectors, size, seed=seed) for seed in range(3)]
    assert all(tokenizer.size == size for tokenizer in fitted)
    assert np.median([tokenizer.inertia for tokenizer in fitted]) <= within * theirs


def test_inertia_is_that_of_the_codes():
    vectors = curves(500)
    tokenizer = VectorTokenizer.fit(vectors, 20)
    assert tokenizer.inertia == pytest.approx(inertia(vectors, tokenizer.values), rel=1e-9)
    decoded = tokenizer.decode(tokenizer.encode(vectors)).numpy()
    assert tokenizer.inertia == pytest.approx(((decoded.astype(np.float64) - vectors) ** 2).sum(), rel=1e-9)


def test_well_parted_blobs_are_found_whatever_the_seed():
    vectors, labels = make_blobs(600, 5, centers=8, cluster_std=0.05, random_state=3)
    for seed in range(5):
        codes = VectorTokenizer.fit(vectors, 8, seed=seed).encode(vectors).numpy()
        assert len({(code, label) for code, label in zip(codes, labels, strict=True)}) == 8


@given(matrices, st.integers(1, 8))
def test_the_nearest_centroid_is_taken_and_codes_survive(vectors, size):
    tokenizer = VectorTokenizer.fit(vectors, size)
    distinct = len(np.unique(vectors, axis=0))
    assert tokenizer.size <= min(size, distinct)
    every = torch.arange(tokenizer.size)
    assert torch.equal(tokenizer.encode(tokenizer.decode(every)), every)
    codes = tokenizer.encode(vectors).numpy()
    distances = ((vectors.astype(np.float64)[:, None] - tokenizer.values.double().numpy()) ** 2).sum(2)
    chosen = distances[np.arange(len(vectors)), codes]
    assert np.all(chosen <= distances.min(1) + 1e-12 * (1 + (vectors.astype(np.float64) ** 2).sum(1)))


@given(st.integers(1, 12), st.integers(1, 20))
def test_fewer_distinct_vectors_than_asked_are_the_centroids_themselves(distinct, size):
    rows = np.random.default_rng(distinct).normal(size=(distinct, 3)).astype(np.float32) * 100
    vectors = np.repeat(rows, 5, axis=0)
    tokenizer = VectorTokenizer.fit(vectors, size)
    assert tokenizer.size == min(distinct, size)
    if size >= distinct:
        np.testing.assert_array_equal(tokenizer.values, np.unique(rows, axis=0))
        assert tokenizer.inertia == pytest.approx(0, abs=1e-6)


def test_fewer_centroids_are_logged(caplog):
    with caplog.at_level(logging.WARNING, "etude"):
        assert VectorTokenizer.fit([[1.0, 2.0]] * 9, 4).size == 1
    assert "1 centroids instead of 4" in caplog.text


def test_the_same_seed_gives_the_same_bits_and_another_one_others():
    vectors = curves(800)
    one, again = (VectorTokenizer.fit(vectors, 16, seed=4) for _ in range(2))
    assert torch.equal(one.values, again.values)
    assert one.inertia == again.inertia
    assert not torch.equal(one.values, VectorTokenizer.fit(vectors, 16, seed=5).values)


def test_fitting_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    VectorTokenizer.fit(curves(100), 4)
    assert torch.equal(torch.get_rng_state(), state)


def test_chunks_change_nothing_but_rounding(monkeypatch):
    vectors = blobs(700)
    whole = VectorTokenizer.fit(vectors, 12)
    monkeypatch.setattr(kmeans, "_CHUNK", 64)
    parts = VectorTokenizer.fit(vectors, 12)
    torch.testing.assert_close(parts.values, whole.values)
    assert torch.equal(parts.encode(vectors), whole.encode(vectors))


def test_distances_are_never_held_all_at_once(monkeypatch):
    largest = 0
    plain = torch.addmm

    def watched(*arguments, **options):
        nonlocal largest
        result = plain(*arguments, **options)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch, "addmm", watched)
    monkeypatch.setattr(kmeans, "_CHUNK", 4096)
    VectorTokenizer.fit(blobs(3000), 32, iterations=2)
    assert 0 < largest <= 4096


def test_the_start_may_be_chosen_among_some_of_the_rows(monkeypatch):
    monkeypatch.setattr(kmeans, "_START_ROWS", 200)
    monkeypatch.setattr(kmeans, "_START_ROWS_PER_CENTROID", 2)
    vectors = blobs(3000)
    theirs = KMeans(12, n_init=5, random_state=0).fit(vectors).inertia_
    assert VectorTokenizer.fit(vectors, 12).inertia <= 1.3 * theirs
    # One row of its own kind among thousands, which a choice of rows is likely to lack: then all are looked at.
    rare = np.zeros((5000, 2), np.float32)
    rare[4321] = 1
    assert VectorTokenizer.fit(rare, 2).values.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_the_start_is_as_good_as_that_of_scikit_learn():
    vectors = blobs(1000, centers=30)
    theirs = [inertia(vectors, kmeans_plusplus(vectors, 30, random_state=seed)[0]) for seed in range(8)]
    rows = torch.from_numpy(vectors)
    starts = [kmeans._start(rows, 30, torch.Generator().manual_seed(seed)) for seed in range(8)]
    assert np.mean([inertia(vectors, start) for start in starts]) <= 1.05 * np.mean(theirs)


def test_centroids_without_rows_start_again_at_the_farthest():
    rows = torch.tensor([[0.0], [1.0], [10.0], [30.0]])
    centroids = kmeans._lloyd(rows, torch.tensor([[5.0], [500.0], [900.0]]), 10, 0.0)
    assert sorted(centroids[:, 0].tolist()) == [0.5, 10.0, 30.0]


@pytest.mark.parametrize("power", [-120, -30, 30, 123])
def test_numbers_of_any_size_are_fitted_alike(power):
    vectors = blobs(300)
    assert np.abs(vectors).max() < 16
    plain = VectorTokenizer.fit(vectors, 8)
    scaled = VectorTokenizer.fit(np.ldexp(vectors, power), 8)
    assert torch.equal(scaled.values, torch.ldexp(plain.values, torch.tensor(power)))


def test_it_does_not_matter_how_far_from_the_origin_vectors_lie():
    vectors = blobs(300).astype(np.float64)
    near = VectorTokenizer.fit(vectors, 12)
    far = VectorTokenizer.fit(vectors + 1e4, 12)
    assert torch.equal(far.encode(vectors + 1e4), near.encode(vectors))
    assert far.inertia == pytest.approx(near.inertia, rel=1e-2)


def test_close_centroids_far_from_the_origin_stay_distinct():
    centroids = np.float32(1e4) + np.arange(6, dtype=np.float32)[:, None] * np.float32([[2**-9, 0]])
    tokenizer = VectorTokenizer(centroids)
    assert tokenizer.encode(centroids).tolist() == list(range(6))


def test_missing_vectors():
    vectors = torch.from_numpy(blobs(200)).reshape(20, 10, 6)
    broken = vectors.clone()
    broken[3, 4, 5] = math.nan
    broken[7, 0] = math.inf
    tokenizer = VectorTokenizer.fit(broken.reshape(-1, 6), 12)
    codes = tokenizer.encode(broken)
    assert codes.shape == (20, 10)
    assert (codes == -1).nonzero().tolist() == [[3, 4], [7, 0]]
    decoded = tokenizer.decode(codes)
    assert decoded.shape == vectors.shape
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded.isnan().all(-1), codes == -1)
    assert torch.equal(tokenizer.encode(vectors)[codes >= 0], codes[codes >= 0])
    alone = VectorTokenizer.fit(broken.reshape(-1, 6)[(codes >= 0).flatten()], 12)
    assert torch.equal(alone.values, tokenizer.values)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint8])
def test_other_types_of_numbers(dtype):
    vectors = np.random.default_rng(0).integers(0, 50, (300, 3)).astype(dtype)
    expected = VectorTokenizer.fit(vectors.astype(np.float32), 5)
    tokenizer = VectorTokenizer.fit(vectors, 5)
    assert torch.equal(tokenizer.values, expected.values)
    assert torch.equal(VectorTokenizer.fit(torch.from_numpy(vectors), 5).encode(vectors), expected.encode(vectors))


def test_nothing_to_encode():
    tokenizer = VectorTokenizer.fit(blobs(50), 4)
    assert tokenizer.encode(torch.zeros(0, 6)).shape == (0,)
    assert tokenizer.encode(torch.zeros(3, 0, 6)).shape == (3, 0)
    assert tokenizer.encode(blobs(50)[0]).shape == ()


@pytest.mark.parametrize(
    ("vectors", "options", "message"),
    [
        ([1.0, 2.0], {}, "shape"),
        (np.zeros((3, 0)), {}, "shape"),
        (np.zeros((0, 3)), {}, "no finite vectors"),
        ([[math.nan, 1.0]], {}, "no finite vectors"),
        ([[1.0]], {"size": 0}, "size is 0"),
        ([[1.0]], {"iterations": 0}, "iterations is 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(vectors, options, message):
    with pytest.raises(DataError, match=message):
        VectorTokenizer.fit(vectors, **options)


@pytest.mark.parametrize(
    ("centroids", "message"),
    [
        ([1.0, 2.0], "shape"),
        ([[1.0], [math.nan]], "finite"),
        ([[1.0], [2.0], [1.0]], "distinct: of 3, 2 are"),
        (np.zeros((0, 2)), "shape"),
    ],
)
def test_wrong_centroids_are_refused(centroids, message):
    with pytest.raises(DataError, match=message):
        VectorTokenizer(centroids)


def test_vectors_of_another_width_and_wrong_codes_are_refused():
    tokenizer = VectorTokenizer(torch.eye(3))
    with pytest.raises(DataError, match="3 numbers each"):
        tokenizer.encode(torch.zeros(4, 2))
    with pytest.raises(DataError, match="found 3"):
        tokenizer.decode([0, 3])


@given(matrices)
def test_saved_and_loaded_bit_for_bit(tmp_path_factory, vectors):
    path = tmp_path_factory.mktemp("tokenizer") / "image.safetensors"
    tokenizer = VectorTokenizer.fit(vectors, 4)
    tokenizer.save(path)
    for loaded in (VectorTokenizer.load(path), load_tokenizer(path)):
        assert isinstance(loaded, VectorTokenizer)
        assert torch.equal(loaded.values.view(torch.int32), tokenizer.values.view(torch.int32))
        assert loaded.inertia == tokenizer.inertia


def test_a_file_of_another_kind_is_refused(tmp_path):
    ScalarTokenizer([0.0, 1.0]).save(tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=r"kind 'scalar'.*expected vector"):
        VectorTokenizer.load(tmp_path / "a.safetensors")
