"""The data of the code experiment as a config names it: batches of every stream."""

import numpy as np
import pytest
import torch
from code_project import EXPERIMENT, samples
from code_tasks import STREAMS
from code_tasks.labels import QUALITY, SECURITY
from code_tasks.sources import SPLITS

from etude.config.imports import import_user_modules
from etude.config.registry import lookup
from etude.core import DataError
from etude.corpus import load_tokenizer
from etude.data import TokenDocuments
from etude.data.catalog.tokens import load_tokens


@pytest.fixture(scope="module")
def code_tasks_component():
    import_user_modules(["components.py"], EXPERIMENT)
    return lookup("data", "code_tasks").factory


KEYS = {
    "code": {"input_ids", "labels", "simple", "full"},
    "functions": {"input_ids", "attention_mask", "labels", "quality", "security"},
    "tests": {"input_ids", "attention_mask", "labels"},
    "explanations": {"input_ids", "attention_mask", "labels"},
    "pairs": {"input_ids", "attention_mask", "labels", "clarification"},
}


@pytest.mark.parametrize("stream", STREAMS)
def test_batches_of_the_component_have_the_keys_that_tasks_name(code_tasks_component, built, project, stream):
    data = code_tasks_component(stream, inputs=[str(project)], out=str(built), vocab_size=400, max_length=128)
    assert data.vocab_size == 400
    for split in SPLITS:
        batch = next(iter(data.make_loader(split, 4)))
        assert set(batch) == KEYS[stream]
        shape = batch["input_ids"].shape
        assert all(batch[name].shape == shape for name in ("labels", "simple", "full") if name in batch)
        if "quality" in batch:
            assert batch["quality"].shape == (shape[0], len(QUALITY))
            assert batch["security"].shape == (shape[0], len(SECURITY))
        if "attention_mask" in batch:
            padded = batch["attention_mask"] == 0
            assert (batch["input_ids"][padded] == load_tokenizer(built).token_to_id("<|pad|>")).all()
            assert (batch["labels"][padded] == -100).all()
    by_tokens = load_tokens(str(built / stream), read="blocks" if stream == "code" else "documents", length=128)
    assert set(next(iter(by_tokens.make_loader("train", 4)))) == KEYS[stream]


def test_the_component_builds_what_is_missing_and_says_so(code_tasks_component, project, tmp_path, caplog):
    arguments = {"inputs": [str(project)], "out": str(tmp_path / "out"), "vocab_size": 400, "max_length": 128}
    code_tasks_component("pairs", **arguments)
    code_tasks_component("code", **arguments, length=32, mask_rate=0.2)
    assert [record.getMessage() for record in caplog.records if "making" in record.getMessage()] == [
        f"making the data of {project} in {tmp_path / 'out'}, once; it takes a minute or two"
    ]


def test_masked_code_keeps_the_labels_of_its_tokens(code_tasks_component, built, project):
    arguments = {"inputs": [str(project)], "out": str(built), "vocab_size": 400, "max_length": 128, "length": 32}
    plain = code_tasks_component("code", **arguments)
    masked = code_tasks_component("code", **arguments, mask_rate=0.2)
    one, two = (next(iter(data.make_loader("validation", 4))) for data in (plain, masked))
    assert torch.equal(one["full"], two["full"])
    hidden = two["labels"] >= 0
    assert 0.05 < hidden.float().mean() < 0.4
    assert torch.equal(two["labels"][hidden], one["input_ids"][hidden])
    with pytest.raises(DataError, match="mask_rate is for the stream code"):
        code_tasks_component("pairs", **arguments, mask_rate=0.2)


def test_padding_of_labels_of_tokens_is_no_label(built):
    batch = TokenDocuments(samples(built, "code", "train")).gather(np.arange(8), epoch=0, seed=0)
    padded = batch["attention_mask"] == 0
    assert padded.any()
    for name in ("simple", "full"):
        assert (batch[name][padded] == -100).all()
        assert (batch[name][~padded] >= 0).any()


def test_a_stream_for_which_there_is_nothing_is_reported(code_tasks_component, tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    for number in range(30):
        (folder / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 3)
    arguments = {"inputs": [str(folder)], "out": str(tmp_path / "out"), "vocab_size": 270, "max_length": 128}
    code_tasks_component("functions", **arguments)
    with pytest.raises(DataError, match="nothing for the stream tests"):
        code_tasks_component("tests", **arguments)
