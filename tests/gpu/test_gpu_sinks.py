"""On a CUDA device: histograms make no step wait, and only the steps that are looked at are not captured."""

import numpy as np
import pytest
import torch
from captured_runs import assert_same, captured, data, net, trained

from etude.callbacks import TensorBoardLogger
from etude.callbacks.sinks.histograms import BINS, measure
from etude.callbacks.sinks.tensorboard import HistogramsMeasured
from etude.engine.callback import Gradients
from etude.engine.precision import MixedPrecision

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


class Kept(TensorBoardLogger):
    """Keeps events instead of writing them."""

    package = None

    def open_run(self, start):
        self.events = []

    def write(self, events):
        self.events += events

    def close_run(self):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_histograms_are_measured_without_waiting_and_are_those_of_the_host(no_waiting, dtype):
    model = torch.nn.Linear(300, 70).to("cuda", dtype)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    gradients = Gradients(model, list(model.parameters()), torch.tensor(8.0, device="cuda"), MixedPrecision("fp32"))
    measure(gradients)
    torch.cuda.synchronize()
    no_waiting(True)
    names, rows = measure(gradients)
    no_waiting(False)
    found = dict(zip(names, rows.cpu().double().numpy(), strict=True))
    for name, param in model.named_parameters():
        for tag, values in ((f"weights/{name}", param), (f"gradients/{name}", param.grad.double() / 8)):
            values = values.detach().double().cpu().numpy().ravel()
            low, high, total, squares, *counts = found[tag]
            assert (low, high) == pytest.approx((values.min(), values.max()))
            assert (total, squares) == pytest.approx((values.sum(), (values**2).sum()), rel=1e-6, abs=1e-6)
            expected, _ = np.histogram(values, BINS, (values.min(), values.max()))
            assert sum(counts) == len(values)
            assert np.abs(np.cumsum(counts) - np.cumsum(expected)).max() <= 2 + len(values) / 1000 * (
                dtype != torch.float32
            )


def test_only_the_steps_that_are_looked_at_are_eager_and_training_stays_the_same(tmp_path, undo_determinism):
    config = {"epochs": 2, "log_interval": 10}
    sink = Kept(str(tmp_path), histograms_every=7)
    watched = trained(net(), data(), capture="on", config=config, callbacks=[sink])
    assert captured(watched)
    assert_same(watched, trained(net(), data(), capture="off", config=config))
    steps = [one.step for one in sink.events if isinstance(one, HistogramsMeasured)]
    assert steps == list(range(1, watched.state.clock.step + 1, 7))
