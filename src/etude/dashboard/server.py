"""The web server of the dashboard: one application with the page and a JSON API about run folders."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from etude.dashboard.catalogue import Catalogue, Run
from etude.dashboard.details import details, differences
from etude.dashboard.parsing import dumps
from etude.dashboard.security import Guard, refusal
from etude.dashboard.series import AXES
from etude.dashboard.settings import Settings
from etude.dashboard.store import Store
from etude.dashboard.stream import Hub, Subscription, Watch, stream

STATIC = Path(__file__).parent / "static"
MOST_PIXELS = 8192
MOST_BODY_BYTES = 1 << 16
WATCH_S = 0.5


class Dashboard:
    """What the routes share, and the routes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalogue, self.settings, self.hub = Catalogue(root), Settings(root), Hub()
        self.store = Store(on_exact=lambda key: self.hub.send("exact", {"run": key}))
        self.watch = Watch(self.hub, self.catalogue, self.describe)
        self.is_over: Callable[[], bool] = lambda: False
        """Whether open streams are to end."""

    def describe(self, run: Run) -> dict[str, Any]:
        """Return the state of a run, with what a person said about it."""
        return {**run.read(), **self.settings.of(run.key)}

    def find(self, request: Request) -> Run:
        """Return the run that a request names; raises HTTPException."""
        return self.find_all(request)[0]

    def find_all(self, request: Request) -> list[Run]:
        """Return the runs that a request names, at least one."""
        keys = list(dict.fromkeys(request.query_params.getlist("run")))
        if not keys:
            raise HTTPException(400, "name a run, as in ?run=ID")
        found = [self.catalogue.get(key) for key in keys]
        if None in found:
            raise HTTPException(404, f"there is no run {keys[found.index(None)]!r}")
        return [run for run in found if run is not None]

    def runs(self, _request: Request) -> Any:
        """Return all runs."""
        runs = self.catalogue.runs()
        self.settings.give_colors([run.key for run in runs])
        return {"root": str(self.root), "runs": [self.describe(run) for run in runs]}

    def run(self, request: Request) -> Any:
        """Return everything about one run but its metrics."""
        run = self.find(request)
        return {"run": self.describe(run), **details(run)}

    def series(self, request: Request) -> Any:
        """Return points of metrics for charts."""
        query = request.query_params
        names, split, axis = query.getlist("name"), query.get("split", "train"), query.get("x", "step")
        if not names or axis not in AXES:
            raise HTTPException(400, f"name a metric, as in ?name=loss, and x as one of {', '.join(AXES)}")
        start, end = _number(query.get("from"), "from"), _number(query.get("to"), "to")
        pixels = int(min(max(_number(query.get("pixels"), "pixels") or 800, 1), MOST_PIXELS))
        known = [(run.key, self.store.get(run.key, run.path, run.read_facts)) for run in self.find_all(request)]
        self.store.read(known)
        found = [
            {"run": key, **one.answer(split, name, axis, start, end, pixels)} for key, one in known for name in names
        ]
        return {"series": found}

    def diff(self, request: Request) -> Any:
        """Return what differs between runs."""
        return differences(self.find_all(request))

    async def stream(self, request: Request) -> Response:
        """Send what is new."""
        keys, after = request.query_params.getlist("run"), request.query_params.getlist("after")

        def subscriptions() -> list[Subscription]:
            offsets = [int(one) if one.isdecimal() and len(one) < 19 else None for one in after]
            offsets += [None] * (len(keys) - len(offsets))
            runs = [(self.catalogue.get(key), offset) for key, offset in zip(keys, offsets, strict=False)]
            return [Subscription(run, self.store, offset) for run, offset in runs if run is not None]

        events = stream(self.hub, subscriptions, lambda: self.is_over())
        return StreamingResponse(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def tags(self, request: Request) -> Any:
        """Set tags of a run, and whether it is archived."""
        given = await _body(request)
        run = await run_in_threadpool(self.catalogue.get, str(given.get("run")))
        if run is None:
            raise HTTPException(404, f"there is no run {str(given.get('run'))!r}")
        tags, archived = given.get("tags"), given.get("archived")
        if not (tags is None or (isinstance(tags, list) and all(isinstance(one, str) for one in tags))):
            raise HTTPException(400, "tags is a list of text")
        if not (archived is None or isinstance(archived, bool)):
            raise HTTPException(400, "archived is true or false")
        await run_in_threadpool(self.settings.tag, run.key, tags, archived)
        return self.settings.of(run.key)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Watch runs while the server is up."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self.is_over = lambda: True
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await asyncio.to_thread(self.store.close)

    async def _watch(self) -> None:
        while True:
            if self.hub.is_watched:
                await asyncio.to_thread(self.watch.poll)
            await asyncio.sleep(WATCH_S)


def make_app(root: str | Path, *, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """Return the application that serves the runs below a folder.

    Raises nothing: a folder that does not exist yet has no runs.
    """
    board = Dashboard(Path(root))
    routes: list[Route | Mount] = [
        Route("/", _page),
        Route("/api/runs", _json(board.runs)),
        Route("/api/run", _json(board.run)),
        Route("/api/series", _json(board.series)),
        Route("/api/diff", _json(board.diff)),
        Route("/api/stream", board.stream),
        Route("/api/tags", _json_async(board.tags), methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, host=host, token=token)],
        lifespan=board.lifespan,
        exception_handlers={HTTPException: _error, Exception: _bug},
    )
    app.state.dashboard = board
    return app


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Return an endpoint that computes JSON in a thread: files may be slow, and other requests wait for none."""

    async def endpoint(request: Request) -> Response:
        content = await run_in_threadpool(lambda: dumps(answer(request)))
        return Response(content, media_type="application/json")

    return endpoint


def _json_async(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return Response(dumps(await answer(request)), media_type="application/json")

    return endpoint


async def _page(_request: Request) -> Response:
    index = STATIC / "index.html"
    if not index.is_file():
        return refusal(404, "the page is missing in this installation; the API is at /api/runs")
    return FileResponse(index, headers={"Cache-Control": "no-cache"})


async def _error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, str(error.detail))


async def _bug(_request: Request, error: Exception) -> Response:
    return refusal(500, f"the dashboard failed: {type(error).__name__}")


async def _body(request: Request) -> dict[str, Any]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, "the request is too long")
    from etude.monitor.jsonl import decode

    try:
        found = decode(body)
    except RecursionError:
        found = None
    if found is None:
        raise HTTPException(400, "the request holds no JSON object")
    return found


def _number(text: str | None, name: str) -> float | None:
    if text is None or text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value:
        raise HTTPException(400, f"{name} is a number, not {text!r}")
    return value
