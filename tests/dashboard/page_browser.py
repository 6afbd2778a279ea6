"""A browser for the page of the dashboard, and how tests use it."""

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra dashboard")
CHROMIUM = os.environ.get("ETUDE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("needs Chromium (found by name, or ETUDE_CHROMIUM)", allow_module_level=True)
expect = api.expect
expect.set_options(timeout=20_000)


class Server:
    """The dashboard of a folder, served by a thread."""

    def __init__(self, root: Path, port: int = 0) -> None:
        from etude.dashboard.server import make_app

        app = make_app(root)
        config = uvicorn.Config(app, port=port, log_level="error", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        app.state.dashboard.is_over = lambda: self._server.should_exit
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def at(server: Server, *runs: str, **view: Any) -> str:
    return f"{server.url}#{urlencode([*(('run', run) for run in runs), *view.items()])}"


def open_at(page: Any, server: Server, *runs: str, **view: Any) -> None:
    page.goto(at(server, *runs, **view))
    expect(page.locator("#connection")).to_have_text("live")


def plot(page: Any, name: str = "loss") -> Any:
    """Return the place of a chart's curves, once they are drawn."""
    page.wait_for_selector(f'[data-chart="{name}"] .plot:not(.is-empty) canvas')
    return page.locator(f'[data-chart="{name}"] .u-over')


def hover(page: Any, over: Any, share: float, top: float = 0.5) -> str:
    """Move the mouse to a place and return the tooltip."""
    while (box := over.bounding_box()) is None:  # it is being made again, as for another axis
        over.wait_for()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + top * box["height"])
    tip = page.locator(".tip.is-open")
    expect(tip).to_be_visible()
    return str(tip.inner_text())


def hover_until(page: Any, name: str, share: float, words: str) -> None:
    """Move the mouse until the tooltip matches a pattern."""
    end = time.monotonic() + 15
    while not re.search(words, found := hover(page, plot(page, name), share), re.DOTALL):
        assert time.monotonic() < end, f"{found!r} has no {words}"
        hover(page, plot(page, name), 0.5)


def drag(page: Any, over: Any, start: float, end: float) -> None:
    box = over.bounding_box()
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 64, steps=6)
    page.mouse.up()


def zoom_of(page: Any) -> list[float]:
    """Return the range in the address."""
    page.wait_for_url(re.compile("zoom="))
    return [float(one) for one in re.search(r"zoom=([\d.e+-]+)%7E([\d.e+-]+)", page.url).groups()]


def values(run: Path, name: str) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {one["step"]: one[name] for one in records if name in one and one["split"] != "epoch"}
