"""The report: one page that opens anywhere, with everything escaped."""

import base64
import json
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, strategies as st

from etude.core import RunFolderError
from etude.monitor.series import Series
from etude.runs.report import write_report
from etude.runs.report.chart import Line, Marks, chart, nice_ticks
from etude.runs.report.heat import picture
from etude.runs.report.page import report
from made_runs import lines, make_run

EVIL = "</script><img src=x onerror=alert(1)>\"'&<b>"


class Page(HTMLParser):
    """Collects tags, attributes and texts, and checks that every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):  # they have no end
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def pieces(text):
    """Return the charts, each of which must be well-formed."""
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def coordinates(path):
    return [tuple(map(float, pair.split())) for pair in re.findall(r"[ML]([-\d.]+ [-\d.]+)", path)]


@pytest.fixture
def full(tmp_path):
    """A run with everything that a report shows."""
    losses = [5.0 - place / 10 for place in range(40)]
    extra = {"quality/loss": 1.0, "grad_norm/fc1": 0.5, "grad_norm/fc2": 2.0, "tokens_per_s": 100.0}
    run = make_run(tmp_path / "full", losses, per_epoch=10, extra=extra)
    events = [
        {"kind": "phase", "step": 0, "phase": "one", "time": 1.0},
        {"kind": "phase", "step": 20, "phase": "two", "time": 2.0},
        {"kind": "resume", "step": 30, "time": 3.0, "resumed": True},
        {"kind": "checkpoint", "step": 10, "time": 3.0, "path": "x"},
        {"kind": "recovery", "step": 12, "time": 3.0, "skipped": 2, "message": "2 updates not finite and skipped"},
    ]
    lines(run / "events.jsonl", events)
    matrix = {"classes": ["cat", "dog", "cow"], "matrix": [[8, 2, 0], [0, 9, 1], [4, 0, 6]]}
    media = [{"kind": "media", "media": "matrix", "name": "confusion", "step": 40, "data": matrix}]
    media.append({"kind": "media", "media": "text", "name": "story", "step": 40, "data": "once\nupon"})
    lines(run / "media.jsonl", media)
    (run / "samples.txt").write_text("│ a sample\n")
    return run


def test_everything_is_on_the_page(full):
    text = report([full])
    page = Page(text)
    words = " ".join(page.words)
    for expected in (
        "toy",
        "finished",
        "val_loss",
        "once\nupon",
        "a sample",
        "optimizer.lr",
        "versions.torch",
        "most confused",
    ):
        assert expected in words
    charts = {one.get("aria-label"): one for one in pieces(text)}
    assert {"loss", "quality/loss", "lr", "tokens_per_s", "gradient norm by layer"} <= charts.keys()
    loss = charts["loss"]
    kinds = [one.get("class") for one in loss.iter()]
    assert [kinds.count(kind) for kind in ("phase", "phase odd", "resume", "saved", "skipped")] == [1, 1, 1, 1, 1]
    cells = [attrs for tag, attrs in page.tags if tag == "td" and "style" in attrs]
    assert [cell["style"] for cell in cells[:3]] == ["--s:0.800", "--s:0.200", "--s:0.000"]


def test_the_page_needs_nothing_else(full):
    text = report([full])
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    for tag, attrs in Page(text).tags:
        assert tag not in ("link", "iframe", "object", "base")
        assert not any(name.startswith("on") for name in attrs)
        assert all(attrs[name].startswith("data:image/png;base64,") for name in ("src", "href") if name in attrs)


def test_the_script_is_the_one_that_the_page_allows(full):
    import hashlib

    text = report([full])
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert text.count("<script") == 1


def test_hostile_names_stay_text(tmp_path):
    run = make_run(
        tmp_path / "evil",
        extra={EVIL: 1.0, f"{EVIL}/loss": 2.0, f"grad_norm/{EVIL}": 3.0},
        config={"name": EVIL, EVIL: EVIL},
    )
    lines(
        run / "events.jsonl",
        [{"kind": "phase", "step": 0, "phase": EVIL * 9, "time": 1.0}, {"kind": EVIL, "message": EVIL, "step": EVIL}],
    )
    bad = [
        {"classes": [EVIL] * 3, "matrix": [[1, 2, 0]] * 3},
        {"matrix": EVIL},
        {"matrix": [[1, 2]]},
        EVIL,
        None,
        {"matrix": [[float("1e400")]]},
    ]
    lines(
        run / "media.jsonl",
        [{"media": "matrix", "name": f"{EVIL}{place}", "step": EVIL, "data": one} for place, one in enumerate(bad)],
    )
    lines(run / "media.jsonl", [{"media": kind, "name": EVIL, "data": EVIL} for kind in ("text", "image")])
    (run / "samples.txt").write_text(EVIL + "\x00\x1b[2J")
    (run / "env.json").write_text(json.dumps({EVIL: EVIL}))
    for paths in ([run], [run, make_run(tmp_path / "other")]):
        text = report(paths)
        page = Page(text)
        tags = {tag for tag, _ in page.tags}
        assert not tags & {"img", "b>"}
        assert sum(tag == "script" for tag, _ in page.tags) == 1
        assert EVIL in " ".join(page.words)
        assert "\x00" not in text
        assert "\x1b" not in text
        pieces(text)


def test_several_runs_have_a_colour_each_and_their_differences(tmp_path):
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", [1.0, 0.2], config={"optimizer": {"name": "sgd", "lr": 0.1}})
    text = report([one, two])
    loss = next(svg for svg in pieces(text) if svg.get("aria-label") == "loss")
    curves = [one.get("class") for one in loss.iter() if one.get("data-points")]
    assert curves == ["line c0 faint", "line c0", "line c1 faint", "line c1"]
    words = " ".join(Page(text).words)
    assert "optimizer.name" in words.partition("Differences")[2].partition("Config")[0]


@pytest.mark.parametrize(
    "options",
    [
        {"losses": []},
        {"losses": [None] * 4},
        {"losses": [1.0]},
        {"state": "running"},
        {"state": "lost", "beat_age_s": 99},
    ],
)
def test_unfinished_and_empty_runs(tmp_path, options):
    run = make_run(tmp_path / "run", **options)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "spl')
    text = report([run])
    Page(text)
    pieces(text)
    assert "NaN" not in text
    assert ">nan<" not in text or options["losses"] == [None] * 4


def test_a_long_run_is_small_and_keeps_its_spike(tmp_path):
    losses = [1.0] * 20_000
    losses[13_337] = 50.0
    losses[3_000] = -20.0
    run = make_run(tmp_path / "long", losses, per_epoch=20_000)
    out = tmp_path / "report.html"
    assert write_report([run], out) == out.stat().st_size < 2_000_000
    svg = next(svg for svg in pieces(out.read_text()) if svg.get("aria-label") == "loss")
    band = next(one.get("d") for one in svg.iter() if (one.get("class") or "").startswith("band"))
    points = coordinates(band)
    (top_x, top), (low_x, low) = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    assert 0.65 < (top_x - 52) / 578 < 0.68
    assert 0.14 < (low_x - 52) / 578 < 0.16
    ones = sorted(y for _, y in points)[len(points) // 2]
    assert (ones - top) / (low - ones) == pytest.approx(49 / 21, rel=0.02)  # as far from the ones as they were


def test_only_reports_are_replaced(tmp_path):
    run, out = make_run(tmp_path / "run"), tmp_path / "mine.html"
    out.write_text("my own page")
    with pytest.raises(RunFolderError, match=r"mine\.html"):
        write_report([run], out)
    assert out.read_text() == "my own page"
    out.unlink()
    for _ in range(2):
        write_report([run], out)
    with pytest.raises(RunFolderError, match="cannot write"):
        write_report([run], tmp_path / "none/report.html")


numbers = st.one_of(st.floats(allow_infinity=False), st.just(0.0), st.just(1e308), st.just(-1e308), st.just(5e-324))


@given(st.lists(st.tuples(st.floats(0, 1e12), numbers), max_size=60), st.booleans(), st.integers(2, 40))
def test_any_curve_is_a_chart(points, small, count):
    x, y = np.array([a for a, _ in points]), np.array([b for _, b in points])
    marks = Marks([(0.0, "a"), (5.0, "b")], [1e9], [2.0], [3.0])
    text = chart("loss", [Line("loss", Series("loss", x, y))], marks, count, small=small)
    if not np.isfinite(y).any():
        assert text == ""
        return
    (svg,) = pieces(text)
    width, height = map(float, svg.get("viewBox").split()[2:])
    for path in (one.get("d") for one in svg.iter() if one.tag == "path"):
        assert all(51 <= a <= width and 0 <= b <= height for a, b in coordinates(path))
    (data,) = [json.loads(one.get("data-points")) for one in svg.iter() if one.get("data-points")]
    assert len(data["x"]) == len(data["y"]) <= max(count, 1)


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.integers(1, 8))
def test_ticks_are_inside(a, b, count):
    low, high = sorted((a, b))
    ticks = nice_ticks(low, high, count)
    assert 1 <= len(ticks) <= 14 or high - low < 1e-6 * max(abs(low), abs(high))
    slack = 1e-6 * max(abs(low), abs(high), 1e-300) + 1e-12
    assert all(low - slack <= tick <= high + slack for tick in ticks)


def test_a_picture_is_a_png_of_its_cells():
    source = picture(np.array([[0.0, 1.0], [np.nan, 0.5]]))
    data = base64.b64decode(source.partition(",")[2])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (2, 2)
    rows = zlib.decompress(data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8])
    pixels = [tuple(rows[row * 9 + 1 + 4 * column :][:4]) for row in range(2) for column in range(2)]
    assert pixels[0] == (68, 1, 84, 255)
    assert pixels[1] == (253, 231, 37, 255)
    assert pixels[2][3] == 0
    assert pixels[3] == (33, 145, 140, 255)


def test_pictures_inside_the_folder_are_embedded_until_the_page_would_be_too_large(tmp_path):
    run = make_run(tmp_path / "run")
    png = b"\x89PNG\r\n\x1a\n"
    files = {
        "a.png": png + b"small",
        "old.png": png + b"old",
        "b.png": png + bytes(500_000),
        "c.png": png + bytes(400_000),
    }
    for name, data in {**files, "d.svg": b"<svg onload='alert(1)'/>", "../out.png": png}.items():
        (run / name).write_bytes(data)
    logged = [("first", "old.png"), ("first", "a.png"), ("b", "b.png"), ("c", "c.png"), ("d", "d.svg")]
    logged += [("e", "../out.png"), ("f", "gone.png"), ("g", str(tmp_path / "elsewhere" / "run" / "a.png"))]
    lines(run / "media.jsonl", [{"media": "image", "step": 1, "name": name, "data": file} for name, file in logged])
    page = report([run])
    found = [attrs for tag, attrs in Page(page).tags if tag == "img" and "picture" in attrs.get("class", "")]
    assert [one["alt"] for one in found] == ["first", "b", "g"]
    data = [base64.b64decode(one["src"].removeprefix("data:image/png;base64,")) for one in found]
    assert data == [files["a.png"], files["b.png"], files["a.png"]]
    assert all(words in page for words in ("c.png", "d.svg", "../out.png", "gone.png"))  # where they are
    assert len(page) < 2e6
