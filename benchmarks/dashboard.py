"""How fast the dashboard opens a folder of many long runs, and with how much memory.

python -m benchmarks.dashboard [--quick] [--json FILE] [--folder FOLDER]
"""

import argparse
import http.client
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

from benchmarks.table import Row, Table, progress, publish, read_options

RUNS, POINTS = 200, 100_000
LONG_POINTS = 10_000_000
QUICK_RUNS, QUICK_POINTS, QUICK_LONG = 3, 200, 2000
START = 1_700_000_000
SHOWN = 10
"""Runs that the first charts show."""
CHARTS = ("loss", "accuracy", "grad_norm", "lr")


def lines_of(points: int, seed: int) -> str:
    """Return records as a trainer writes them, about 330 bytes each, with a validation after every thousand."""
    source, lines = random.Random(seed), []
    for step in range(1, points + 1):
        loss, noise = 2.3 * step**-0.2, source.random()
        place = f'"step": {step * 10}, "epoch": {step // 1000}, "split": "train", "time": {START + step * 0.5:.3f}'
        lines.append(
            f'{{{place}, "samples": {step * 640}, "loss": {loss + 0.1 * noise!r}, "accuracy": {1 - loss / 3!r}, '
            f'"grad_norm": {noise!r}, "grad_norm_min": {noise / 2!r}, "grad_norm_max": {noise * 2!r}, "skipped": 0, '
            f'"samples_per_s": {6000 + noise!r}, "data_wait": {noise / 50!r}, "memory_bytes": 1234567890, '
            f'"lr": 0.0003}}\n'
        )
        if step % 1000 == 0:
            place = place.replace("train", "val")
            lines.append(f'{{{place}, "val_loss": {loss + 0.2!r}, "val_accuracy": {1 - loss / 2!r}}}\n')
    return "".join(lines)


def make_run(folder: Path, text: str) -> None:
    """Write a run folder of a finished run, its metrics being `text`."""
    folder.mkdir(parents=True)
    settings = "".join(f"  key_{number}: {number}\n" for number in range(50))
    (folder / "config.yaml").write_text(f"name: {folder.name}\ntraining:\n{settings}")
    events: list[dict[str, Any]] = [
        {"time": START, "kind": "start", "step": 0, "name": folder.name, "monitor": "val_loss", "mode": "min"},
        *(
            {"time": START + n, "kind": "checkpoint", "step": n, "path": f"checkpoints/step-{n:08d}"}
            for n in range(50)
        ),
        {"time": START + 99, "kind": "end", "step": 10, "status": "finished"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_text(text)


class Server:
    """A dashboard in a process of its own."""

    def __init__(self, root: Path) -> None:
        self.begin = time.perf_counter()
        command = [sys.executable, "-m", "etude", "dashboard", str(root), "--no-open", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r":(\d+)/", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])
        self.facts = psutil.Process(self.process.pid)
        self.started_s = time.perf_counter() - self.begin
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            try:
                self.peak = max(self.peak, self.facts.memory_info().rss)
            except psutil.Error:
                return
            time.sleep(0.02)

    def get(self, path: str, **query: Any) -> bytes:
        """Return the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET", f"/api/{path}?{urlencode(query, doseq=True)}")
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        connection.close()
        return body

    def row(self, what: str, path: str, **query: Any) -> Row:
        """Return the time and CPU time of one request."""
        progress(what)
        cpu, begin = sum(self.facts.cpu_times()[:2]), time.perf_counter()
        body = self.get(path, **query)
        seconds = time.perf_counter() - begin
        used = sum(self.facts.cpu_times()[:2]) - cpu
        return {
            "request": what,
            "s": seconds,
            "CPU s": used,
            "answer kB": len(body) / 1e3,
            "peak MB": self.peak / 1e6,
        }

    def until_exact(self, what: str, **query: Any) -> Row:
        """Return the time until series are no longer sampled."""
        progress(what)
        cpu, begin = sum(self.facts.cpu_times()[:2]), time.perf_counter()
        while b'"exact":false' in self.get("series", **query | {"pixels": 1}):
            time.sleep(1.0)
        body = self.get("series", **query)
        used = sum(self.facts.cpu_times()[:2]) - cpu
        seconds = time.perf_counter() - begin
        return {
            "request": what,
            "s": seconds,
            "CPU s": used,
            "answer kB": len(body) / 1e3,
            "peak MB": self.peak / 1e6,
        }

    def end(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.communicate()


def opening(root: Path, runs: int) -> Table:
    """Return the times of what a page asks when it is opened."""
    server = Server(root)
    keys = [f"run{number:03d}" for number in range(runs)]
    shown = {"run": keys[:SHOWN], "name": CHARTS, "pixels": 800}
    table = Table(
        f"Opening {runs} runs of {POINTS if runs == RUNS else QUICK_POINTS:,} log points.",
        {"request": "", "s": ".2f", "CPU s": ".2f", "answer kB": ",.0f", "peak MB": ",.0f"},
        "One server process, asked once for each row, in this order; the files are in the page cache. CPU s is the "
        "time of the server's threads, of the reader in the background too; peak MB its largest memory so far. "
        f"Before, {os.getloadavg()[0]:.1f} processes of others were running on {os.cpu_count()} cores.",
    )
    table.rows.append({"request": "start of the process", "s": server.started_s})
    table.rows.append(server.row("/api/runs, first", "runs"))
    table.rows.append(server.row("/api/runs, again", "runs"))
    table.rows.append(server.row(f"first charts: {SHOWN} runs × {len(CHARTS)}, sampled", "series", **shown))
    table.rows.append(server.until_exact("  until they are exact", **shown))
    table.rows.append(server.row("  again", "series", **shown))
    zoom = shown | {"from": 300_000, "to": 320_000}
    table.rows.append(server.row("  zoomed to 2,000 log points", "series", **zoom))
    everything = {"run": keys, "name": ["loss"], "pixels": 400}
    table.rows.append(server.row(f"all {runs} runs × loss, sampled", "series", **everything))
    table.rows.append(server.until_exact("  until they are exact", **everything))
    table.rows.append(server.row("  again", "series", **everything))
    table.rows.append(requests_per_second(server, keys, seconds=4.0 if runs == RUNS else 0.2))
    server.end()
    return table


def requests_per_second(server: Server, keys: list[str], seconds: float) -> Row:
    """Return how many small requests are answered, over four connections that stay open."""
    counts, end = [0] * 4, time.perf_counter() + seconds
    paths = [f"/api/series?run={key}&name=loss&pixels=400" for key in keys[:SHOWN]]

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        while time.perf_counter() < end:
            connection.request("GET", paths[counts[number] % len(paths)])
            connection.getresponse().read()
            counts[number] += 1
        connection.close()

    cpu = sum(server.facts.cpu_times()[:2])
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    used = sum(server.facts.cpu_times()[:2]) - cpu
    each = used / sum(counts) * 1e3
    return {"request": f"{sum(counts) / seconds:,.0f} series per second, {each:.1f} ms CPU each", "CPU s": used}


def long_run(root: Path, points: int) -> Table:
    """Return the times and memory of one very long run."""
    server = Server(root)
    query = {"run": "long", "name": ["loss"], "pixels": 800}
    table = Table(
        f"One run of {points:,} log points, {(root / 'long' / 'metrics.jsonl').stat().st_size / 1e9:.2f} GB.",
        {"request": "", "s": ".2f", "CPU s": ".2f", "answer kB": ",.0f", "peak MB": ",.0f"},
        "As above.",
    )
    table.rows.append(server.row("first chart, sampled", "series", **query))
    table.rows.append(server.until_exact("until it is exact", **query))
    table.rows.append(server.row("again", "series", **query))
    middle = points * 5
    table.rows.append(
        server.row("zoomed to 2,000 log points", "series", **query, **{"from": middle, "to": middle + 20_000})
    )
    server.end()
    return table


def news(root: Path, records: int) -> Table:
    """Return how long a new record takes to an open stream."""
    server, delays = Server(root), []
    path = root / "run000" / "metrics.jsonl"
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", f"/api/stream?run=run000&after={path.stat().st_size}")
    stream = connection.getresponse()
    while b"event: runs" not in stream.readline():
        pass
    for step in range(records):
        time.sleep(0.05 * (step % 7))
        begin = time.perf_counter()
        with path.open("a") as file:
            file.write(json.dumps({"step": 10**9 + step, "split": "train", "time": START, "loss": 1.0}) + "\n")
        while b"event: points" not in stream.readline():
            pass
        delays.append(time.perf_counter() - begin)
    stream.close()
    connection.close()
    server.end()
    row = {"records": len(delays), "median s": sorted(delays)[len(delays) // 2], "largest s": max(delays)}
    columns = {"records": "d", "median s": ".2f", "largest s": ".2f"}
    return Table("From a written record to an open page.", columns, "Server-sent events over a socket.", [row])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path)
    known, others = parser.parse_known_args(argv)
    options = read_options("How fast the dashboard opens many long runs.", others)
    runs, points = (QUICK_RUNS, QUICK_POINTS) if options.quick else (RUNS, POINTS)
    longest = QUICK_LONG if options.quick else LONG_POINTS
    folder = Path(tempfile.mkdtemp(dir=known.folder))
    try:
        texts = [lines_of(points, seed) for seed in range(min(runs, 4))]
        for number in range(runs):
            progress(f"writing run {number + 1} of {runs}")
            make_run(folder / "many" / f"run{number:03d}", texts[number % len(texts)])
        tables = [opening(folder / "many", runs), news(folder / "many", 3 if options.quick else 20)]
        shutil.rmtree(folder / "many")
        write_long(folder / "one" / "long", longest)
        tables.append(long_run(folder / "one", longest))
    finally:
        shutil.rmtree(folder)
    publish("dashboard", tables, options)


def write_long(folder: Path, points: int) -> None:
    """Write one run of many records, a part at a time."""
    make_run(folder, "")
    part = min(points, 100_000)
    with (folder / "metrics.jsonl").open("w") as file:
        text = lines_of(part, 0)
        for number in range(points // part):
            progress(f"writing part {number + 1} of {points // part}")
            shift = number * part * 10
            file.write(re.sub(r'"step": (\d+)', lambda match, shift=shift: f'"step": {int(match[1]) + shift}', text))


if __name__ == "__main__":
    main()
