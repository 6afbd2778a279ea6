"""The page of the dashboard in a real browser, over the real server and run folders."""

import csv
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from page_browser import drag, expect, hover, hover_until, open_at, plot, values, zoom_of
from page_runs import CLASSES, EVIL, LAYERS, SPIKE, make, train_record, write_lines


def test_the_list_searches_sorts_and_groups(page, server):
    open_at(page, server)
    rows = page.locator("#list .run")
    expect(rows).to_have_count(7)
    expect(page.locator("#list")).to_contain_text(EVIL)
    page.fill("#search", "learning_rate=0.3")
    expect(rows).to_have_count(2)
    page.fill("#search", "seed>=3 state=failed")
    expect(rows).to_have_count(1)
    page.fill("#search", "nothing like this")
    expect(page.locator("#list")).to_contain_text("No run matches")
    page.fill("#search", "mlp")
    page.select_option("#sort", "best")
    page.click("#direction")
    order = [one.get_attribute("data-run") for one in rows.all()]
    assert [one.split("-")[0] for one in order] == ["sweep/rate0.3"] * 2 + ["sweep/rate0.1"] * 2  # the best is least
    page.select_option("#group", "optimizer.learning_rate")
    groups = page.locator("#list .run.group")
    expect(groups).to_have_count(2)
    expect(groups.first).to_contain_text("learning_rate = 0.1")
    groups.first.locator("button.name").click()
    expect(rows).to_have_count(4)  # two headers and the runs of the other
    groups.nth(1).locator("input").check()
    expect(page.locator("#side-row")).to_contain_text("mean ± range")
    tip = hover(page, plot(page), 0.5)
    assert "learning_rate = 0.3 (2)" in tip
    assert page.title() != "1"
    page.click("text=mean ± range")
    page.wait_for_url(re.compile("aggregate=0"))


def test_the_mean_of_a_group_is_that_of_its_runs(page, server, root):
    open_at(page, server, "sweep/rate0.1-seed0", "sweep/rate0.1-seed1", group="optimizer.learning_rate")
    over = plot(page)
    tip = hover(page, over, 0.25)
    step = int(re.search(r"step (\d+)", tip)[1])
    losses = [values(root / f"sweep/rate0.1-seed{seed}", "loss") for seed in (0, 1)]
    shown = float(re.search(r"0\.1 \(2\)\s+([\d.]+)\s+[\d.]+ …", tip)[1])
    near = [sum(one[at] for one in losses) / 2 for at in range(step - 3, step + 4)]
    assert min(near) - 0.02 < shown < max(near) + 0.02


def test_curves_zoom_pan_and_go_back(page, server, root):
    run = "sweep/rate0.1-seed0"
    open_at(page, server, run)
    over = plot(page)
    tip = hover(page, over, 0.5)
    step = int(re.search(r"step (\d+)", tip)[1])
    assert abs(step - 200) <= 2
    assert f"{values(root / run, 'loss')[step]:.3f}"[:4] in tip
    expect(page.locator('[data-chart="grad_norm"] .readout span')).to_have_count(1)  # the cursor is shared
    drag(page, over, 0.25, 0.5)
    low, high = zoom_of(page)
    assert low == pytest.approx(1 + 399 * 0.25, abs=3)
    assert high == pytest.approx(1 + 399 * 0.5, abs=3)
    page.keyboard.down("Shift")
    drag(page, over, 0.8, 0.3)
    page.keyboard.up("Shift")
    expect(page.locator(".bar-tools .zoom")).to_be_visible()
    page.wait_for_timeout(300)  # the address is written a moment later
    moved = zoom_of(page)
    assert moved[0] - low == pytest.approx(0.5 * (high - low), rel=0.05)
    over.dblclick(position={"x": 40, "y": 60})
    expect(page.locator(".bar-tools .zoom")).to_be_hidden()
    page.go_back()
    expect(page.locator(".bar-tools .zoom")).to_be_visible()


def test_a_spike_is_seen_at_every_zoom(page, server):
    open_at(page, server, "sweep/rate0.1-seed0")
    over = plot(page)
    share = (SPIKE - 1) / 399
    near = [hover(page, over, share + pixels / 430, 0.9) for pixels in (-1, -0.5, 0, 0.5, 1)]
    assert any(re.search(r"\s50\b", tip) for tip in near)
    page.click("text=outliers")
    expect(page.locator("[data-key=outliers]")).to_have_attribute("aria-pressed", "false")
    drag(page, over, share - 0.05, share + 0.05)
    low, high = zoom_of(page)
    page.click("[data-key=outliers]")
    assert re.search(r"\s50\b", hover(page, plot(page), (SPIKE - low) / (high - low), 0.9))


def test_axes_smoothing_and_marks(page, server, root):
    open_at(page, server, "several/tasks")
    over = plot(page)
    assert "second" not in hover(page, over, 0.75, 0.9)
    assert "the gradient vanishes" in hover(page, over, 249 / 399, 0.02)
    assert "resumed at step 150" in hover(page, over, 149 / 399, 0.5)
    page.click("[data-key=events]")
    assert "resumed" not in hover(page, over, 149.2 / 399, 0.52)
    page.locator("input[aria-label=Smoothing]").fill("0.9")
    expect(page.locator(".bar-tools output")).to_have_text("0.90")
    raw = values(root / "several/tasks", "loss")
    tip = hover(page, over, 0.9, 0.5)
    step = int(re.search(r"step (\d+)", tip)[1])
    numbers = re.findall(r"\d+\.\d+", tip.split("val")[-1])
    assert f"{raw[step]:.2f}" in tip  # the raw value is beside the smoothed one
    assert len(numbers) >= 1
    page.get_by_role("button", name="log x").click()
    page.locator('[data-chart="loss"]').hover()
    page.locator('[data-chart="loss"] button:has-text("log")').click()
    expect(page.locator('[data-chart="loss"] .mini')).to_have_attribute("aria-pressed", "true")
    for x, last in (("samples", "25,"), ("tokens", "25"), ("epoch", "4"), ("time", "7 min"), ("flops", "1.5")):
        page.select_option("select[aria-label='x axis']", x)
        hover_until(page, "loss", 0.999, f"{x} {last}")


def test_marks_are_at_their_steps_on_every_axis(page, server):
    for x, place in (("samples", r"1[56],\d"), ("time", "4 min")):
        open_at(page, server, "several/tasks", x=x)
        plot(page)
        share = (250 - 1) / 399
        box = plot(page).bounding_box()
        for _ in range(100):  # marks come a moment after the curves
            page.mouse.move(box["x"] + (share + 0.1) * box["width"], box["y"] + 3)
            page.mouse.move(box["x"] + share * box["width"], box["y"] + 3)
            if "the gradient vanishes" in page.locator(".tip").inner_text():
                break
        tip = page.locator(".tip").inner_text()
        assert "the gradient vanishes" in tip
        assert re.search(place, tip.splitlines()[0])
        page.goto("about:blank")


def test_the_address_is_the_whole_view(page, server, browser):
    open_at(page, server, "sweep/rate0.3-seed0", "not/finite")
    plot(page)
    page.select_option("select[aria-label='x axis']", "epoch")
    page.locator("input[aria-label=Smoothing]").fill("0.5")
    page.get_by_role("button", name="Speed").click()
    page.fill("input[aria-label='Filter charts']", "s")
    page.fill("#search", "mlp")
    drag(page, plot(page), 0.2, 0.6)
    zoom_of(page)
    page.wait_for_timeout(300)
    other = browser.new_page()
    other.goto(page.url)
    expect(other.locator("select[aria-label='x axis']")).to_have_value("epoch")
    expect(other.locator(".bar-tools output")).to_have_text("0.50")
    expect(other.locator("#search")).to_have_value("mlp")
    expect(other.locator(".bar-tools .zoom")).to_have_text(page.locator(".bar-tools .zoom").inner_text())
    expect(other.get_by_role("button", name="Speed")).to_have_attribute("aria-expanded", "false")
    expect(other.locator("#side-row")).to_contain_text("2 of 7 shown")
    other.close()


def test_charts_are_saved(page, server, root):
    run = "sweep/rate0.1-seed0"
    open_at(page, server, run)
    plot(page)
    page.locator('[data-chart="loss"]').hover()
    found = {}
    for kind in ("PNG", "SVG", "CSV of all points"):
        page.locator('[data-chart="loss"] summary').click()
        with page.expect_download() as download:
            page.locator('[data-chart="loss"] .menu-list button', has_text=kind).click()
        found[kind[:3]] = Path(download.value.path()).read_bytes()
    assert found["PNG"].startswith(b"\x89PNG")
    text = found["SVG"].decode()
    assert text.startswith("<svg")
    assert text.count("<path") > 10
    assert ">mlp<" in text
    rows = list(csv.DictReader(found["CSV"].decode().splitlines()))
    assert {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]} == values(root / run, "loss")


def test_names_in_a_saved_chart_are_text(page, server):
    open_at(page, server, "evil/<b>&amp;")
    plot(page)
    page.locator('[data-chart="loss"] summary').click()
    with page.expect_download() as download:
        page.locator('[data-chart="loss"] .menu-list button', has_text="SVG").click()
    text = Path(download.value.path()).read_text()
    assert "<img" not in text
    assert "&#60;img src=x" in text


def test_the_page_of_a_run(page, server, root):
    open_at(page, server, "several/tasks")
    page.locator('#list [data-run="evil/<b>&amp;"] button.name').click()
    expect(page.locator(".run-head h2")).to_have_text(EVIL)
    expect(page.locator(".run-head .state")).to_have_text("failed")
    page.locator('#list [data-run="several/tasks"] button.name').click()
    expect(page.locator(".events-box")).to_contain_text("the gradient vanishes")
    page.select_option("select[aria-label='Kinds of events']", "checkpoint")
    expect(page.locator(".event")).to_have_count(4)
    page.fill("input[aria-label='Filter config']", "learning")
    expect(page.locator(".part-config tr")).to_have_count(1)
    page.fill("input[aria-label='Add a tag']", "<i>keep</i>")
    page.press("input[aria-label='Add a tag']", "Enter")
    expect(page.locator('#list [data-run="several/tasks"] .tag')).to_have_text("<i>keep</i>")
    kept = json.loads((root / ".etude-dashboard.json").read_text())
    assert kept["runs"]["several/tasks"]["tags"] == ["<i>keep</i>"]
    page.get_by_role("button", name="Remove tag").click()
    expect(page.locator('#list [data-run="several/tasks"] .tag')).to_have_count(0)
    page.get_by_role("button", name="Archive it").click()
    expect(page.locator("#list .run")).to_have_count(6)
    page.get_by_role("button", name="archived 1").click()
    expect(page.locator("#list .run")).to_have_count(7)
    page.get_by_role("button", name="Bring it back").click()
    expect(page.locator("#list .is-archived")).to_have_count(0)


def test_a_click_on_a_line_opens_its_run(page, server):
    open_at(page, server, "sweep/rate0.3-seed1", logy="loss")
    over = plot(page)
    box = over.bounding_box()
    for top in range(int(box["height"]) - 4, 0, -6):
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + top)
        if page.locator('[data-chart="loss"] .on-line').count():
            break
    page.mouse.down()
    page.mouse.up()
    expect(page.locator(".run-head .id")).to_have_text("sweep/rate0.3-seed1")


def test_panels_of_tasks_layers_and_media(page, server):
    open_at(page, server, "several/tasks", tab="tasks")
    expect(page.locator(".grid.small .chart h3").first).to_have_text(re.compile("parse|name"))
    expect(page.locator('[data-chart="task:name/loss"] .note')).to_have_text("weight 0.750")
    over = plot(page, "weights:several/tasks")
    tip = hover(page, over, 0.5)
    assert re.search(r"name\s+0\.75", tip)
    page.get_by_role("tab", name="Layers").click()
    canvas = page.locator(".heat canvas[role=img]")
    expect(canvas).to_be_visible()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 40)
    expect(page.locator(".tip.is-open")).to_contain_text(LAYERS[1])
    expect(page.locator(".tip.is-open")).to_contain_text("0.1")
    page.get_by_role("tab", name="Samples").click()
    matrix = page.locator(".matrix-box canvas")
    expect(matrix).to_be_visible()
    expect(page.locator(".medium")).to_contain_text("step 300")
    page.mouse.move(matrix.bounding_box()["x"] + matrix.bounding_box()["width"] - 10, matrix.bounding_box()["y"] + 8)
    expect(page.locator(".tip.is-open")).to_contain_text(f"true cat, predicted {CLASSES[2]}")
    page.locator("input.steps").fill("0")
    expect(page.locator(".medium")).to_contain_text("step 100")
    page.click(".media-tabs >> text=samples")
    expect(page.locator("pre.text")).to_have_text("sample at 100 <script>document.title='evil'</script>")
    page.locator("input.steps").press("End")
    expect(page.locator("pre.text")).to_contain_text("sample at 300")
    assert "evil" not in page.title()


def test_compare_shows_only_what_differs(page, server):
    open_at(page, server, "sweep/rate0.1-seed0", "sweep/rate0.3-seed0", tab="diff")
    table = page.locator(".diff-table")
    expect(table).to_contain_text("optimizer.learning_rate")
    assert "training.seed" not in table.inner_text()
    page.locator('#list [data-run="sweep/rate0.3-seed1"] input').check()
    expect(table).to_contain_text("training.seed")
    expect(table).to_contain_text("commit")
    page.get_by_role("tab", name="Table").click()
    expect(page.locator(".table-row")).to_have_count(7)
    page.get_by_role("columnheader", name="learning_rate").click()
    expect(page.locator(".table-row").last).to_contain_text("0.3")
    page.get_by_role("columnheader", name="learning_rate").click()
    expect(page.locator(".table-row").first).to_contain_text("0.3")


def test_what_limits_a_run_is_said(page, server):
    open_at(page, server, "sweep/rate0.1-seed0")
    expect(page.locator("#strip .words")).to_contain_text("waiting for batches")
    expect(page.locator("#strip")).to_contain_text("640")
    expect(page.locator("#strip")).to_contain_text("30.0 %")


def test_keys_and_themes(page, server):
    open_at(page, server, "sweep/rate0.1-seed0", sort="name")
    plot(page)
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator("#list .is-focus")).to_have_count(1)
    second = page.locator("#list .run").nth(1)
    expect(second).to_have_class(re.compile("is-focus"))
    before = second.locator("input").is_checked()
    page.keyboard.press("Space")
    expect(second.locator("input")).to_be_checked(checked=not before)
    page.keyboard.press("k")
    expect(page.locator("#list .run").nth(0)).to_have_class(re.compile("is-focus"))
    page.keyboard.press("Enter")
    expect(page.locator(".run-head")).to_be_visible()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("tasks")
    expect(page.locator("#list .run")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("1")
    expect(page.get_by_role("tab", name="Curves")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("[")
    expect(page.locator("#side")).to_be_hidden()


def test_alerts_are_added_fire_and_are_removed(page, server, root):
    folder = make(root, "alerts/live", seed=9, steps=50, state="running")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "time": time.time()}))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    write_lines(folder / "events.jsonl", events[:-1])
    try:
        open_at(page, server, tab="alerts")
        page.fill("input[aria-label='New rule']", "loss > > 3")
        page.get_by_role("button", name="Add rule").click()
        expect(page.locator(".toast").first).to_contain_text("unknown alert rule")
        page.problems.clear()  # the browser reports the refusal
        page.fill("input[aria-label='New rule']", "loss > 77")
        page.get_by_role("button", name="Add rule").click()
        expect(page.locator(".rules")).to_contain_text("loss > 77")
        page.get_by_role("tab", name="Curves").click()
        write_lines(folder / "metrics.jsonl", [train_record(51, 99.0)], "a")
        expect(page.locator("#tabs .badge")).to_have_text("1")
        page.get_by_role("tab", name="Alerts").click()
        expect(page.locator(".fired")).to_contain_text("alerts/live")
        expect(page.locator("#tabs .badge")).to_have_count(0)
        page.get_by_role("button", name="Remove the rule loss > 77").click()
        expect(page.locator(".rules")).to_contain_text("No rules yet")
    finally:
        shutil.rmtree(folder)
