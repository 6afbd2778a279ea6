"""Mixup and CutMix: the formulas, labels as probabilities, the same batches after a resume, what is refused."""

from random import Random

import pytest
import torch
import yaml
from hypothesis import given, strategies as st
from torch import nn

from etude import Trainer
from etude.core import ConfigError, DataBatch, DataError
from etude.data.mixing import CutMix, Mixup, MixupOrCutMix
from etude.experiment import load_config
from etude.experiment.build import build_trainer

KINDS = [Mixup, CutMix, MixupOrCutMix]
X = torch.rand(6, 2, 8, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


@given(seed=st.integers(0, 2**32), alpha=st.floats(0.1, 4.0))
def test_mixup_is_the_weighted_sum_of_neighbours(seed, alpha):
    mixed, soft = Mixup(3, alpha)((X, Y), Random(seed))
    draws = Random(seed)
    draws.random()  # whether to mix at all
    share = draws.betavariate(alpha, alpha)
    for place in range(len(X)):
        expected = share * X[place].double() + (1 - share) * X[place ^ 1].double()
        torch.testing.assert_close(mixed[place].double(), expected, rtol=1e-5, atol=1e-6)
        labels = torch.zeros(3)
        labels[Y[place]] += share
        labels[Y[place ^ 1]] += 1 - share
        torch.testing.assert_close(soft[place], labels)


@given(seed=st.integers(0, 2**32))
def test_cutmix_takes_a_rectangle_of_the_neighbour_and_its_area_is_the_label(seed):
    mixed, soft = CutMix(3)((X, Y), Random(seed))
    partner = X[[1, 0, 3, 2, 5, 4]]
    other = (mixed == partner) & (mixed != X)
    assert torch.equal(mixed, torch.where(other, partner, X))
    inside = other[0, 0]
    assert (other == inside).all()
    rows, columns = inside.any(1), inside.any(0)
    assert torch.equal(inside, rows[:, None] & columns[None])
    assert int(rows.sum()) == 0 or rows[rows.nonzero().min() : rows.nonzero().max() + 1].all()
    area = float(inside.sum()) / inside.numel()
    torch.testing.assert_close(soft[0, Y[0]], torch.tensor(1 - area))
    torch.testing.assert_close(soft.sum(1), torch.ones(6))


@pytest.mark.parametrize("kind", KINDS)
def test_even_shares_of_a_batch_are_mixed_like_the_whole(kind):
    whole = kind(3)((X, Y), Random(1))
    shares = [kind(3)((X[part], Y[part]), Random(1)) for part in (slice(0, 2), slice(2, 6))]
    for one, pieces in zip(whole, zip(*shares, strict=True), strict=True):
        torch.testing.assert_close(one, torch.cat(pieces))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_odd_sizes(kind):
    for count in (0, 1, 3):
        mixed, soft = kind(3)((X[:count], Y[:count]), Random(1))
        assert mixed.shape == X[:count].shape
        torch.testing.assert_close(soft.sum(1), torch.ones(count))


@pytest.mark.parametrize("kind", KINDS)
def test_without_mixing_only_the_labels_change(kind):
    for batch in ((X, Y), DataBatch(X, Y), {"pixel_values": X, "labels": Y}, (X, nn.functional.one_hot(Y).float())):
        found = kind(3, probability=0.0)(batch, Random(0))
        assert type(found) is type(batch)
        values = list(found.values()) if isinstance(found, dict) else list(found)
        assert torch.equal(values[0], X)
        assert torch.equal(values[1], nn.functional.one_hot(Y).float())


@pytest.mark.parametrize("switch", [0.0, 1.0])
def test_either_of_both(switch):
    found, _ = MixupOrCutMix(3, switch_probability=switch)((X, Y), Random(4))
    is_cut = ((found == X) | (found == X[[1, 0, 3, 2, 5, 4]])).all()
    assert bool(is_cut) == bool(switch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "word"),
    [
        (X, "labels"),
        ((X, Y.float()), "float32"),
        ((X, Y + 1), "num_classes"),
        (({"a": X}, Y), "dict"),
        (((X * 9).long(), Y), "int64"),
    ],
)
def test_batches_that_cannot_be_mixed_are_refused(kind, batch, word):
    with pytest.raises(DataError, match=word):
        kind(3)(batch, Random(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(80, 3))


DATA = torch.rand(40, 2, 8, 5, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3


def run(epochs, transform, folder=None, *, resume=False, validation=DATA, **settings):
    config = {"epochs": epochs, "batch_size": 8, "device": "cpu", "batch_transform": transform, **settings}
    trainer = Trainer(net(), DATA, validation, config=config, progress=False, output_dir=folder, resume=resume)
    return trainer, trainer.train()


@pytest.mark.parametrize("transform", [{"name": "mixup_cutmix", "num_classes": 3}, Mixup(3, probability=0.5)])
@pytest.mark.parametrize("stop", [{"epochs": 1}, {"epochs": 3, "max_steps": 7}])
def test_resumed_run_is_the_uninterrupted_one(transform, stop, tmp_path):
    whole, expected = run(3, transform)
    run(stop["epochs"], transform, tmp_path, max_steps=stop.get("max_steps"))
    resumed, found = run(3, transform, tmp_path, resume=True)
    assert found["val_loss"] == expected["val_loss"]
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_the_loss_is_the_cross_entropy_of_the_mixed_batch():
    seen = []

    def keep(batch, random):
        seen.append(Mixup(3, 1.0)(batch, random))
        return seen[-1]

    trainer, result = run(1, keep, validation=None, batch_size=40, max_steps=1)
    model, (x, soft) = net(), seen[0]
    assert result["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), soft).item(), rel=1e-5)
    assert sorted(trainer.evaluate(DATA)) == ["accuracy", "loss"]  # integer labels


def test_every_batch_has_its_own_random_numbers():
    drawn = []

    def keep(batch, random):
        drawn.append(random.random())
        return batch

    run(2, keep)
    assert len(set(drawn)) == len(drawn) == 10


def test_in_a_config_file_the_data_knows_the_classes(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,label\n" + "".join(f"{i},{i * i % 7},{'xyz'[i % 3]}\n" for i in range(60)))
    document = {
        "data": {"name": "csv", "path": str(tmp_path / "a.csv"), "target": "label"},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"epochs": 1, "batch_size": 16, "batch_transform": {"name": "mixup", "alpha": 0.4}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    config = load_config(tmp_path / "run.yaml")
    trainer = build_trainer(config, progress=False)
    assert trainer.config.batch_transform.num_classes == 3
    trainer.train()
    assert config.to_dict()["training"]["batch_transform"]["alpha"] == 0.4


@pytest.mark.parametrize(
    ("transform", "word"),
    [
        ({"name": "mixpu", "num_classes": 3}, "mixup"),
        ({"name": "mixup", "num_classes": 3, "alhpa": 1.0}, "alpha"),
        ({"name": "mixup"}, "mixup.* needs num_classes"),
        ({"name": "mixup", "num_classes": 3, "alpha": 0.0}, "alpha"),
        (lambda batch: batch, "batch, random"),
    ],
)
def test_mistakes_are_one_line(transform, word):
    with pytest.raises(ConfigError, match=word):
        run(1, transform)
