"""The view of a sweep in a real browser."""

import pytest
from page_browser import Server, expect, open_at
from page_runs import EVIL, make
from sweep_folders import make_sweep, trial, write_trials


@pytest.fixture
def sweep(tmp_path, page):
    trials = make_sweep(tmp_path)
    server = Server(tmp_path)
    yield server, tmp_path, trials
    page.goto("about:blank")  # it would report that the server is gone
    server.stop()


def test_a_sweep_has_a_view_of_its_own(page, sweep):
    server, _, trials = sweep
    open_at(page, server, tab="sweeps")
    expect(page.locator(".sweep-head")).to_contain_text("7 of 8")
    expect(page.locator(".sweep-head")).to_contain_text("0.4000 (trial 3)")
    expect(page.locator(".sweep-head")).to_contain_text("1 stopped")
    expect(page.locator("circle.trial")).to_have_count(6)  # one has no value
    expect(page.locator(".trial-line")).to_have_count(4)
    expect(page.locator(".share")).to_have_text(["optimizer.lr75 %", "model.act25 %"])
    rows = page.locator(".trials tbody tr")
    expect(rows).to_have_count(7)
    expect(rows.nth(5)).to_contain_text(f"it broke {EVIL}")  # as text
    expect(rows.nth(6)).to_contain_text("stopped")  # its run has ended, its sweep too
    heights = {
        one["number"]: float(page.locator(f'circle[data-trial="{one["number"]}"]').get_attribute("cy"))
        for one in trials
        if one["value"] is not None
    }
    values = {one["number"]: one["value"] for one in trials if one["value"] is not None}
    assert sorted(heights, key=heights.get) == sorted(values, key=lambda number: -values[number])
    best = page.locator(".best-line").get_attribute("d")
    assert best.startswith(f"M58,{heights[0]:g}"[:8])
    page.click(".trials th button:has-text('val_loss')")
    expect(rows.first).to_contain_text("trial 3")
    page.click(".trials th button:has-text('val_loss')")
    expect(rows.first).to_contain_text("trial 4")


def test_trials_lead_to_their_runs_and_curves(page, sweep):
    server, *_ = sweep
    open_at(page, server, tab="sweeps")
    page.click(".trials button:has-text('trial 2')")
    expect(page.locator(".run-page")).to_contain_text("search/trial-0002")
    page.go_back()
    page.locator('circle[data-trial="1"]').click()
    expect(page.locator(".run-page")).to_contain_text("search/trial-0001")
    page.go_back()
    page.hover('circle[data-trial="1"]')
    expect(page.locator(".tip.is-open")).to_contain_text("trial 1 · complete")
    page.click("text=Curves of all trials")
    expect(page.locator("#side-row")).to_contain_text("7 of 7 shown")


def test_a_sweep_that_runs_is_live(page, sweep):
    server, root, trials = sweep
    open_at(page, server, tab="sweeps")
    expect(page.locator(".trial-line")).to_have_count(4)
    make(root, "search/trial-0007", name="toy", seed=7, steps=100)
    write_trials(root / "search", [*trials, trial(7, "complete", 0.05)])
    expect(page.locator(".sweep-head")).to_contain_text("0.05000 (trial 7)")
    expect(page.locator(".trial-line")).to_have_count(5)


def test_there_is_a_tab_only_if_there_is_a_sweep_and_a_choice_if_there_are_two(page, tmp_path):
    make(tmp_path, "alone")
    server = Server(tmp_path)
    try:
        open_at(page, server)
        expect(page.locator("#tabs")).not_to_contain_text("Sweeps")
        make_sweep(tmp_path, "one")
        make_sweep(tmp_path, "two")
        expect(page.locator("#tabs")).to_contain_text("Sweeps")
        page.click("#tabs [data-tab=sweeps]")
        page.select_option(".sweep-head select", "two")
        page.click(".trials button:has-text('trial 0')")
        expect(page.locator(".run-page")).to_contain_text("two/trial-0000")
    finally:
        page.goto("about:blank")
        server.stop()


@pytest.mark.parametrize("width", [390, 1400])
def test_the_view_fits_the_screen(page, sweep, width):
    page.set_viewport_size({"width": width, "height": 844})
    open_at(page, sweep[0], tab="sweeps")
    expect(page.locator(".trial-line")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('page').scrollWidth") <= width
