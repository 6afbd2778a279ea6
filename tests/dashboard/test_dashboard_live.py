"""The page while things change: new points, resumes, new runs, a server that ends; small screens and many runs."""

import json
import re
import time
from pathlib import Path

import pytest
from page_browser import Server, drag, expect, hover, hover_until, open_at, plot, values, zoom_of
from page_runs import START, make, train_record, write_lines


@pytest.fixture
def live(tmp_path, page):
    """A run that is alive, and the server of its folder."""
    folder = make(tmp_path, "now", seed=1, steps=100, state="running")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    write_lines(folder / "events.jsonl", events[:-1])
    beat(folder, 100)
    one = Server(tmp_path)
    yield one, folder
    page.goto("about:blank")  # else it would complain about the server
    one.stop()


def beat(folder, step, **facts):
    status = json.loads((folder / "status.json").read_text())
    now = {"time": time.time(), "step": step, "total_steps": 400, "state": "running", "steps_per_s": 2.0}
    (folder / "status.json").write_text(json.dumps({**status, **now, **facts}))


def test_new_points_appear_within_a_second_and_nothing_is_fetched_again(page, live):
    server, folder = live
    open_at(page, server)
    over = plot(page)
    assert "step 100" in hover(page, over, 0.999)
    expect(page.locator("#list .state")).to_have_text("running")
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "/api/series" in request.url else None)
    write_lines(folder / "metrics.jsonl", [train_record(step, 7.0) for step in range(101, 201)], "a")
    written = time.monotonic()
    beat(folder, 200)
    hover_until(page, "loss", 0.9995, r"step 200\b.*\s7\b")
    took = time.monotonic() - written
    assert took < 10, took  # about half a second on a quiet machine
    expect(page.locator("#list .run")).to_contain_text("50 %")
    expect(page.locator("#list .run")).to_contain_text("2 min left")
    assert asked == []


def test_points_written_while_a_curve_is_fetched_are_not_lost(page, live):
    server, folder = live

    def late(route):  # the answer is old when it arrives, and the stream has begun after what it lacks
        answer = route.fetch()
        write_lines(folder / "metrics.jsonl", [train_record(101, 8.0)], "a")
        page.wait_for_timeout(1000)
        route.fulfill(response=answer)

    page.route("**/api/series?*name=loss&*", late, times=1)
    open_at(page, server)
    hover_until(page, "loss", 0.9995, r"step 101\b.*\s8\b")


def test_a_curve_that_is_older_than_another_misses_nothing(page, live):
    server, folder = live
    written = []

    def old(route):
        answer = route.fetch()
        write_lines(folder / "metrics.jsonl", [train_record(101, 8.0)], "a")
        written.append(True)
        page.wait_for_timeout(1500)  # the stream has begun after the point, for the other curve has it
        route.fulfill(response=answer)

    def new(route):
        while not written:
            page.wait_for_timeout(20)
        route.continue_()

    page.route("**/api/series?*name=loss&*", old, times=1)
    page.route(re.compile(r"api/series\?.*name=(?!loss&)"), new)
    open_at(page, server)
    hover_until(page, "loss", 0.9995, r"step 101\b.*\s8\b")


def test_new_events_and_runs_appear(page, live, tmp_path):
    server, folder = live
    open_at(page, server, tab="run", focus="now")
    expect(page.locator(".events-box")).to_contain_text("checkpoint")
    warning = {"kind": "warning", "time": time.time(), "step": 100, "epoch": 1, "message": "something looks wrong"}
    write_lines(folder / "events.jsonl", [warning], "a")
    expect(page.locator(".events-box")).to_contain_text("something looks wrong")
    make(tmp_path, "later")
    expect(page.locator("#list .run")).to_have_count(2)
    expect(page.locator(".toast")).to_contain_text("New run: later")


def test_a_resume_replaces_the_curve(page, live):
    server, folder = live
    open_at(page, server)
    over = plot(page)
    assert "step 100" in hover(page, over, 0.999)
    shorter = folder / "other.jsonl"
    write_lines(shorter, [train_record(step, 3.0) for step in range(1, 61)])
    shorter.replace(folder / "metrics.jsonl")
    hover_until(page, "loss", 0.999, r"step 60\b.*\s3\b")


def test_a_resume_that_nobody_saw_replaces_the_curve(page, live):
    server, folder = live
    open_at(page, server)
    assert "step 100" in hover(page, plot(page), 0.999)
    page.locator("#list input").uncheck()
    expect(page.locator(".hint")).to_contain_text("No run is selected")
    longer = folder / "other.jsonl"
    write_lines(longer, [train_record(step, 3.0) for step in range(1, 151)])
    longer.replace(folder / "metrics.jsonl")
    resume = {"kind": "resume", "time": time.time(), "step": 50, "epoch": 0, "resumed": True}
    write_lines(folder / "events.jsonl", [resume], "a")
    page.locator("#list input").check()
    hover_until(page, "loss", 0.5, r"step 7\d\b.*\s3\b")


def test_a_server_that_is_gone_is_said_and_found_again(page, tmp_path):
    make(tmp_path, "one")
    server = Server(tmp_path)
    open_at(page, server)
    plot(page)
    server.stop()
    expect(page.locator("#banner")).to_contain_text("does not answer")
    expect(page.locator("#connection")).to_have_text("reconnecting")
    page.locator("#list input").uncheck()  # the page still works
    expect(page.locator(".hint")).to_contain_text("No run is selected")
    make(tmp_path, "meanwhile")
    again = Server(tmp_path, server.port)
    try:
        expect(page.locator("#connection")).to_have_text("live", timeout=15_000)
        expect(page.locator("#banner")).to_be_hidden()
        expect(page.locator("#list .run")).to_have_count(2)
    finally:
        page.goto("about:blank")
        again.stop()
    page.problems[:] = [one for one in page.problems if "ERR_" not in one]  # connections that were refused


def test_an_empty_folder_says_what_to_do(page, tmp_path):
    server = Server(tmp_path)
    try:
        open_at(page, server)
        expect(page.locator(".hint")).to_contain_text("etude train")
        make(tmp_path, "first")
        expect(page.locator("#list .run")).to_have_count(1)
        page.locator("#list input").check()
        plot(page)
        page.get_by_role("button", name="none").click()
        expect(page.locator(".hint")).to_contain_text("No run is selected")
    finally:
        page.goto("about:blank")
        server.stop()


@pytest.mark.parametrize("tab", ["list", "curves", "table", "tasks", "layers", "media", "run", "diff", "alerts"])
def test_nothing_is_wider_than_a_phone(page, server, tab):
    page.set_viewport_size({"width": 390, "height": 844})
    open_at(page, server, "several/tasks", "sweep/rate0.1-seed0", tab=tab)
    expect(page.get_by_role("tab", selected=True)).to_be_visible()
    page.wait_for_timeout(200)
    wide = page.evaluate(
        "() => [document.documentElement, document.body, document.getElementById('page')]"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.tagName)"
    )
    assert wide == []


def test_a_phone_goes_from_list_to_curves(page, server):
    page.set_viewport_size({"width": 390, "height": 844})
    open_at(page, server, "sweep/rate0.1-seed0")
    plot(page)
    page.get_by_role("tab", name="Runs").click()
    expect(page.locator("#list")).to_be_visible()
    page.locator('#list [data-run="sweep/rate0.3-seed0"] input').check()
    page.get_by_role("tab", name="Curves").click()
    assert "mlp" in hover(page, plot(page), 0.5)


def test_two_fingers_zoom_and_move(page, server):
    open_at(page, server, "sweep/rate0.1-seed0")
    box = plot(page).bounding_box()
    device = page.context.new_cdp_session(page)
    device.send("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})

    def touch(kind, *shares):
        points = [
            {"x": box["x"] + share * box["width"], "y": box["y"] + 60, "id": number}
            for number, share in enumerate(shares)
        ]
        device.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 0.4, 0.6)
    for spread in (0.1, 0.15, 0.2, 0.25):
        touch("touchMove", 0.5 - spread, 0.5 + spread)
    touch("touchMove", 0.15, 0.65)  # both to the left: later steps come in
    touch("touchEnd")
    page.wait_for_timeout(300)  # the address is written a moment later
    low, high = zoom_of(page)
    assert high - low == pytest.approx(399 * 0.2 / 0.5, rel=0.05)
    assert (low + high) / 2 == pytest.approx(200.5 + 0.1 * (high - low), abs=3)
    assert page.evaluate("visualViewport.scale") == 1


def test_curves_of_which_some_points_came_first_are_asked_for_again(page, server):
    whole = []

    def some_points(route):
        answer = route.fetch()
        found = answer.json()
        whole.append(len(found["series"][0]["x"]))
        for one in found["series"] if len(whole) == 1 else ():
            one |= {name: one[name][::50] for name in ("x", "min", "max", "last")} | {"exact": False}
        route.fulfill(response=answer, json=found)

    page.route(re.compile(r"api/series.*name=loss&"), some_points)
    open_at(page, server, "sweep/rate0.1-seed0")
    plot(page)
    curve = (
        "import('/static/series.js').then((one) => one.curve('sweep/rate0.1-seed0', 'train', 'loss').full.x.length)"
    )
    assert page.evaluate(curve) == whole[0] / 50
    while page.evaluate(curve) != whole[0]:  # nobody says that the server has read the file: it had before
        page.wait_for_timeout(50)
    assert len(whole) == 2


def test_many_lines_are_one_pixel_wide(page, tmp_path):
    for number in range(20):
        make(tmp_path, f"run{number:02d}", seed=number, steps=3000)
    server = Server(tmp_path)
    widths = """() => {
        const stroke = CanvasRenderingContext2D.prototype.stroke;
        globalThis.widths = new Set();
        CanvasRenderingContext2D.prototype.stroke = function () {
            if (this.strokeStyle !== "#000000" && this.canvas.closest("[data-chart=loss]")) widths.add(this.lineWidth);
            return stroke.call(this);
        };
    }"""
    try:
        open_at(page, server, *(f"run{number:02d}" for number in range(20)))
        over = plot(page)
        page.evaluate(widths)
        drag(page, over, 0.2, 0.9)
        page.wait_for_timeout(300)
        assert set(page.evaluate("[...widths]")) == {1}
    finally:
        page.goto("about:blank")
        server.stop()


def test_two_hundred_runs_are_few_rows(page, tmp_path):
    for i in range(200):
        folder = tmp_path / f"run{i:03d}"
        folder.mkdir()
        (folder / "config.yaml").write_text(json.dumps({"name": f"run{i:03d}", "seed": i}))
        write_lines(folder / "metrics.jsonl", [train_record(1, 1.0, time=START + i)])
    server = Server(tmp_path)
    try:
        open_at(page, server, sort="name")
        expect(page.locator("#side-row")).to_contain_text("of 200 shown")
        assert page.locator("#list .run").count() < 40
        page.locator("#list").evaluate("one => one.scrollTo(0, one.scrollHeight)")
        expect(page.locator('#list [data-run="run199"]')).to_be_visible()
        page.locator("#list").evaluate("one => one.scrollTo(0, 0)")
        for _ in range(30):
            page.keyboard.press("j")
        expect(page.locator('#list [data-run="run029"]')).to_be_visible()
    finally:
        page.goto("about:blank")
        server.stop()


def test_a_run_of_a_trainer_is_shown_whole(page, tmp_path):
    import torch
    from torch import nn

    from etude import GradientMonitor, Trainer

    server = Server(tmp_path)
    try:
        open_at(page, server)
        expect(page.locator(".hint")).to_contain_text("No runs here yet")
        x = torch.randn(96, 6)
        data = (x, x[:, :3].argmax(1))
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        callbacks = [GradientMonitor(every=1, log_layers=True)]
        config = {"epochs": 3, "batch_size": 8, "log_interval": 1}
        output = {"output_dir": tmp_path / "real", "callbacks": callbacks, "progress": False}
        Trainer(model, data, data, config=config, metrics=["accuracy", "confusion_matrix"], **output).train()
        page.locator("#list input").check()
        expect(page.locator("#list .state")).to_have_text("finished")
        tip = hover(page, plot(page), 0.999)
        losses = values(tmp_path / "real", "loss")
        assert "step 36" in tip
        shown = [float(one) for one in re.findall(r"\d+\.\d+", tip)]
        assert any(one == pytest.approx(losses[36], rel=1e-3) for one in shown), (tip, losses[36])
        page.get_by_role("tab", name="Layers").click()
        page.mouse.move(0, 0)
        page.locator(".heat canvas[role=img]").hover(position={"x": 700, "y": 5})
        expect(page.locator(".tip.is-open")).to_contain_text("largest norm")
        page.get_by_role("tab", name="Samples").click()
        expect(page.locator(".matrix-box canvas")).to_be_visible()
        expect(page.locator(".medium")).to_contain_text("step 36")
        page.locator(".medium summary").click()
        with page.expect_download() as download:
            page.locator(".medium .menu-list button", has_text="CSV").click()
        saved = [line.split(",") for line in Path(download.value.path()).read_text().splitlines()]
        last = json.loads((tmp_path / "real/media.jsonl").read_text().splitlines()[-1])["data"]["matrix"]
        assert [[int(one.strip('"')) for one in row[1:]] for row in saved[1:]] == last
    finally:
        page.goto("about:blank")
        server.stop()
