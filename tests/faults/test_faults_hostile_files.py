"""No file runs code when it is read, whatever is in it; only modules that a config imports do, and they are named."""

import ast
import contextlib
import hashlib
import io
import json
import logging
import os
import pickle
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from etude import Trainer
from etude.checkpoint.store import FileRecord, render_manifest
from etude.core.errors import EtudeError
from etude.data import open_tokens, read_dataset
from etude.data.text.tokenizer import load_tokenizer as load_text_tokenizer
from etude.experiment import evaluate_run, load_config, resume_run
from etude.models import huggingface_causal_lm
from etude.multimodal import load_codebook, load_tokenizer
from etude.multimodal.vocab import VocabSpec

ROOT = Path(__file__).parents[2]


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def saved(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def objects(mark):
    return np.array([Bomb(mark)], dtype=object)


FORMS = {
    "pickle 2": lambda mark: pickle.dumps(Bomb(mark), 2),
    "pickle 5": lambda mark: pickle.dumps({"weight": Bomb(mark)}, 5),
    "joblib": lambda mark: zlib.compress(pickle.dumps(Bomb(mark))),
    "torch.save": lambda mark: saved(lambda file: torch.save(Bomb(mark), file)),
    "old torch.save": lambda mark: saved(
        lambda file: torch.save(Bomb(mark), file, _use_new_zipfile_serialization=False)
    ),
    "npy": lambda mark: saved(lambda file: np.save(file, objects(mark), allow_pickle=True)),
    "npz": lambda mark: saved(lambda file: np.savez(file, centroids=objects(mark))),
    "yaml": lambda mark: f"!!python/object/apply:os.mkdir [{json.dumps(str(mark))}]\n".encode(),
    "python": lambda mark: f"import os\nos.mkdir({str(mark)!r})\n".encode(),
}


@pytest.fixture
def mark(tmp_path):
    path = tmp_path / "it-ran"
    yield path
    assert not path.exists()


def refused(read):
    """Read something hostile: an error in our own words, or nothing of it was looked at."""
    with contextlib.suppress(EtudeError, ValueError):
        read()


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ("pickle 2", pickle.loads),
        ("pickle 5", pickle.loads),
        ("joblib", lambda raw: pickle.loads(zlib.decompress(raw))),
        ("torch.save", lambda raw: torch.load(io.BytesIO(raw), weights_only=False)),
        ("old torch.save", lambda raw: torch.load(io.BytesIO(raw), weights_only=False)),
        ("npy", lambda raw: np.load(io.BytesIO(raw), allow_pickle=True)),
        ("npz", lambda raw: np.load(io.BytesIO(raw), allow_pickle=True)["centroids"]),
        ("yaml", yaml.unsafe_load),
        ("python", exec),
    ],
)
def test_each_form_does_run_where_it_is_trusted(tmp_path, form, read):
    """Guards the tests below."""
    read(FORMS[form](tmp_path / "ran"))
    assert (tmp_path / "ran").is_dir()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    trainer(folder / "run").train()
    return folder / "run"


def trainer(folder=None):
    data = torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)
    config = {"epochs": 1, "batch_size": 4, "device": "cpu"}
    return Trainer(nn.Linear(3, 2), data, config=config, output_dir=folder, progress=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "meta.json"])
def test_checkpoints(finished, tmp_path, mark, name, form):
    """With the right checksums: who writes a hostile file can also compute them."""
    (last,) = {path.resolve() for path in (finished / "checkpoints").glob("step-*")}
    folder = tmp_path / last.name
    folder.mkdir()
    for one in last.iterdir():
        (folder / one.name).write_bytes(FORMS[form](mark) if one.name == name else one.read_bytes())
    contents = {one.name: one.read_bytes() for one in folder.iterdir() if one.name != "manifest.json"}
    records = {one: FileRecord(len(raw), hashlib.sha256(raw).hexdigest()) for one, raw in contents.items()}
    (folder / "manifest.json").write_bytes(render_manifest(records))
    with pytest.raises(EtudeError):
        trainer().load_checkpoint(folder)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read", [resume_run, evaluate_run, lambda folder: load_config(folder / "config.yaml")])
def test_run_folders(tmp_path, mark, read, form):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "result.json", "env.json"):
        (run / name).write_bytes(FORMS[form](mark))
    with pytest.raises(EtudeError):
        read(run)
    (run / "config.yaml").write_text("model: mlp\ndata: {name: mnist, download: false}\n")
    with pytest.raises(EtudeError):
        read(run) if read in (resume_run, evaluate_run) else load_config(run / "events.jsonl")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", ["bin", "npy", "npz", "pt", "pkl", "joblib", "safetensors", "json"])
def test_token_files_codebooks_tokenizers_and_vocabularies(tmp_path, mark, suffix, form):
    path = tmp_path / f"train.{suffix}"
    path.write_bytes(FORMS[form](mark))
    (tmp_path / "dataset.json").write_bytes(FORMS[form](mark))
    readers = (
        open_tokens,
        lambda path: next(read_dataset(path.parent, "train"), None),
        load_codebook,
        load_tokenizer,
        load_text_tokenizer,
        VocabSpec.load,
    )
    for read in readers:
        refused(lambda read=read: read(path))


def test_folders_of_hugging_face_weights(tmp_path, mark):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "auto_map": {"AutoModelForCausalLM": "own.Model"}, "n_layer": 1})
    )
    (tmp_path / "own.py").write_bytes(FORMS["python"](mark))
    (tmp_path / "pytorch_model.bin").write_bytes(FORMS["torch.save"](mark))
    with pytest.raises(EtudeError):
        huggingface_causal_lm(pretrained=str(tmp_path))


@pytest.mark.parametrize("read", [resume_run, evaluate_run])
@pytest.mark.parametrize("dotted", [False, True])
def test_what_a_run_folder_imports_is_named_before_it_runs(tmp_path, monkeypatch, caplog, read, dotted):
    module = f"own_{read.__name__}_{dotted}"
    run = tmp_path / "run"
    run.mkdir()
    code = 'import logging\nlogging.getLogger("etude").warning("it runs now")\n'
    (run / f"{module}.py").write_text(code)
    (run / "config.yaml").write_text(f"imports: [{module if dotted else f'./{module}.py'}]\nmodel: nonsense\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with caplog.at_level(logging.WARNING, "etude"), pytest.raises(EtudeError, match="nonsense"):
        read(run)
    said, ran = [record.getMessage() for record in caplog.records]
    assert (module if dotted else str(run / f"{module}.py")) in said
    assert "config.yaml" in said
    assert ran == "it runs now"
    with pytest.raises(EtudeError):
        read(run)
    assert len(caplog.records) == 2  # imported already: nothing runs, nothing is said
    with pytest.raises(EtudeError):
        load_config(run / "config.yaml")
    del sys.modules[module]


# ------------------------------------------------------------------------------------------------ the source itself

ALLOWED = {
    "import_module": {
        "config/imports.py",
        "config/registry.py",
        "lazy.py",
        "cli/main.py",
        "core/model_record.py",
        "callbacks/sinks/base.py",
    }
    | {"metrics/adapters.py", "data/tokens/schema.py", "multitask/weighting/torchjd_adapter.py"},
    "exec": {"eject/ejection.py"},
    "exec_module": {"config/imports.py"},
    "spec_from_file_location": {"config/imports.py"},
    "Popen": {"monitor/environment.py", "sweep/launch.py"},
    "subprocess.run": {"data/catalog/download.py", "monitor/environment.py", "findings.py"},
}
"""Calls that run other code, and where they may stand: a config's imports, our own modules, programs we name,
and the text that `etude eject` has just written from our own source."""
NEVER = {"eval", "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "yaml.load"}
NEVER |= {
    "yaml.full_load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "extractall",
    "runpy.run_path",
    "marshal.loads",
}
NEVER |= {"shelve.open", "__import__"}
OPTIONS = {("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False), ("shell", True)}


MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy"}
"""Nothing of these is imported, so that none of their functions can stand under another name."""
IMPORTS = {"multimodal/joblib_files.py": {"pickle"}}
"""Where one of them is: its unpickler, for which every name is inert."""


def calls_of(tree):
    """Yield the names of what is called, `a.b.c` also as `b.c` and `c`, and the arguments that are constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            parts = name.removeprefix("safetensors.torch.").split(".")
            names = {".".join(parts[place:]) for place in range(len(parts))}
            if len(parts) > 1:
                names -= {"eval", "exec"}  # model.eval()
            yield names, {(one.arg, one.value.value) for one in node.keywords if isinstance(one.value, ast.Constant)}


def imports_of(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults_of(tree, where):
    for names, options in calls_of(tree):
        yield from names & NEVER
        yield from (one for one in names & ALLOWED.keys() if not any(where.endswith(end) for end in ALLOWED[one]))
        yield from (f"{key}={value}" for key, value in options & OPTIONS)
    yield from set(imports_of(tree)) & (MODULES | NEVER) - IMPORTS.get(where, set())


@pytest.mark.parametrize("place", ["src/etude", "experiments"])
def test_nothing_in_the_source_loads_code_in_another_way(place):
    files = {file.relative_to(ROOT / place).as_posix(): file for file in sorted((ROOT / place).rglob("*.py"))}
    files = {where: file for where, file in files.items() if "tests" not in file.parts[len(ROOT.parts) :]}
    assert len(files) > 10
    found = [
        f"{where}: {one}" for where, file in files.items() for one in faults_of(ast.parse(file.read_text()), where)
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(f)",
        "load(f, weights_only=False)",
        "exec(code)",
        "importlib.import_module(name)",
        "yaml.load(f, Loader)",
        "subprocess.run(c, shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(code):
    assert list(faults_of(ast.parse(code), "x.py"))
    assert not list(faults_of(ast.parse("model.eval(); safetensors.torch.load(raw); yaml.safe_load(f)"), "x.py"))
