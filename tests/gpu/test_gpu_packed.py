"""Packed documents on a CUDA device: no mask, the same results, no waiting, and steps that are compiled or captured."""

import numpy as np
import pytest
import torch

from etude import CausalTransformerLM, DataLoader, Trainer
from etude.data import PackedDocuments, TokenWriter
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import LanguageModelingLoss, SupervisedTask
from etude.models.packed_attention import VarlenAttention
from etude.optim import AdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

LENGTH = 512


class Counted(VarlenAttention):
    """Torch's kernel, and how often it was called."""

    calls = 0

    def __call__(self, *args, **kwargs):
        type(self).calls += 1
        return super().__call__(*args, **kwargs)


@pytest.fixture(autouse=True)
def clean():
    Counted.calls = 0
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    with TokenWriter(path, meta={"vocab_size": 500}) as writer:
        for length in rng.integers(90, 300, 120):
            writer.add(rng.integers(0, 500, length).astype(np.uint16))
    return path


def make(**arguments):
    torch.manual_seed(0)
    settings = {"d_model": 128, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "max_len": LENGTH, **arguments}
    model = CausalTransformerLM(500, **settings).cuda()
    model.packed_attention = Counted()
    return model


def batches(path, strategy="fit", size=4):
    loader = DataLoader(PackedDocuments(path, LENGTH, strategy, attention="starts"), batch_size=size, device="cuda")
    return list(loader)


def inputs(batch, *, starts=True):
    kept = {key: value for key, value in batch.items() if starts or key != "document_starts"}
    tokens = kept.pop("input_ids")
    kept.pop("labels")
    return tokens, kept


def logits_and_gradients(model, batch, *, starts, causal, dtype=None):
    """Run a model by autocast, or in its own type; scale the loss, or gradients in float16 would be rounded to 0."""
    (tokens, others), real, scale = inputs(batch, starts=starts), batch["document_ids"] >= 0, 2.0**12
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        logits = model(tokens, **others, causal=causal)
    (logits.double()[real].square().mean() * scale).backward()
    return [logits.detach().double()[real], *(parameter.grad.double() / scale for parameter in model.parameters())]


@pytest.mark.parametrize("strategy", ["split", "fit"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_and_gradients_are_those_of_float64_with_and_without_a_mask(path, strategy, causal, dtype):
    batch = batches(path, strategy)[0]
    reference = logits_and_gradients(make().double(), batch, starts=False, causal=causal)
    assert Counted.calls == 0
    for starts in (True, False):
        results = logits_and_gradients(make(), batch, starts=starts, causal=causal, dtype=dtype)
        assert Counted.calls == 2  # of the two layers, and none more with the mask
        for found, expected in zip(results, reference, strict=True):
            assert found.isfinite().all()
            assert (found - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


def test_no_document_sees_another(path):
    batch = batches(path)[0]
    tokens, others = inputs(batch)
    model = make().eval()
    changed = torch.where(batch["document_ids"] == 0, (tokens + 1) % 500, tokens)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        before, after = model(tokens, **others), model(changed, **others)
    assert Counted.calls == 4
    assert before[batch["document_ids"] != 0].equal(after[batch["document_ids"] != 0])
    assert not before.equal(after)


@pytest.mark.parametrize(
    ("arguments", "precision"), [({"dropout": 0.1}, torch.bfloat16), ({}, torch.float32)], ids=["dropout", "float32"]
)
def test_there_is_a_mask_where_the_kernel_does_not_serve(path, arguments, precision):
    tokens, others = inputs(batches(path)[0])
    with torch.autocast("cuda", torch.bfloat16, enabled=precision is torch.bfloat16):
        assert make(**arguments)(tokens, **others).isfinite().all()
    assert Counted.calls == 0


def test_a_step_never_waits(path, no_waiting):
    model = make()
    precision = MixedPrecision("bf16", torch.device("cuda"))
    updater = Updater(AdamW(model.parameters(), lr=1e-3), clip_norm=1.0, precision=precision)
    step = Step(model, SupervisedTask(LanguageModelingLoss()), updater, precision, metrics=True)
    first, second = batches(path)[:2]
    step([first])
    torch.cuda.synchronize()
    no_waiting(True)
    step([second])
    no_waiting(False)
    assert Counted.calls == 4


def test_a_compiled_model_gives_the_same_in_one_graph(path):
    tokens, others = inputs(batches(path)[0])
    model = make()
    model.packed_attention = VarlenAttention()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = compiled(tokens, **others).float(), model(tokens, **others).float()
    assert (found - expected).norm() / expected.norm() < 0.02
    found.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_captured_run_has_the_bytes_of_an_uncaptured_one(path):
    states = []
    for capture in ("on", "off"):
        trainer = Trainer(
            make(),
            DataLoader(PackedDocuments(path, LENGTH, "split", attention="starts"), batch_size=2, device="cuda"),
            task=SupervisedTask(LanguageModelingLoss()),
            optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
            config={"epochs": 4, "precision": "bf16", "deterministic": True, "capture": capture},
            progress=False,
        )
        trainer.train()
        assert Counted.calls
        states.append(trainer.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
