"""A folder for the Hugging Face Hub: config.json, model.safetensors, README.md, and the tokenizer if there is one."""

import json
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from etude.config import dump_yaml
from etude.core import ConfigError
from etude.core.files import write_text
from etude.core.model_record import model_record
from etude.export.weights import save_weights, writing_into
from etude.lazy import package_version

logger = logging.getLogger("etude")


@runtime_checkable
class SavesItself(Protocol):
    """A Hugging Face model."""

    config: Any

    def save_pretrained(self, save_directory: str) -> Any:
        """Write config.json and the weights."""


@dataclass(slots=True)
class Card:
    """What a README says about a model."""

    name: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    task: str = "other"
    """The Hub's name of the task, such as image-classification."""
    dataset: str = "unknown"
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further contents of config.json: the section of the model, class names, means …"""
    transformers_class: str = ""
    """The class of a Hugging Face model."""

    def text(self) -> str:
        """Return the README: metadata with the metrics as a model index, and a table of them.

        They are the metrics of the validation; without one, all that are known.
        """
        numbers = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        validation = {name: value for name, value in numbers.items() if name.startswith("val_")}
        numbers = validation or numbers
        library = "transformers" if self.transformers_class else "etude"
        about: dict[str, Any] = {"library_name": library, "tags": ["etude", "pytorch"]}
        if self.task != "other":
            about["pipeline_tag"] = self.task
        if numbers:
            metrics = [
                {"type": name.removeprefix("val_"), "name": name, "value": value} for name, value in numbers.items()
            ]
            dataset = {"type": self.dataset, "name": self.dataset}
            result = {"task": {"type": self.task}, "dataset": dataset, "metrics": metrics}
            about["model-index"] = [{"name": self.name, "results": [result]}]
        rows = [f"| {name} | {value:.6g} |" for name, value in numbers.items()]
        table = ["| metric | value |", "|---|---|", *rows, ""] if rows else []
        use = (
            _USE_PLAIN if not self.transformers_class else _USE_TRANSFORMERS.replace("CLASS", self.transformers_class)
        )
        return "\n".join(["---", dump_yaml(about).strip(), "---", "", f"# {self.name}", "", *table, use])


_MARK = "Trained with [etude]"
_USE_PLAIN = """Trained with [etude](https://pypi.org/project/etude/). `config.json` says how the model was built.

```python
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"))
```
"""
_USE_TRANSFORMERS = """Trained with [etude](https://pypi.org/project/etude/).

```python
from transformers import CLASS

model = CLASS.from_pretrained("path/of/this/folder")
```
"""


def save_hub(model: nn.Module, folder: str | Path, card: Card, tokenizer: str | Path | None = None) -> list[Path]:
    """Write the files of a model repository and return their paths; other files of the folder stay.

    A Hugging Face model writes its own config and weights with `save_pretrained`, and its tokenizer is written in
    transformers' form. `tokenizer` is a tokenizer.json, or a folder with the files of a tokenizer. Raises ConfigError
    if the folder has a README.md or config.json that no export has written.
    """
    folder = Path(folder)
    with writing_into(folder):
        for name, mark in (("README.md", _MARK), ("config.json", '"architectures"')):
            if (folder / name).is_file() and mark not in (folder / name).read_text(errors="replace"):
                raise ConfigError(f"{folder / name} is not of a model repository; choose a folder without it")
        before = _files(folder)
        _write(model, folder, card, tokenizer)
        return sorted(path for path, version in _files(folder).items() if before.get(path) != version)


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the files of a folder with what changes when one is written."""
    found = {path: path.stat() for path in folder.iterdir() if path.is_file()}
    return {path: (facts.st_ino, facts.st_mtime_ns) for path, facts in found.items()}


def _write(model: nn.Module, folder: Path, card: Card, tokenizer: str | Path | None) -> None:
    if isinstance(model, SavesItself):
        card.transformers_class = type(model).__name__
        if names := card.details.get("id2label"):
            model.config.id2label, model.config.label2id = dict(names), {name: place for place, name in names.items()}
        model.save_pretrained(str(folder))
        original = Path(str(getattr(model, "name_or_path", "") or ""))
        tokenizer = original if tokenizer is None and (original / "tokenizer_config.json").is_file() else tokenizer
    else:
        content = {
            "architectures": [type(model).__name__],
            "library_name": "etude",
            "etude_version": package_version(),
            "model": model_record(model),
            **card.details,
        }
        write_text(folder / "config.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        save_weights(model, folder / "model.safetensors")
    if tokenizer is not None and Path(tokenizer).exists():
        _save_tokenizer(Path(tokenizer), folder, in_their_form=bool(card.transformers_class))
    elif tokenizer is not None:
        logger.warning("the tokenizer %s does not exist any more: not exported", tokenizer)
    write_text(folder / "README.md", card.text())


def _save_tokenizer(source: Path, folder: Path, *, in_their_form: bool) -> None:
    if in_their_form:
        import transformers as library

        transformers: Any = library  # without type hints
        if source.is_dir():
            made = transformers.AutoTokenizer.from_pretrained(str(source), local_files_only=True)
        else:
            made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source))
        made.save_pretrained(str(folder))
    else:
        shutil.copyfile(source / "tokenizer.json" if source.is_dir() else source, folder / "tokenizer.json")
