"""One task of several by itself: the sections of an experiment that trains only that one."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from etude.config import Selection
from etude.config.signature import parameters_of
from etude.data import DataSplits, Streams, make_loader
from etude.multitask.sections import TaskSection, TaskVariant, variants_of
from etude.multitask.spec import TaskSpec, learns_from


def sections_of_one(sections: Mapping[str, Any], task: str, splits: DataSplits) -> dict[str, Any]:
    """Return the sections with one task, without variants and with its own streams; no weighting, phase or callback."""
    section: TaskSection = sections["tasks"][task]
    main = next(variants_of(task, section))
    vocabulary = splits.vocab_size  # of all streams: the models are to be of the same size
    head = _with_vocabulary(main.head, vocabulary)
    kept = {key: value for key, value in sections.items() if key not in ("weighting", "curriculum", "callbacks")}
    return kept | {
        "tasks": {task: section.model_copy(update={"variants": {}, "weight": 1.0, "head": head})},
        "model": _with_vocabulary(sections["model"], vocabulary),
        "data": _data_of(main, sections.get("data"), splits),
    }


def stream_of(task: str, section: TaskSection) -> str | None:
    """Return the stream that a task learns from without variants; None if it learns from any."""
    return next(variants_of(task, section)).stream


def _data_of(variant: TaskVariant, data: Selection | None, splits: DataSplits) -> Selection | None:
    """Return the data section with only the streams that a task reads."""
    if isinstance(variant.data, Selection):
        return None
    if data is None or data.component.name != "streams":
        return data
    streams = data.arguments["streams"]
    read = (variant.data,) if variant.data is not None else _streams_read(variant, splits, streams)
    arguments: dict[str, Any] = {"streams": {name: streams[name] for name in read}}
    if len(read) > 1:
        arguments |= {key: data.arguments[key] for key in ("draw", "weights") if key in data.arguments}
        if (weights := arguments.get("weights")) is not None:
            arguments["weights"] = {name: weights[name] for name in read}
    return Selection(data.component, arguments, {})


def _streams_read(variant: TaskVariant, splits: DataSplits, known: Iterable[str]) -> tuple[str, ...]:
    """Return the streams whose batches have the labels of a task that names no stream."""
    assert isinstance(splits.train, Streams)
    parts = {name: part for name, part in splits.train.parts.items() if name in known}
    spec = TaskSpec(variant.head_name, labels=variant.labels)
    firsts = {name: next(iter(make_loader(Streams({name: part}), 1))) for name, part in parts.items()}
    return tuple(name for name, batch in firsts.items() if learns_from(variant.task, spec, batch))


def _with_vocabulary(selection: Selection, vocab_size: int | None) -> Selection:
    takes = "vocab_size" in parameters_of(selection.component.factory)[0]
    if not takes or vocab_size is None or selection.arguments.get("vocab_size") is not None:
        return selection
    return replace(selection, arguments={**selection.arguments, "vocab_size": vocab_size})
