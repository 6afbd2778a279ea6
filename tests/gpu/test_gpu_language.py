"""On a CUDA device: a step of a language model never waits, and its MFU is a share of the data sheet's peak."""

import os

import pytest
import torch
from torch import nn

from etude import Callback, Trainer
from etude.engine.flops import _measured, listed_flops
from etude.engine.meter import measure
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import LanguageModelingLoss, SupervisedTask
from etude.optim import AdamW

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


class Model(nn.Module):
    """Torch's transformer layers between an embedding and a head."""

    def __init__(self, width=512, layers=4, vocabulary=1024) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, input_ids):
        return self.head(self.layers(self.embed(input_ids)))


def batch(rows, length):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1024, (rows, length), generator=generator).cuda()
    mask = (torch.arange(length) < length // 2 + torch.arange(rows)[:, None]).long().cuda()
    return {"input_ids": ids, "attention_mask": mask}


def test_a_step_with_padding_never_waits():
    model = Model(width=64, layers=1).cuda()
    precision = MixedPrecision("bf16", torch.device("cuda"))
    updater = Updater(AdamW(model.parameters(), lr=1e-3), clip_norm=1.0, precision=precision)
    task = SupervisedTask(LanguageModelingLoss())
    step = Step(model, task, updater, precision, metrics=True)
    batches = [batch(4, 32), batch(4, 48)]
    step(batches)
    measure(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batches)
        amounts = measure(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert amounts.tokens == sum(int(one["attention_mask"].sum()) for one in batches)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_mfu_is_a_share_of_the_peak(precision):
    records = []

    class Keep(Callback):
        def on_log(self, record):
            records.append(dict(record))

    data = [{"input_ids": row} for row in batch(32, 512)["input_ids"].cpu()]
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    config = {"max_steps": 30, "log_interval": 10, "precision": precision}
    Trainer(Model(), loader, config=config, callbacks=[Keep()], progress=False).train()
    assert 0.0 < records[-1]["mfu"] < 1.0
    assert records[-1]["tokens"] == 30 * 16 * 512


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_measured_peak_is_near_the_data_sheets(dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")  # another test may have allowed TF32
    listed = listed_flops(torch.cuda.get_device_name(), dtype)
    if listed is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not in the table")
    measured = max(_measured(torch.device("cuda", 0), dtype, False, 1) for _ in range(5))
    print(
        f"{torch.cuda.get_device_name()} {dtype}: measured {measured / 1e12:.0f}, listed {listed / 1e12:.0f} TFLOP/s"
    )
    shares = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1  # other tests use the device too
    assert (0.02 if shares else 0.15) * listed < measured < 1.1 * listed
