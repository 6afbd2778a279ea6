"""Token data and exactness: stopped in the middle of an epoch of any way of reading, a run ends with the same bytes."""

import numpy as np
import pytest

from etude import Callback
from etude.core import ConfigError, DataError
from etude.data import TokenWriter, load_tokens
from etude.experiment import load_config, train_experiment
from etude.experiment.build import build_trainer
from etude.monitor import RunFolder
from run_files import weights

VOCAB = 64


class StopAt(Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_begin(self, run):
        self.clock = run.clock

    def on_step_end(self, report):
        if self.clock.step == self.step:
            self.control.request_stop("test")


def write_split(path, seed, documents=60):
    rng = np.random.default_rng(seed)
    with TokenWriter(path, meta={"vocab_size": VOCAB, "special_ids": {"end": 0, "pad": 1, "mask": 2}}) as writer:
        for length in rng.integers(3, 40, documents):
            writer.add(np.append(rng.integers(3, VOCAB, length - 1), 0).astype(np.uint16))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    for name in ("code", "text"):
        (folder / name).mkdir()
        write_split(folder / name / "train.bin", seed=len(name))
        write_split(folder / name / "val.bin", seed=9, documents=12)
    return folder


WAYS = {
    "blocks": "name: tokens\n  root: {root}/code\n  length: 12",
    "documents": "name: tokens\n  root: {root}/code\n  read: documents\n  length: 16\n  bucket_batches: 3",
    "packed": "name: tokens\n  root: {root}/code\n  read: packed\n  length: 24",
    "packed_fit": "name: tokens\n  root: {root}/code\n  read: packed\n  packing: fit\n  length: 48",
    "masked": "name: tokens\n  root: {root}/code\n  length: 12\n  mask_rate: 0.3",
    "mixture": "name: token_mixture\n  roots: {{a: {root}/code, b: {root}/text}}\n  weights: {{a: 3, b: 1}}\n"
    "  length: 12",
}

CONFIG = """
model:
  name: causal_transformer_lm
  d_model: 16
  n_layers: 1
  n_heads: 2
  dropout: 0.1
  max_len: 64
data:
  {data}
optimizer: {{name: adamw, lr: 0.01}}
training: {{epochs: 2, batch_size: 4, log_interval: 5, seed: 3, num_threads: 1}}
"""


def write_config(folder, way, root):
    path = folder / f"{way}.yaml"
    text = CONFIG.format(data=WAYS[way].format(root=root))
    if way == "masked":
        text += "loss: masked_language_modeling\n"
    path.write_text(text)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_a_run_stopped_inside_an_epoch_resumes_to_the_same_bytes(way, root, tmp_path):
    path = write_config(tmp_path, way, root)
    straight = tmp_path / "straight"
    train_experiment(path, [], run_dir=straight, progress=False)

    def trainer(folder):
        return build_trainer(load_config(path), folder=RunFolder.ensure(folder), progress=False)

    per_epoch = len(trainer(tmp_path / "none").loaders.train)
    assert per_epoch >= 5
    for stop in (per_epoch // 2, per_epoch + 2):
        folder = tmp_path / f"stopped{stop}"
        first = trainer(folder)
        first.callbacks.append(StopAt(stop))
        first.train()
        assert first.state.clock.position > 0
        again = trainer(folder)
        again.load_checkpoint(folder)
        again.train()
        assert weights(folder) == weights(straight), f"stopped at {stop}"


def test_training_on_tokens_reports_what_language_models_are_judged_by(root, tmp_path):
    outcome = train_experiment(write_config(tmp_path, "packed", root), [], run_dir=tmp_path / "run", progress=False)
    assert outcome.metrics["val_perplexity"] == pytest.approx(np.exp(outcome.metrics["val_loss"]), rel=1e-6)
    assert outcome.metrics["val_loss"] < np.log(VOCAB) + 0.5


def test_the_model_takes_the_vocabulary_of_the_data_by_default(root, tmp_path):
    path = write_config(tmp_path, "blocks", root)
    assert build_trainer(load_config(path), progress=False).model.vocab_size == VOCAB
    larger = load_config(path, overrides=["model.vocab_size=100"])
    assert build_trainer(larger, progress=False).model.vocab_size == 100
    with pytest.raises(ConfigError, match=r"model.vocab_size.*has 64 tokens, the model only 10"):
        build_trainer(load_config(path, overrides=["model.vocab_size=10"]), progress=False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.root=nowhere"], "nowhere has no train.bin; .*`etude tokenize --out nowhere`"),
        (["data.length=100000"], "too few for a block of 100000"),
        (["data.read=dokuments"], "documents"),
        (["data.lenght=5"], "length"),
    ],
)
def test_mistakes_in_the_data_section_are_explained(overrides, words, root, tmp_path):
    path = write_config(tmp_path, "blocks", root)
    with pytest.raises((ConfigError, DataError), match=words):
        build_trainer(load_config(path, overrides=overrides), progress=False)


def test_files_that_do_not_tell_a_vocabulary(root, tmp_path):
    np.random.default_rng(0).integers(0, 50, 500).astype(np.uint16).tofile(tmp_path / "train.bin")
    path = write_config(tmp_path, "blocks", root)

    def trainer(*overrides):
        changes = [f"data.root={tmp_path}", "data.dtype=uint16", *overrides]
        return build_trainer(load_config(path, overrides=changes), progress=False)

    with pytest.raises(ConfigError, match=r"model: causal_transformer_lm.* vocab_size.*set model.vocab_size"):
        trainer()
    assert trainer("data.vocab_size=50").model.vocab_size == 50
    with pytest.raises(DataError, match=r"the id 4\d, but the model's embedding 'embedding' has 40 rows"):
        trainer("model.vocab_size=40", "training.batch_size=41").train()


def test_files_made_with_different_tokenizers_are_not_mixed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        meta = {"vocab_size": 10, "tokenizer_sha256": name * 64}
        with TokenWriter(tmp_path / name / "train.bin", meta=meta) as writer:
            writer.add(np.arange(40, dtype=np.uint16) % 10)
    path = tmp_path / "mixture.yaml"
    path.write_text(
        CONFIG.format(data=WAYS["mixture"].format(root=tmp_path).replace("/code", "/a").replace("/text", "/b"))
    )
    with pytest.raises(DataError, match="different tokenizers"):
        build_trainer(load_config(path), progress=False)


def test_a_test_split_too_short_for_a_sample_does_not_stop_training(root, tmp_path, caplog):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes((root / "code" / name).read_bytes())
    with TokenWriter(tmp_path / "test.bin", meta={"vocab_size": VOCAB}) as writer:
        writer.add(np.arange(5, dtype=np.uint16))
    data = load_tokens(str(tmp_path), length=12)
    assert data.validation is not None
    assert data.test is None
    assert "there will be no test" in caplog.text


def test_packed_text_for_an_encoder_carries_its_mask(root):
    data = load_tokens(str(root / "code"), read="packed", length=24, mask_rate=0.2, attention="full")
    batch = next(iter(data.make_loader("train", 2)))
    documents = batch["document_ids"]
    assert batch["attention_mask"].shape == (2, 1, 24, 24)
    assert (batch["attention_mask"][:, 0] == (documents[:, :, None] == documents[:, None, :])).all()


def test_prefetching_changes_no_byte(root, tmp_path):
    path = write_config(tmp_path, "packed", root)
    for depth in (0, 2):
        folder = tmp_path / f"prefetch{depth}"
        train_experiment(path, [f"training.prefetch={depth}"], run_dir=folder, progress=False)
    assert (
        build_trainer(load_config(path, overrides=["training.prefetch=2"]), progress=False).loaders.train.prefetch
        == 2
    )
    assert weights(tmp_path / "prefetch0") == weights(tmp_path / "prefetch2")
