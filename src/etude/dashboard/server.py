"""The web server of the dashboard: one application with the page and a JSON API about run folders."""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
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

from etude.core.errors import ConfigError
from etude.dashboard import query
from etude.dashboard.alerts import FORMS, Alerts, Webhook, checked_webhook
from etude.dashboard.catalogue import Catalogue, Run
from etude.dashboard.details import NO_DETAILS, details, differences
from etude.dashboard.export import csv_lines, heatmap
from etude.dashboard.limits import limits
from etude.dashboard.media import MediaIndex
from etude.dashboard.parsing import dumps
from etude.dashboard.security import Guard, refusal
from etude.dashboard.series import RunSeries
from etude.dashboard.settings import Settings
from etude.dashboard.store import Store
from etude.dashboard.stream import Hub, Subscription, Watch, stream
from etude.dashboard.sweeps import Sweeps

STATIC = Path(__file__).parent / "static"
MOST_INDEXES = 32
"""Runs whose index of media is kept."""
PATIENCE_S = 0.6
"""Time after which a list of runs is answered with those that have been read so far."""
WATCH_S = 0.5
logger = logging.getLogger("etude")


class Dashboard:
    """What the routes share, and the routes."""

    def __init__(self, root: Path, webhook: str | None = None) -> None:
        self.root = root
        self.catalogue, self.settings, self.hub = Catalogue(root), Settings(root), Hub()
        self.store = Store(on_exact=lambda key: self.hub.send("exact", {"run": key}))
        self.alerts = Alerts(self.settings.alerts, self._send_alert)
        self.watch = Watch(self.hub, self.all_runs, self.alerts, self.describe, self.sweeps_of)
        self._sweeps = Sweeps(root)
        self._media: OrderedDict[str, MediaIndex] = OrderedDict()
        webhook = webhook or self.settings.webhook
        self._webhook = None if webhook is None else Webhook(checked_webhook(webhook), self._report)
        self.is_over: Callable[[], bool] = lambda: False
        """Whether open streams are to end."""

    def all_runs(self) -> list[Run]:
        """Return all runs; each has its color, also one that has just begun."""
        runs = self.catalogue.runs()
        self.settings.give_colors([run.key for run in runs])
        return runs

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
        runs = [run for run in found if run is not None]
        if problem := next(filter(None, (run.problem() for run in runs)), ""):
            raise HTTPException(403, problem)
        return runs

    def runs(self, _request: Request) -> Any:
        """Return all runs."""
        runs = self.all_runs()
        end = time.monotonic() + PATIENCE_S
        for run in sorted((run for run in runs if not run.is_read), key=Run.changed, reverse=True):
            run.read()
            if time.monotonic() > end:  # the page hears of the others by its stream
                break
        found = [{**(run.read() if run.is_read else run.last()), **self.settings.of(run.key)} for run in runs]
        return {"root": str(self.root), "runs": found}

    def sweeps_of(self, runs: list[Run]) -> list[dict[str, Any]]:
        """Return the sweeps to which runs belong, in short."""
        return [one.summary() for one in self._sweeps.of(runs).values()]

    def sweeps(self, _request: Request) -> Any:
        """Return all sweeps, in short."""
        return {"sweeps": self.sweeps_of(self.all_runs())}

    def sweep(self, request: Request) -> Any:
        """Return one sweep with its trials."""
        runs, key = self.all_runs(), request.query_params.get("sweep", "")
        sweep = self._sweeps.of(runs).get(key)
        if sweep is None:
            raise HTTPException(404, f"there is no sweep {key!r}")
        return sweep.whole({run.path: run.key for run in runs})

    def run(self, request: Request) -> Any:
        """Return everything about one run but its metrics."""
        run = self.catalogue.get(request.query_params.get("run", ""))
        if run is None or not run.problem():
            run = self.find(request)
            return {"run": self.describe(run), **details(run)}
        return {"run": self.describe(run), **NO_DETAILS}

    def series(self, request: Request) -> Any:
        """Return points of metrics for charts."""
        given, names = request.query_params, query.names(request)
        split, axis, pixels = given.get("split", "train"), query.axis(request), query.pixels(request)
        start, end = query.number(given.get("from"), "from"), query.number(given.get("to"), "to")
        found = [
            {"run": key, **one.answer(split, name, axis, start, end, pixels)}
            for key, one in self._read(self.find_all(request))
            for name in names
        ]
        return {"series": found}

    def ruler(self, request: Request) -> Any:
        """Return where steps are on another axis."""
        ((_, series),) = self._read([self.find(request)])
        return series.ruler(query.axis(request))

    def heatmap(self, request: Request) -> Any:
        """Return all metrics with a prefix, as rows."""
        given = request.query_params
        ((_, series),) = self._read([self.find(request)])
        split, prefix = given.get("split", "train"), given.get("prefix", "grad_norm/")
        return heatmap(series, split, prefix, query.axis(request), query.pixels(request)) | {"exact": series.is_exact}

    def media(self, request: Request) -> Any:
        """Return what media there are, or the record of one."""
        index, name = self._media_of(self.find(request)), request.query_params.get("name")
        if name is None:
            return index.list()
        record = index.get(name, query.step(request))
        if record is None:
            raise HTTPException(404, f"there is no {name!r} at this step")
        return record

    async def picture(self, request: Request) -> Response:
        """Return a picture that a run recorded."""
        run = await run_in_threadpool(self.find, request)
        index, name = self._media_of(run), request.query_params.get("name", "")
        found = await run_in_threadpool(index.picture, name, query.step(request))
        if found is None:
            raise HTTPException(404, f"there is no picture {name!r} at this step in the folder of the run")
        return Response(found[0], media_type=found[1])

    def limits(self, request: Request) -> Any:
        """Return what limits a run."""
        return limits(self.find(request))

    async def csv(self, request: Request) -> Response:
        """Return raw points as a table."""
        runs, names = await run_in_threadpool(self.find_all, request), query.names(request)
        lines = csv_lines(runs, names, request.query_params.get("split"))
        headers = {"Content-Disposition": "attachment; filename=metrics.csv"}
        return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=headers)

    async def rules(self, request: Request) -> Any:
        """Return alerts and their rules; add or remove a rule."""
        if request.method != "GET":
            rule = (await query.body(request)).get("rule")
            if not isinstance(rule, str):
                raise HTTPException(400, f"rule is text, such as {FORMS}")
            await run_in_threadpool(self._change_rule, rule, request.method)
        return {"rules": list(self.alerts.rules), "alerts": list(self.alerts.fired), "webhook": bool(self._webhook)}

    def diff(self, request: Request) -> Any:
        """Return what differs between runs."""
        return differences(self.find_all(request))

    def subscribe(self, keys: list[str], after: list[str]) -> list[Subscription]:
        """Return what follows some runs, each after a place in its file; runs that are gone are left out."""
        offsets = [int(one) if one.isdecimal() and len(one) < 19 else None for one in after]
        offsets += [None] * (len(keys) - len(offsets))
        runs = [(self.catalogue.get(key), offset) for key, offset in zip(keys, offsets, strict=False)]
        return [
            Subscription(run, self.store, offset) for run, offset in runs if run is not None and not run.problem()
        ]

    async def stream(self, request: Request) -> Response:
        """Send what is new."""
        keys, after = request.query_params.getlist("run"), request.query_params.getlist("after")
        events = stream(self.hub, lambda: self.subscribe(keys, after), lambda: self.is_over())
        return StreamingResponse(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def tags(self, request: Request) -> Any:
        """Set tags of a run, and whether it is archived."""
        given = await query.body(request)
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

    def _read(self, runs: list[Run]) -> list[tuple[str, RunSeries]]:
        known = [(run.key, self.store.get(run.key, run.path, run.read_facts)) for run in runs]
        self.store.read(known)
        return known

    def _media_of(self, run: Run) -> MediaIndex:
        if run.key not in self._media:
            self._media[run.key] = MediaIndex(run.path)
            if len(self._media) > MOST_INDEXES:
                self._media.popitem(last=False)
        return self._media[run.key]

    def _change_rule(self, rule: str, method: str) -> None:
        try:
            if method == "POST":
                self.alerts.add(rule)
            elif not self.alerts.remove(rule):
                raise HTTPException(404, f"there is no rule {rule!r}")
        except ConfigError as error:
            raise HTTPException(400, str(error)) from None
        self.settings.set_alerts(list(self.alerts.rules))

    def _send_alert(self, alert: dict[str, Any]) -> None:
        self.hub.send("alert", alert)
        if self._webhook is not None:
            self._webhook.send(alert)

    def _report(self, problem: str) -> None:
        logger.warning(problem)
        self.hub.send("alert", {"rule": None, "run": None, "time": time.time(), "message": problem})

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
        has_failed = False
        while True:
            begin = time.monotonic()
            if self.hub.is_watched or self.alerts.rules:
                try:
                    await asyncio.to_thread(self.watch.poll)
                except Exception:
                    if not has_failed:  # pages would no longer be told of anything
                        logger.exception("watching the runs failed; it is tried again")
                    has_failed = True
            await asyncio.sleep(max(WATCH_S, 4 * (time.monotonic() - begin)))  # thousands of runs: less often


def make_app(
    root: str | Path, *, host: str = "127.0.0.1", token: str | None = None, webhook: str | None = None
) -> Starlette:
    """Return the application that serves the runs below a folder; `webhook` is a URL for alerts.

    Raises ConfigError for a webhook that is no URL. A folder that does not exist yet has no runs.
    """
    board = Dashboard(Path(root), webhook)
    routes: list[Route | Mount] = [
        Route("/", _page),
        Route("/api/runs", _json(board.runs)),
        Route("/api/run", _json(board.run)),
        Route("/api/sweeps", _json(board.sweeps)),
        Route("/api/sweep", _json(board.sweep)),
        Route("/api/series", _json(board.series)),
        Route("/api/diff", _json(board.diff)),
        Route("/api/ruler", _json(board.ruler)),
        Route("/api/heatmap", _json(board.heatmap)),
        Route("/api/media", _json(board.media)),
        Route("/api/picture", board.picture),
        Route("/api/limits", _json(board.limits)),
        Route("/api/csv", board.csv),
        Route("/api/stream", board.stream),
        Route("/api/alerts", _json_async(board.rules), methods=["GET", "POST", "DELETE"]),
        Route("/api/tags", _json_async(board.tags), methods=["POST"]),
    ]
    if STATIC.is_dir():
        routes.append(Mount("/static", StaticFiles(directory=STATIC)))
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
