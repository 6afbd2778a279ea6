"""Names and keywords as the documents print them: each can be imported from `etude`, and called as shown."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import etude
from etude import optim
from etude.core import ConfigError


def test_what_most_programs_need_is_a_short_list():
    assert 25 <= len(etude.__all__) <= 35
    assert {"Trainer", "MultiTask", "TaskSpec", "Phase", "DataSplits", "TensorData", "AdamW", "F1"} <= {
        *etude.__all__
    }


def test_every_name_that_type_checkers_see_can_be_imported():
    tree = ast.parse(Path(etude.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    names = [one.name for node in imports for one in node.names]
    assert len(names) == len(set(names)) > 60
    assert all(getattr(etude, name) is not None for name in names)
    assert set(etude.__all__) <= set(names)
    for node in imports:  # what is not in the list is exported by its second name
        assert all(one.asname == one.name or one.name in etude.__all__ for one in node.names)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_optimizers_take_the_names_of_the_papers(kind):
    own, plain = (nn.Linear(3, 2) for _ in range(2))
    made = kind(own.parameters(), learning_rate=0.002, beta1=0.8, beta2=0.95, epsilon=1e-6)
    usual = kind(plain.parameters(), lr=0.002, betas=(0.8, 0.95), eps=1e-6)
    assert made.defaults == usual.defaults
    assert kind(own.parameters(), beta2=0.9).defaults["betas"] == (0.9, 0.9)


@pytest.mark.parametrize("given", [{"lr": 1, "learning_rate": 1}, {"betas": (0.9, 0.9), "beta1": 0.8}])
def test_one_argument_under_two_names_is_refused(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        optim.Adam(nn.Linear(3, 2).parameters(), **given)


def test_other_optimizers_have_no_betas():
    with pytest.raises(TypeError, match="beta1"):
        optim.SGD(nn.Linear(3, 2).parameters(), beta1=0.9)


def test_a_cosine_of_torch_anneals_a_loop_epoch_by_epoch():
    model = nn.Linear(3, 2)
    optimizer = optim.Adam(model.parameters(), learning_rate=0.001)
    scheduler = optim.CosineAnnealingLR(optimizer, T_max=4, eta_min=1e-6)
    data = [(torch.randn(8, 3), torch.randint(2, (8,)))] * 3
    etude.BasicTrainingLoop(model, optimizer, scheduler=scheduler).fit(data, epochs=4)
    assert optim.get_lr(optimizer) == pytest.approx(1e-6)


def test_batches_and_results_have_both_names():
    batch = etude.DataBatch(torch.zeros(2, 3), torch.tensor([1, 0]))
    assert batch.inputs is batch.data
    assert batch.targets is batch.labels
    result = etude.EpochResult(epoch=0, loss=0.5, duration_s=2.0, num_samples=100)
    assert (result.duration, result.throughput) == (2.0, 50.0)


def test_the_loss_of_the_documents_is_cross_entropy():
    logits, labels = torch.randn(4, 3), torch.randint(3, (4,))
    expected = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(etude.cross_entropy_loss(logits, labels), expected)


def test_functions_of_several_tasks_compose():
    weights = etude.loss_weights(100, etude.default_weights())
    outputs = {task: (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)) for task in etude.active_tasks(100)}
    total, each = etude.multi_task_loss(outputs, weights)
    expected = sum(weights[task] * float(loss) for task, loss in each.items())
    assert float(total) == pytest.approx(expected)
    assert float(etude.multi_task_loss(outputs, etude.default_weights()).loss) > 0


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (etude.LeNet5, {"num_classes": 7, "dropout": 0.1}),
        (etude.MLP, {"in_features": 4, "hidden": [8], "out_features": 3}),
        (etude.CausalTransformerLM, {"vocab_size": 11, "d_model": 8, "n_layers": 1, "n_heads": 2}),
    ],
)
def test_a_model_is_made_with_its_config(kind, config):
    made, usual = kind(config), kind(**config)
    assert [one.shape for one in made.parameters()] == [one.shape for one in usual.parameters()]
