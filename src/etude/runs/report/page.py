"""The page of a report: title, key numbers, charts, config, environment and events, in one file."""

import base64
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.callbacks.progress_lines import duration, metric, number, speed
from etude.core.errors import RunFolderError
from etude.core.files import write_text
from etude.lazy import package_version
from etude.monitor.live import RunStatus
from etude.monitor.pictures import read_picture
from etude.monitor.reading import MEDIA, read_config
from etude.monitor.series import read_all
from etude.runs.comparison import Comparison, compare_runs, environment_of
from etude.runs.filters import plain
from etude.runs.leaves import leaves
from etude.runs.report.chart import COLORS
from etude.runs.report.curves import chart_sections
from etude.runs.report.heat import norm_heatmap
from etude.runs.report.html import block, folded, section, table, text
from etude.runs.report.matrices import matrix_section
from etude.runs.tables import progress

MARK = '<meta name="generator" content="etude report">'
_FILES = Path(__file__).parent
_SAMPLES, _MOST_SAMPLE_CHARS, _MOST_TEXTS = "samples.txt", 20_000, 5
_MOST_PICTURE_BYTES = 800_000
"""Bytes of all pictures in a report; as text they are a third more."""
_MOST_EVENTS = 200
_MANY_ROWS = 16
"""Metrics from which their table is folded."""


def write_report(paths: Sequence[Path], out: Path) -> int:
    """Write a report of runs to a file and return its bytes; other files than reports are not replaced."""
    try:
        if out.exists() and MARK not in out.read_bytes()[:2000].decode(errors="replace"):
            raise RunFolderError(f"{out} exists and is no report; choose another --out")
        page = report(paths)
        write_text(out, page)
    except OSError as error:
        if isinstance(error, RunFolderError):
            raise
        raise RunFolderError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error
    return len(page.encode())


def report(paths: Sequence[Path]) -> str:
    """Return the page about some runs."""
    found = compare_runs(paths, at_least=1)
    single = found.statuses[0] if len(paths) == 1 else None
    title = single.name if single is not None else f"{len(paths)} runs"
    parts = [
        _header(title, found),
        _tiles(single, found) if single is not None else _overview(found),
        *chart_sections(found.runs, found.names),
        _metric_table(found),
        *(_details(found, place) for place in range(len(paths))),
        _differences(found) if single is None else "",
        section("Config", *(_settings(found, place, leaves(read_config(path))) for place, path in enumerate(paths))),
        section("Environment", *(_settings(found, place, environment_of(path)) for place, path in enumerate(paths))),
        section("Events", *(_events(found, place) for place in range(len(paths)))),
    ]
    return _document(title, "\n".join(part for part in parts if part))


def _document(title: str, body: str) -> str:
    style = (_FILES / "report.css").read_text(encoding="utf-8")
    script = (_FILES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _header(title: str, found: Comparison) -> str:
    made = time.strftime("%Y-%m-%d %H:%M")
    paths = ", ".join(text(run.path) for run in found.statuses[:6])
    return (
        f"<header><h1>{text(title)}</h1><p class='muted'>{paths} · made by etude {text(package_version())} "
        f"on {made}</p></header>"
    )


def _tiles(status: RunStatus, found: Comparison) -> str:
    start = _start(found, 0)
    judge = status.monitor
    tiles = [
        (
            "state",
            f'<span class="state {text(status.state)}">{text(status.state)}</span>',
            "" if status.message == status.state else status.message,
        ),
        (f"best {judge}", *_judged(judge, status.best)),
        (f"last {judge}", *_judged(judge, status.last)),
        ("progress", text(progress(status)), f"step {status.step:,}"),
        ("duration", duration(status.duration_s), _when(status.started)),
        ("parameters", _count(start.get("parameters")), f"{_count(start.get('trainable'))} trained"),
        ("speed", next((words for name, words in speed(status.metrics) if not name), ""), ""),
        ("device", text(start.get("device") or "", 30), ""),
        ("resumes", str(status.resumes) if status.resumes else "", ""),
    ]
    shown = [
        f'<div class="tile"><span class="muted">{text(name)}</span><b>{value}</b>'
        f'<span class="muted">{text(more, 120)}</span></div>'
        for name, value, more in tiles
        if value
    ]
    return f'<div class="tiles">{"".join(shown)}</div>'


def _judged(name: str, one: dict[str, Any] | None) -> tuple[str, str]:
    if not one:
        return "", ""
    value, epoch = one.get("value"), one.get("epoch")
    shown = metric(name, value if isinstance(value, (int, float)) else None)
    return text(shown), f"epoch {epoch}, step {_count(one.get('step'))}"


def _overview(found: Comparison) -> str:
    rows = [
        [
            f'<span class="key c{place % COLORS}">{text(name)}</span>',
            f'<span class="state {text(run.state)}">{text(run.state)}</span>',
            text(progress(run)),
            text(_judged(run.monitor, run.best)[0]),
            text(_judged(run.monitor, run.last)[0]),
            duration(run.duration_s),
            text(_when(run.started)),
        ]
        for place, (name, run) in enumerate(zip(found.names, found.statuses, strict=True))
    ]
    judge = f" {text(found.monitor)}" if found.monitor else ""
    head = ["run", "state", "progress", f"best{judge}", f"last{judge}", "duration", "started"]
    return section("Runs", table(head, rows))


def _metric_table(found: Comparison) -> str:
    rows = []
    for row in found.metrics:
        cells = [text(row.name)]
        for place, (last, best) in enumerate(zip(row.last, row.best, strict=True)):
            mark = "★ " if place == row.winner else ""
            cells += [
                text(number(last)) if last is not None else "",
                mark + text(number(best)) if best is not None else "",
            ]
        rows.append(cells)
    head = ["metric"]
    for name in found.names:
        run = f"{text(name)} " if len(found.names) > 1 else ""
        head += [f"{run}last", f"{run}best"]
    whole = table(head, rows) if rows else ""
    return section("Final metrics", folded(f"{len(rows)} metrics", whole) if len(rows) > _MANY_ROWS else whole)


def _details(found: Comparison, place: int) -> str:
    """Return what only one run has: its gradient norms, matrices and texts."""
    path = found.statuses[place].path
    media = read_all(path / MEDIA)
    matrices = {str(one.get("name")): one for one in media if one.get("media") == "matrix"}
    parts = [norm_heatmap(found.runs[place])]
    parts += [matrix_section(name, one.get("step"), one.get("data")) for name, one in matrices.items()]
    texts = [one for one in media if one.get("media") == "text"][-_MOST_TEXTS:]
    parts += [
        f"<h3>{text(one.get('name'))} <span class='muted'>step {text(one.get('step'))}</span></h3>"
        f"<pre>{block(str(one.get('data')), _MOST_SAMPLE_CHARS // 4)}</pre>"
        for one in texts
    ]
    parts.append(_samples(path / _SAMPLES))
    pictures = {str(one.get("name")): one for one in media if one.get("media") == "image"}
    parts += _pictures(path, pictures.values(), _MOST_PICTURE_BYTES // len(found.names))
    name = f": {found.names[place]}" if len(found.names) > 1 else ""
    return section(f"Details{name}", *parts)


def _pictures(run: Path, pictures: Iterable[dict[str, Any]], left: int) -> Iterator[str]:
    """Yield pictures, up to so many bytes; of the others where they are."""
    for one in pictures:
        title, file = (
            f"{text(one.get('name'))} <span class='muted'>step {text(one.get('step'))}</span>",
            str(one.get("data")),
        )
        if (found := read_picture(run, file, left)) is None:
            yield f"<h3>{title}</h3><p class='muted'>in the run folder: {text(file)}</p>"
            continue
        data, kind = found
        left -= len(data)
        source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        yield f'<h3>{title}</h3><img class="picture" src="{source}" alt="{text(one.get("name"))}">'


def _samples(path: Path) -> str:
    try:
        with path.open("rb") as file:
            words = file.read(2 * _MOST_SAMPLE_CHARS).decode(errors="replace")
    except OSError:
        return ""
    return f"<h3>samples.txt</h3><pre>{block(words, _MOST_SAMPLE_CHARS)}</pre>"


def _differences(found: Comparison) -> str:
    head = ["", *map(text, found.names)]
    tables = [
        f"<h3>{title}</h3>"
        + table(head, [[text(key), *(text(plain(one)) for one in values)] for key, values in rows])
        for title, rows in (("config", found.config), ("environment", found.environment))
        if rows
    ]
    return section("Differences", *tables)


def _settings(found: Comparison, place: int, settings: Mapping[str, Any]) -> str:
    rows = [[text(key), text(plain(value))] for key, value in settings.items()]
    return folded(f"{found.names[place]}: {len(rows)} keys", table(["", ""], rows)) if rows else ""


def _events(found: Comparison, place: int) -> str:
    events = [one for one in found.runs[place].events if one.get("kind") != "checkpoint"]
    rows = [
        [
            text(_when(one.get("time"))),
            text(one.get("step", "")),
            text(one.get("kind", "")),
            text(one.get("message", "")),
        ]
        for one in events[-_MOST_EVENTS:]
    ]
    words = f"{found.names[place]}: {len(events)} events without checkpoints"
    words += f", the last {_MOST_EVENTS}" if len(events) > _MOST_EVENTS else ""
    return folded(words, table(["time", "step", "kind", "message"], rows)) if rows else ""


def _start(found: Comparison, place: int) -> dict[str, Any]:
    starts = [one for one in found.runs[place].events if one.get("kind") in ("start", "resume")]
    return starts[-1] if starts else {}


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and value else ""


def _when(seconds: Any) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
    except (TypeError, ValueError, OverflowError, OSError):
        return ""
