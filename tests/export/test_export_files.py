"""Plain weights and folders for the Hub: opened by safetensors, transformers and huggingface_hub."""

import json
import resource

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from etude import TensorData, Trainer
from etude.core import ConfigError, EtudeError, RunFolderError
from etude.core.model_record import rebuild_model
from etude.export import export_run, save_hub, save_program, save_weights
from etude.export.hub import Card
from etude.models import MLP, CausalTransformerLM, LeNet5


class Views(nn.Module):
    """Tied weights, a view of another tensor, and a buffer that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        whole = torch.arange(12.0).view(3, 4)
        self.register_buffer("part", whole[:, 1:])
        self.register_buffer("turned", whole.T)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"anything": 1}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    "make",
    [Views, LeNet5, lambda: CausalTransformerLM(11, d_model=8, n_layers=1, n_heads=2), lambda: nn.BatchNorm1d(3)],
)
def test_load_state_dict_takes_the_file(tmp_path, make):
    model, fresh = make(), make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    save_weights(model, tmp_path / "m.safetensors")
    fresh.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())


def test_state_that_is_not_a_tensor_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="_extra_state"):
        save_weights(Extra(2, 2), tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def metadata(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


def test_a_folder_for_the_hub(tmp_path):
    torch.manual_seed(0)
    model = MLP(4, [8], 3, activation="tanh")
    (tmp_path / "kept.txt").write_text("mine")
    card = Card(
        "me/net", {"val_accuracy": 0.875, "val_loss": float("nan"), "loss": 0.5}, "tabular-classification", "csv"
    )
    files = save_hub(model, tmp_path, card)
    assert {file.name for file in files} == {"config.json", "model.safetensors", "README.md"}
    again = rebuild_model(json.loads((tmp_path / "config.json").read_text())["model"])
    again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    x = torch.rand(2, 4)
    assert torch.equal(again(x), model(x))
    results = metadata(tmp_path)["model-index"][0]["results"][0]
    assert {one["name"]: one["value"] for one in results["metrics"]} == {"val_accuracy": 0.875}


def test_the_card_is_read_by_the_hub_library(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    save_hub(MLP(4, [8], 3), tmp_path, Card("me/net", {"val_accuracy": 0.875}, "tabular-classification", "csv"))
    card = hub.ModelCard.load(tmp_path / "README.md")
    found = card.data.eval_results[0]
    assert (found.metric_type, found.metric_value, found.dataset_type) == ("accuracy", 0.875, "csv")
    assert found.task_type == "tabular-classification"


def test_a_hugging_face_model_with_its_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=3, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    folder = tmp_path / "hub"
    save_hub(model, folder, Card("me/lm", {"val_loss": 1.5}), tmp_path / "tokenizer.json")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    ids = torch.tensor([[0, 1, 2]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    made = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert made("a b a")["input_ids"] == [0, 1, 0]
    assert metadata(folder)["library_name"] == "transformers"
    assert "GPT2LMHeadModel" in (folder / "README.md").read_text()


@pytest.fixture
def run(tmp_path):
    """A finished run made in Python."""
    data = torch.rand(20, 4), torch.arange(20) % 3
    settings = {"epochs": 1, "device": "cpu"}
    Trainer(MLP(4, [8], 3), data, data, config=settings, output_dir=tmp_path / "run", progress=False).train()
    return tmp_path / "run"


def test_runs_made_in_python(run):
    (path,) = export_run(run, "state_dict").files
    assert path == run / "export" / "state_dict" / "model.safetensors"
    MLP(4, [8], 3).load_state_dict(load_file(path), strict=True)
    export_run(run, "hub", out=run.parent / "hub")
    numbers = json.loads((run / "result.json").read_text())["metrics"]
    found = metadata(run.parent / "hub")["model-index"][0]["results"][0]["metrics"]
    expected = {name: value for name, value in numbers.items() if name.startswith("val_")}
    assert {one["name"]: one["value"] for one in found} == expected != {}
    with pytest.raises(ConfigError, match="tensorflow"):
        export_run(run, "tensorflow")


def test_tied_weights_of_a_run(tmp_path):
    model = CausalTransformerLM(13, d_model=8, n_layers=1, n_heads=2)
    data = TensorData({"input_ids": torch.arange(120).view(12, 10) % 13})
    settings = {"epochs": 1, "device": "cpu"}
    Trainer(model, data, config=settings, output_dir=tmp_path / "run", progress=False).train()
    (path,) = export_run(tmp_path / "run", "state_dict", out=tmp_path / "out").files
    fresh = CausalTransformerLM(13, d_model=8, n_layers=1, n_heads=2)
    fresh.load_state_dict(load_file(path), strict=True)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_folder_that_cannot_be_made(run):
    (run.parent / "file").write_text("")
    with pytest.raises(EtudeError, match="file"):
        export_run(run, "state_dict", out=run.parent / "file" / "inside")


class Seeded(nn.Module):
    """Its frozen part is the same in every process, as pretrained weights are."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.frozen, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        nn.init.constant_(self.frozen.weight, 0.5)
        nn.init.zeros_(self.frozen.bias)

    def forward(self, x):
        return self.head(self.frozen(x))


@pytest.mark.parametrize("trainable_only", [True, False, None])
def test_frozen_weights_are_in_the_file(tmp_path, trainable_only):
    data = torch.rand(20, 4), torch.arange(20) % 3
    settings = {"epochs": 1, "device": "cpu", "freeze": ["frozen"], "trainable_only": trainable_only}
    trainer = Trainer(Seeded(8), data, config=settings, output_dir=tmp_path / "run", progress=False)
    trainer.train()
    (path,) = export_run(tmp_path / "run", "state_dict").files
    found = load_file(path)
    assert all(torch.equal(value, found[name]) for name, value in trainer.model.state_dict().items())


BATCH = torch.rand(4, 4)
WRITERS = {
    "weights": lambda folder: save_weights(MLP(4, [64], 3), folder / "model.safetensors"),
    "program": lambda folder: save_program(MLP(4, [64], 3), BATCH, folder / "model.pt2").path,
    "hub": lambda folder: save_hub(MLP(4, [64], 3), folder, Card("mine", {}))[-1],
}


@pytest.fixture
def small_files():
    """Files may have 500 bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_functions_make_the_folder_as_the_command_does(writer, tmp_path):
    assert writer(tmp_path / "not" / "there").is_file()


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_functions_say_in_one_line_where_they_cannot_write(writer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=f"{tmp_path}/file.*; choose"):
        writer(tmp_path / "file")


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_functions_on_a_full_disk_leave_no_half_of_a_file(writer, tmp_path, small_files):
    with pytest.raises(RunFolderError, match=f"{tmp_path}/out.*File too large"):
        writer(tmp_path / "out")
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.suffix in (".safetensors", ".pt2")]
