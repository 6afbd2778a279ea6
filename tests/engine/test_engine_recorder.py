"""What is around a recording: no garbage is collected in it, and updates in it are done in pieces."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from etude.engine import update
from etude.engine.recorder import no_collection
from etude.engine.update import Updater
from etude.optim import AdamW


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_not_collected_while_a_step_is_recorded(was_on):
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        seen = []
        with pytest.raises(ZeroDivisionError), no_collection():
            seen.append(gc.isenabled() or 1 / 0)
        assert not seen
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(("recorded", "tensors"), [(True, 2 + 3), (False, 2)])
def test_a_recorded_update_is_done_in_pieces(monkeypatch, recorded, tensors):
    lengths = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "fused_adamw" in function._schema.name:
                lengths.append(len(args[0]))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(update, "is_recorded", lambda tensor: recorded)
    layer = nn.Linear(100, 70)  # 7,000 weights: four pieces
    updater = Updater(AdamW(layer.parameters()))
    layer(torch.ones(2, 100)).sum().backward()
    with Spy():
        updater.apply(1.0)
    assert lengths == [tensors]
