"""`csv`: parts held out by content, standardised numbers, fingerprints; against plain formulas."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from table_samples import whole

from etude.core import DataError
from etude.data.catalog.holdout import hold_out
from etude.data.catalog.table_files import TableFormat
from etude.data.catalog.tabular import load_csv


@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), min_size=10, max_size=200),
    st.floats(0.1, 0.4),
    st.floats(0.1, 0.4),
)
def test_parts_are_disjoint_complete_and_as_large_as_asked(keys, validation, test):
    parts = hold_out(np.array(keys, dtype=np.uint64), validation, test)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(keys)))
    assert len(parts["validation"]) == round(validation * len(keys))
    assert len(parts["test"]) == round(test * len(keys))
    order = np.argsort(np.array(keys, dtype=np.uint64), kind="stable")
    assert parts["test"].tolist() == sorted(order[: len(parts["test"])].tolist())


def test_different_rows_have_different_keys(write):
    grid = "\n".join(f"{a},{b},{c}" for a in range(16) for b in range(16) for c in range(16))
    keys = TableFormat().read(Path(write(f"a,b,c\n{grid}")), None).keys
    assert len(set(keys.tolist())) == 16**3
    assert abs(np.mean(keys < 2**63) - 0.5) < 0.05


def rows_of(part):
    return sorted(map(tuple, torch.cat([part.data, part.labels], 1).tolist()))


def test_parts_do_not_depend_on_the_order_of_rows(write):
    lines = [f"{i},{i % 5},{i * i}" for i in range(100)]
    before = whole(write("a,b,y\n" + "\n".join(lines)), target="y", validation=0.2, test=0.1)
    random.Random(0).shuffle(lines)
    after = whole(write("a,b,y\n" + "\n".join(lines)), target="y", validation=0.2, test=0.1)
    other = whole(write("a,b,y\n" + "\n".join(lines)), target="y", validation=0.2, test=0.1, seed=1)
    for part, size in (("train", 70), ("validation", 20), ("test", 10)):
        assert rows_of(getattr(before, part)) == rows_of(getattr(after, part))
        assert rows_of(getattr(before, part)) != rows_of(getattr(other, part))
        assert len(getattr(before, part)) == size


@pytest.mark.parametrize(("shares", "fact"), [((0.01, 0.0), "none"), ((0.5, 0.5), "train")])
def test_shares_that_leave_nothing(write, shares, fact):
    with pytest.raises(DataError, match=fact):
        whole(write("a,y\n1,2\n2,3\n3,4\n4,5\n"), target="y", validation=shares[0], test=shares[1])


def test_numbers_are_standardised_by_the_training_part(write):
    source = np.random.default_rng(0)
    table = source.normal(
        1.7e9, 50.0, (200, 2)
    )  # as large as times in seconds: float32 alone could not tell them apart
    text = "a,y\n" + "\n".join(f"{a:.6f},{y:.6f}" for a, y in table)
    raw = whole(write(text), target="y", validation=0.25, test=0.25)
    splits = load_csv(write(text), "y", validation=0.25, test=0.25, standardize_target=True)
    facts = splits.facts
    assert raw.facts["rows"] == facts["rows"] == {"train": 100, "validation": 50, "test": 50}
    read = np.array([[float(f"{value:.6f}") for value in row] for row in table])
    (mean, std), (target_mean, target_std) = [
        (facts["mean"][0], facts["std"][0]),
        (facts["target_mean"], facts["target_std"]),
    ]
    expected = {((a - mean) / std, (y - target_mean) / target_std) for a, y in read}
    found = torch.cat(
        [torch.cat([part.data, part.labels], 1) for part in (splits.train, splits.validation, splits.test)]
    )
    np.testing.assert_allclose(np.sort(found, 0), np.sort(np.array(sorted(expected)), 0), rtol=1e-5, atol=1e-6)
    train = splits.train.data.double()
    assert abs(train.mean()) < 1e-6
    assert abs(train.std(correction=0) - 1) < 1e-6
    assert abs(splits.test.data.double().mean()) > 1e-4  # the training part's numbers, not its own


def test_a_constant_column_is_zero_and_stays_finite(write):
    splits = load_csv(write("a,b,y\n" + "5,%d,1\n5,%d,2\n" * 2 % (1, 2, 3, 4)), "y", validation=0.0, test=0.0)
    assert splits.train.data[:, 0].tolist() == [0.0] * 4


def test_a_missing_value_gets_the_mean_of_the_training_part_only(write):
    train, test = write("a,y\n1,1\n3,2\n,3\n"), write("a,y\n,1\n100,1\n", "t.csv")
    splits = load_csv(train, "y", validation=0.0, test=test, missing="mean", standardize=False)
    assert splits.train.data.flatten().tolist() == [1.0, 3.0, 2.0]
    assert splits.test.data.flatten().tolist() == [2.0, 100.0]


def test_classes_of_numbers_are_sorted_by_value(write):
    splits = whole(write("a,y\n1,10\n2,9\n3,1\n"), target="y", task="classification")
    assert splits.facts["classes"] == ["1", "9", "10"]
    assert splits.train.labels.tolist() == [2, 1, 0]
    assert splits.num_classes == 3
    assert splits.model_sizes() == {"num_classes": 3, "input_shape": (1,), "in_features": 1, "out_features": 3}


def test_the_fingerprint_is_that_of_the_values(write):
    one, same, other = (
        whole(write(text), target="y").facts["fingerprint"]
        for text in ("a,y\n1,2\n", "a,y\n1.0,2.00\n", "a,y\n1,3\n")
    )
    assert one == same != other


def test_the_fingerprint_is_that_of_every_part_and_of_the_settings(write):
    train, test = write("a,c,y\n1,u,2\n2,v,3\n3,u,4\n"), write("a,c,y\n1,u,2\n", "t.csv")
    first = load_csv(train, "y", validation=0.0, test=test).facts["fingerprint"]
    assert load_csv(train, "y", validation=0.0, test=test).facts["fingerprint"] == first
    others = [load_csv(train, "y", validation=0.0, test=test, standardize=False)]
    others.append(load_csv(train, "y", validation=0.0, test=test, exclude=["c"]))
    others.append(load_csv(train, "y", validation=0.0, test=write("a,c,y\n1,v,2\n", "t.csv")))
    others.append(load_csv(write("a,c,y\n2,v,3\n1,u,2\n3,u,4\n"), "y", validation=0.0, test=test))  # another order
    others.append(
        load_csv(write("a,c,y\n2,u,1\n2,v,3\n3,u,4\n"), "y", validation=0.0, test=test)
    )  # in another column
    assert first not in [splits.facts["fingerprint"] for splits in others]
