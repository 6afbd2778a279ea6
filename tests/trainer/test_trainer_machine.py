"""Where a run computes: device, number format, threads, determinism, and remedies for what a device refuses."""

import pytest
import torch
from torch import nn

from etude.core import ConfigError, TrainingError
from etude.trainer import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine, making_model
from forked_python import run_python


def test_the_config_names_device_number_format_and_batch_size():
    machine = Machine.from_config(TrainerConfig(device="cpu", precision="bf16", batch_size=12))
    assert (machine.device.type, machine.precision.name, machine.batch_size) == ("cpu", "bf16", 12)
    assert (machine.world.rank, machine.world.size, machine.world.is_main) == (0, 1, True)


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu"])
def test_a_device_that_cannot_train_is_refused_by_name(device):
    with pytest.raises(ConfigError, match=device):
        Machine(device)
    with pytest.raises(ConfigError, match=device):
        Machine.from_config(TrainerConfig(device=device))


SETTINGS = """
import torch
from etude.trainer import TrainerConfig
from etude.trainer.machine import Machine, making_model
Machine.from_config(TrainerConfig(device="cpu", num_threads=3, deterministic=True))
print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
"""


def test_threads_and_determinism_are_set_for_the_whole_process():
    """In a process of its own: both outlive the machine."""
    done = run_python("-c", SETTINGS)
    assert done.stdout.split() == ["3", "True"], done.stderr


def test_a_loop_of_ones_own_changes_nothing_of_the_process():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    Machine("cpu", "bf16")
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def blocks():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 2, enable_nested_tensor=False)


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize(
    ("context", "remedies"),
    [
        (lambda machine: machine.training(grad_accum_steps=3), ["batch_size=8", "grad_accum_steps=6"]),
        (
            lambda machine: machine.training(recomputable=blocks()),
            ["activation_checkpointing"],
        ),
        (lambda machine: machine.validating(), ["in validation", "batch_size=8"]),
        (lambda machine: making_model(machine.device), ["a smaller model"]),
    ],
)
def test_memory_that_runs_out_has_the_remedies_of_the_moment(context, remedies):
    machine = Machine("cpu", batch_size=16)
    with pytest.raises(TrainingError) as caught, context(machine):
        out_of_memory()
    assert all(remedy in str(caught.value) for remedy in remedies)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("context", ["training", "validating"])
def test_other_errors_pass_through(context):
    with pytest.raises(ZeroDivisionError), getattr(Machine("cpu"), context)():
        _ = 1 / 0


def test_batches_made_elsewhere_have_no_batch_size_to_halve():
    with pytest.raises(TrainingError) as caught, Machine("cpu").training():
        out_of_memory()
    assert "training.batch_size" not in str(caught.value)
    assert "smaller batches" in str(caught.value)


def test_a_batch_norm_layer_with_a_single_sample_has_a_remedy():
    with pytest.raises(TrainingError, match="drop_last"), Machine("cpu").training():
        nn.BatchNorm1d(2)(torch.zeros(1, 2))


def test_another_device_keeps_the_number_format():
    machine = Machine("cpu", "bf16", batch_size=4)
    assert machine.at(torch.device("cpu")) is machine
    if torch.cuda.is_available():
        there = machine.at(torch.device("cuda", 0))
        assert (there.device.type, there.precision.name, there.batch_size) == ("cuda", "bf16", 4)


def test_a_model_is_placed_as_the_config_says():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Machine("cpu").place(model, TrainerConfig(device="cpu", activation_checkpointing="[01]"))
    x = torch.ones(3, 2, requires_grad=True)
    plain = nn.functional.linear(nn.functional.linear(x, *model[0].parameters()), *model[1].parameters())
    torch.testing.assert_close(model(x), plain)
    with pytest.raises(ConfigError, match="no-such-block"):
        Machine("cpu").place(nn.Linear(2, 2), TrainerConfig(device="cpu", activation_checkpointing="no-such-block"))


def calls_of(model):
    """Return what a call of each of its modules runs, besides the code of its class."""
    return [(one._compiled_call_impl, vars(one).get("forward")) for one in model.modules()]


@pytest.mark.parametrize("compiled", ["model", "off"])
def test_a_second_trainer_of_a_model_undoes_what_the_first_one_did(compiled):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    model[0].compile()
    machine, before = Machine("cpu"), calls_of(model)
    machine.place(model, TrainerConfig(device="cpu", compile=compiled, activation_checkpointing="1"))
    assert (model._compiled_call_impl is not None) == (compiled == "model")
    assert "forward" in vars(model[1])
    machine.place(model, TrainerConfig(device="cpu", compile="off"))
    assert calls_of(model) == before


def test_a_second_trainer_undoes_recomputation_by_the_model_itself():
    class Itself(nn.Sequential):
        recomputes = False

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
            self.recomputes = True

        def gradient_checkpointing_disable(self):
            self.recomputes = False

    model, machine = Itself(nn.Linear(2, 2)), Machine("cpu")
    for given, expected in ((True, True), (False, False)):
        machine.place(model, TrainerConfig(device="cpu", activation_checkpointing=given))
        assert model.recomputes is expected
    model.gradient_checkpointing_enable()
    machine.place(model, TrainerConfig(device="cpu"))
    assert model.recomputes  # its user asked for it


def test_loaders_put_batches_where_the_machine_is():
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    loaders = Loaders(data, config=TrainerConfig(batch_size=2), machine=(machine := Machine("cpu")))
    assert {batch[0].device for batch in loaders.train.iterate(0)} == {machine.device}


def test_another_device_keeps_the_loss_scale():
    machine = Machine("cpu", "fp16", loss_scale=8.0, batch_size=2)
    moved = machine.at(torch.device("cpu", 0))
    assert moved is not machine
    assert torch.equal(moved.precision.scaler.scale, machine.precision.scaler.scale)


def test_other_libraries_can_still_ask_for_the_precision_of_products():
    code = (
        "import torch; from etude.trainer.machine import configure_cuda_performance; configure_cuda_performance(); "
        "print(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision)"
    )
    done = run_python("-W", "error", "-c", code)
    assert done.stdout.split() == ["high", "tf32"], done.stderr
