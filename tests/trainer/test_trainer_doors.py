"""Every door leads to the same engine: the usage examples of each, and that they agree with each other."""

import copy
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import etude
from etude import (
    Accuracy,
    BasicTrainingLoop,
    CallbackList,
    CSVLogger,
    DataLoader,
    EarlyStopping,
    EpochResult,
    GradientAccumulator,
    LanguageModelingLoss,
    LeNet5,
    LossTracker,
    ModelCheckpoint,
    Trainer,
    TrainingLoop,
    TrainingMetrics,
    ValidationLoop,
    training_step,
)
from etude.core import ConfigError, DataError, RunFolderError, TrainingError
from etude.optim import SGD, Adam, AdamW


def toy(samples=96, features=8, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    return x, (x @ torch.randn(features, classes, generator=generator)).argmax(1)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------ plain functions


def test_training_step_from_plain_functions():
    model, (x, y) = net(), toy()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        loss = training_step(model.forward, F.cross_entropy, optimizer.step, optimizer.zero_grad, x, y)
        other.zero_grad()
        expected = F.cross_entropy(reference(x), y)
        expected.backward()
        other.step()
        assert loss == pytest.approx(expected.item())
    torch.testing.assert_close(parameters(model), parameters(reference))


def test_training_step_with_an_update_of_ones_own():
    weight = torch.zeros(8, 3, requires_grad=True)
    x, y = toy()

    def step():
        with torch.no_grad():
            weight.sub_(0.5 * weight.grad)

    def zero():
        weight.grad = None

    losses = [training_step(lambda data: data @ weight, F.cross_entropy, step, zero, x, y) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_configuration_driven_training_with_functions():
    """Load a config, make the configs of model and trainer, run with plain functions."""
    config = etude.load_experiment_config("lenet5", "baseline", overrides=["training.epochs=2"])
    model_config = etude.create_model_config(config)
    trainer_config = etude.create_trainer_config(config)
    assert (trainer_config.num_epochs, trainer_config.learning_rate) == (2, 0.01)
    torch.manual_seed(0)
    model = LeNet5(**model_config)
    images = torch.randn(256, 1, 28, 28)
    labels = images.mean(dim=(1, 2, 3)).gt(0).long()
    optimizer = SGD(model.parameters(), lr=trainer_config.learning_rate, momentum=0.9)
    loop = TrainingLoop(log_interval=trainer_config.log_interval)
    train_loader = DataLoader(images, labels, trainer_config.batch_size)
    metrics = TrainingMetrics()
    loop.run(
        model.forward,
        F.cross_entropy,
        optimizer.step,
        model.zero_grad,
        train_loader,
        trainer_config.num_epochs,
        metrics,
    )
    assert metrics.current_epoch == 1
    assert metrics.current_batch == 4
    assert 0 < metrics.train_loss < 2.4
    assert 0 < metrics.train_accuracy < 1


def test_run_epoch_clips_through_the_optimizer_method():
    model, (x, y) = net(), toy()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = torch.optim.SGD(reference.parameters(), lr=1.0)
    loader = DataLoader(x, y, 96, shuffle=False)
    loop = TrainingLoop(clip_gradients=True, max_grad_norm=0.01)
    loop.run_epoch(model.forward, F.cross_entropy, optimizer.step, optimizer.zero_grad, loader, TrainingMetrics())
    F.cross_entropy(reference(x), y).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    other.step()
    torch.testing.assert_close(parameters(model), parameters(reference), rtol=1e-4, atol=1e-6)


def test_clipping_without_known_parameters_is_explained():
    weight = torch.zeros(8, 3, requires_grad=True)
    loader = DataLoader(*toy(), 32)
    loop = TrainingLoop(clip_gradients=True)
    with pytest.raises(ConfigError, match="clip_gradients=False"):
        loop.run_epoch(
            lambda data: data @ weight, F.cross_entropy, lambda: None, lambda: None, loader, TrainingMetrics()
        )


def test_run_epoch_manual(caplog):
    model, (x, y) = net(), toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def compute_batch_loss(data, labels):
        seen.append(len(data))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    loop = TrainingLoop(log_interval=2)
    with caplog.at_level(logging.INFO, logger="etude"):
        losses = [
            loop.run_epoch_manual(
                x, y, batch_size=40, compute_batch_loss=compute_batch_loss, epoch=epoch + 1, total_epochs=3
            )
            for epoch in range(3)
        ]
    assert seen == [40, 40, 16] * 3
    assert losses[2] < losses[0]
    assert "epoch 3/3 batch 2/3" in caplog.text


# ------------------------------------------------------------------ objects


class TransformerLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 31)

    def forward(self, input_ids):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.head(self.layer(self.embed(input_ids), src_mask=mask, is_causal=True))


def test_object_loops_train_a_language_model():
    torch.manual_seed(0)
    model = TransformerLM()
    ids = (torch.arange(12) + torch.arange(64)[:, None]) % 31
    train_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    train_loop = TrainingLoop(
        loss_strategy=LanguageModelingLoss(),
        gradient_accumulator=GradientAccumulator(optimizer, accumulation_steps=4),
        use_amp=True,
        device="cpu",
    )
    val_loop = ValidationLoop(loss_strategy=LanguageModelingLoss(), device="cpu")
    first = None
    for epoch in range(5):
        train_result = train_loop.train_epoch(
            model=model, dataloader=train_loader, optimizer=optimizer, scheduler=scheduler, epoch=epoch
        )
        val_result = val_loop.validate_epoch(model=model, dataloader=train_loader, epoch=epoch)
        first = first or train_result
    assert train_result.loss < 0.8 * first.loss
    assert val_result.perplexity == pytest.approx(torch.tensor(val_result.loss).exp().item(), rel=1e-6)
    assert train_result.lr < 1e-8  # two optimizer steps in each of five epochs: the schedule has run its course
    assert 0 < train_result.grad_norm_min <= train_result.grad_norm_max
    assert train_result.num_samples == val_result.num_samples == 64
    assert EpochResult.from_dict(json.loads(json.dumps(train_result.to_dict()))) == train_result
    assert model.training


def test_validation_has_no_gradients_and_leaves_the_mode():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append((output.requires_grad, module.training)))
    x, y = toy()
    result = ValidationLoop(nn.CrossEntropyLoss()).validate_epoch(model, DataLoader(x, y, 40, shuffle=False))
    assert seen == [(False, False)] * 3
    assert [module.training for module in model.modules()] == modes
    model.eval()
    assert result.loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
    assert result.accuracy == pytest.approx((model(x).argmax(1) == y).float().mean().item())


def test_nan_loss_is_found_and_explained():
    x, y = toy(samples=2000)
    loop = TrainingLoop(log_interval=10, loss_strategy=nn.CrossEntropyLoss())
    model = net()
    before = parameters(model).clone()
    with pytest.raises(TrainingError, match="not finite in the last"):
        loop.train_epoch(model, DataLoader(x * float("nan"), y, 16), AdamW(model.parameters()))
    assert torch.equal(before, parameters(model))


def test_empty_loader_is_an_error():
    model = net()
    with pytest.raises(DataError, match="no batch"):
        TrainingLoop(loss_strategy=nn.CrossEntropyLoss()).train_epoch(model, [], AdamW(model.parameters()))


def test_out_of_memory_names_remedies():
    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 3))

        def forward(self, x):
            torch.empty(2**60)  # more than any machine has
            return x @ self.weight

    trainer = Trainer(Hungry(), toy(), config={"batch_size": 32, "grad_accum_steps": 2}, progress=False)
    with pytest.raises(
        TrainingError, match=r"out of memory on cpu.*training\.batch_size=16 with training\.grad_accum_steps=4"
    ):
        trainer.train()


def test_accumulator_of_another_optimizer_is_refused():
    model = net()
    accumulator = GradientAccumulator(AdamW(model.parameters()), accumulation_steps=2)
    loop = TrainingLoop(gradient_accumulator=accumulator)
    with pytest.raises(ConfigError, match="another optimizer"):
        loop.train_epoch(model, DataLoader(*toy(), 32), AdamW(model.parameters()))


# ------------------------------------------------------------------ BasicTrainingLoop and Trainer


def test_basic_training_loop_with_metrics_and_callbacks(tmp_path):
    x, y = toy()
    model = net()
    optimizer = Adam(model.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer=optimizer, T_max=8, eta_min=1e-6)
    train_loss, train_acc, val_loss, val_acc = LossTracker(), Accuracy(), LossTracker(), Accuracy()
    checkpoint = ModelCheckpoint(filepath=tmp_path / "best_model.safetensors", monitor="val_acc", mode="max")
    loop = BasicTrainingLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        metrics=[train_loss, train_acc, val_loss, val_acc],
        callbacks=[EarlyStopping(monitor="val_loss", patience=10, mode="min"), checkpoint],
        progress=False,
    )
    logs = loop.fit(train_data=DataLoader(x, y, 16), val_data=DataLoader(x, y, 32, shuffle=False), epochs=8)
    assert logs["loss"] < 1.0
    assert (tmp_path / "best_model.safetensors").exists()
    assert train_loss.get_average() == pytest.approx(logs["loss"], rel=1e-5)
    assert train_acc.compute() == pytest.approx(logs["accuracy"])
    assert val_acc.compute() == pytest.approx(logs["val_accuracy"])
    assert val_loss.get_average() == pytest.approx(logs["val_loss"], rel=1e-5)
    assert optimizer.get_lr() == pytest.approx(1e-6)


def test_basic_training_loop_pattern_one(tmp_path):
    x, y = toy()
    model = net()
    loop = BasicTrainingLoop(model, AdamW(model.parameters(), lr=1e-2), progress=False)
    loop.add_callback(EarlyStopping(patience=1, min_delta=10.0))
    loop.add_callback(ModelCheckpoint(tmp_path / "best.safetensors"))
    loop.fit((x, y), (x, y), epochs=100)
    assert loop.trainer.state.clock.epoch == 2


def test_callbacks_by_hand(tmp_path):
    callbacks = CallbackList(
        [
            EarlyStopping(patience=2),
            CSVLogger(tmp_path / "training.log"),
        ]
    )
    epochs = 0
    for epoch in range(10):
        callbacks.on_epoch_begin(epoch)
        callbacks.on_epoch_end(epoch, {"loss": 1.0 / (epoch + 1), "val_loss": 1.0})
        epochs += 1
        if callbacks.control.stop:
            break
    assert epochs == 3
    assert len((tmp_path / "training.log").read_text().splitlines()) == 4


def test_trainer_train_evaluate_save_load(tmp_path):
    x, y = toy()
    trainer = Trainer(
        net(),
        train_loader=DataLoader(x, y, 16),
        val_loader=DataLoader(x, y, 32, shuffle=False),
        config={"learning_rate": 0.01, "weight_decay": 0.05, "warmup_steps": 5, "grad_clip": 1.0, "log_every": 4},
        device="cpu",
        output_dir=tmp_path / "run",
        use_amp=False,
        progress=False,
    )
    result = trainer.train(num_epochs=3)
    stats = trainer.evaluate(DataLoader(x, y, 96, shuffle=False))
    assert stats["loss"] == pytest.approx(result["val_loss"], rel=1e-5)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.05
    other = Trainer(net(seed=9), output_dir=None, progress=False, device="cpu")
    other.load_checkpoint(tmp_path / "run")
    assert other.evaluate(DataLoader(x, y, 96, shuffle=False)) == stats


def test_all_doors_give_the_same_weights():
    x, y = toy()
    results = []

    def loader():
        return DataLoader(x, y, 16, shuffle=False)

    model = net()
    config = {"epochs": 2, "gradient_clip_norm": None}
    Trainer(model, loader(), config=config, optimizer=SGD(model.parameters(), lr=0.1), progress=False).train()
    results.append(parameters(model))

    model = net()
    BasicTrainingLoop(model, SGD(model.parameters(), lr=0.1), config=config, progress=False).fit(loader(), epochs=2)
    results.append(parameters(model))

    model = net()
    optimizer, loop = SGD(model.parameters(), lr=0.1), TrainingLoop(loss_strategy=nn.CrossEntropyLoss())
    for epoch in range(2):
        loop.train_epoch(model, loader(), optimizer, epoch=epoch)
    results.append(parameters(model))

    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    TrainingLoop().run(
        model.forward, F.cross_entropy, optimizer.step, optimizer.zero_grad, loader(), 2, TrainingMetrics()
    )
    results.append(parameters(model))

    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for data, labels in loader():
            training_step(model, F.cross_entropy, optimizer.step, optimizer.zero_grad, data, labels)
    results.append(parameters(model))

    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-7)


def test_trainer_mistakes_are_explained():
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        Trainer(net(), config={"batch_sise": 3}, progress=False)
    with pytest.raises(ConfigError, match="train_loader"):
        Trainer(net(), progress=False).train()
    with pytest.raises(TrainingError, match="none of the model's parameters"):
        Trainer(net(), optimizer=AdamW(net().parameters()), progress=False)
    with pytest.raises(ConfigError, match="no parameters that require gradients"):
        Trainer(nn.Identity(), progress=False)
    with pytest.raises(DataError, match="found 7, but the model's output has 3 classes"):
        Trainer(net(), (torch.randn(8, 8), torch.full((8,), 7)), progress=False).train()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_model_trains_and_keeps_its_names():
    model = net()
    trainer = Trainer(model, toy(), config={"epochs": 1, "batch_size": 32, "compile_model": True}, progress=False)
    logs = trainer.train()
    assert logs["loss"] < 1.5
    assert set(model.state_dict()) == set(net().state_dict())


def test_a_basic_loop_writes_and_resumes_as_a_trainer_does(tmp_path):
    straight, parts = tmp_path / "straight", tmp_path / "parts"

    def loop(folder, **options):
        torch.manual_seed(0)
        return BasicTrainingLoop(
            nn.Linear(4, 2), progress=False, config={"device": "cpu"}, output_dir=folder, **options
        )

    x, y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
    loop(straight).fit((x, y), epochs=3)
    loop(parts).fit((x, y), epochs=1)
    with pytest.raises(RunFolderError, match="resume=True"):
        loop(parts).fit((x, y), epochs=3)
    loop(parts, resume=True).fit((x, y), epochs=3)
    weights = [(folder / "checkpoints" / "last" / "model.safetensors").read_bytes() for folder in (straight, parts)]
    assert weights[0] == weights[1]
