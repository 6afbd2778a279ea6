// The page as a whole: loads the runs, keeps its parts in step with the view, and listens to the server.

import { get, listen } from "./api.js";
import { makeBar } from "./bar.js";
import { redraw, refresh } from "./chart.js";
import { curvesPage } from "./curves.js";
import { fill, fillOnce, h, icon, iconButton, toast } from "./dom.js";
import { differing, present } from "./grouping.js";
import { help, keys } from "./keys.js";
import { pages } from "./pages.js";
import { isDark } from "./palette.js";
import { drawSide, makeSide, RunTable } from "./runs.js";
import { setUnit } from "./series.js";
import { address, chosen, data, emit, fromAddress, on, set, toggle, view } from "./state.js";
import { drawStrip } from "./strip.js";

const by = (id) => document.getElementById(id);
const PAGES = { curves: curvesPage(), table: new RunTable(), ...pages };
const TABS = [["list", "Runs", "only-phone"], ["curves", "Curves"], ["table", "Table"], ["sweeps", "Sweeps"], ["tasks", "Tasks"], ["layers", "Layers"], ["media", "Samples"], ["run", "Run"], ["diff", "Compare"], ["alerts", "Alerts"]];

const folderName = () => data.root.split("/").filter(Boolean).at(-1) ?? data.root;

function drawTabs() {
  document.title = `${data.fired ? `(${data.fired}) ` : ""}${folderName()} · Etude`;
  const before = document.activeElement?.dataset?.tab;
  fill(by("tabs"), TABS.filter(([tab]) => PAGES[tab]?.isUseful?.() ?? true).map(([tab, label, kind]) => h("button", {
    type: "button", role: "tab", class: kind ?? "", dataset: { tab }, "aria-selected": String(view.tab === tab), tabindex: view.tab === tab ? "0" : "-1",
    onclick: () => set({ tab }), onkeydown: arrows }, label, tab === "alerts" && data.fired ? h("span", { class: "badge", "aria-label": `${data.fired} fired` }, data.fired) : null)));
  const selected = by("tabs").querySelector("[aria-selected=true]");
  if (selected && by("tabs").scrollWidth > by("tabs").clientWidth) by("tabs").scrollLeft = selected.offsetLeft - by("tabs").offsetLeft - 60;
  if (before) by("tabs").querySelector(`[data-tab="${before}"]`)?.focus();
}

function arrows(event) {
  const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!next) return;
  event.stopPropagation();
  const other = event.currentTarget[next];
  if (!other) return;
  other.focus();
  other.click();
}

let showing = null;
function drawPage() {
  const isOnList = view.tab === "list";
  by("layout").classList.toggle("on-runs", isOnList);
  by("layout").classList.toggle("no-side", !view.side);
  if (isOnList && innerWidth > 820) return set({ tab: "curves" });
  const page = PAGES[view.tab] ?? PAGES.curves;
  const hint = hintFor(view.tab);
  const wanted = hint ?? page.element;
  if (showing !== wanted) {
    fill(by("page"), wanted);
    showing = wanted;
    by("page").scrollTop = 0;
  }
  by("page").classList.toggle("is-flush", !hint && view.tab === "table");
  if (!hint) page.draw();
  return undefined;
}

const HINTS = {
  empty: h("div", { class: "hint" }, h("h2", {}, "No runs here yet"), h("p", {}, "Every folder with a config.yaml and metrics is a run. They appear as soon as they start."), h("code", {}, "etude train lenet5/baseline")),
  none: h("div", { class: "hint" }, h("h2", {}, "No run is selected"), h("p", {}, "Tick runs in the list to draw their curves. Press "), h("p", {}, h("kbd", {}, "j"), " and ", h("kbd", {}, "k"), " to move, ", h("kbd", {}, "space"), " to tick, ", h("kbd", {}, "?"), " for all keys.")),
  wait: h("div", { class: "hint" }, h("p", {}, "Reading runs …")),
};
function hintFor(tab) {
  if (!data.loaded) return HINTS.wait;
  if (!data.runs.size) return tab === "alerts" ? null : HINTS.empty;
  return !chosen().length && ["curves", "tasks", "layers", "media"].includes(tab) ? HINTS.none : null;
}

function drawTools() {
  fill(by("top-tools"), iconButton("link", "Copy a link to this view", copyLink), iconButton(isDark() ? "sun" : "moon", "Dark or light", () => globalThis.switchTheme(), { id: "theme" }), iconButton("help", "Keys (?)", help));
}

async function copyLink() {
  history.replaceState(null, "", address());
  try {
    await navigator.clipboard.writeText(location.href);
    toast("Link copied.");
  } catch {
    toast("The address of the page is the link.");
  }
}

function options(select, entries, value) {
  const all = entries.some(([key]) => key === value) ? entries : [...entries, [value, value]];
  fillOnce(select, JSON.stringify(all), () => all.map(([key, label]) => h("option", { value: key }, label)));
  select.value = value;
}

function drawSideTools() {
  const keys = differing(present()).map((key) => [key, key]);
  const own = [["started", "started"], ["name", "name"], ["state", "state"], ["progress", "progress"], ["eta", "time left"], ["best", "best"], ["last", "last"], ["duration", "duration"], ["step", "step"], ["tags", "tags"]];
  options(by("sort"), [...own, ...keys], view.sort.replace(/^-/, ""));
  options(by("group"), [["", "nothing"], ["name", "name"], ["folder", "folder"], ["state", "state"], ["tags", "tags"], ...keys], view.group);
  by("direction").textContent = view.sort.startsWith("-") ? "↓" : "↑";
  const archived = [...data.runs.values()].filter((run) => run.archived).length;
  const count = chosen().length;
  const press = (label, isOn, onclick) => h("button", { type: "button", class: "mini", "aria-pressed": String(isOn), onclick }, label);
  fillOnce(by("side-row"), JSON.stringify([count, data.runs.size, view.group, view.aggregate, archived, view.archived]), () => [h("span", {}, `${count} of ${data.runs.size} shown`),
    count ? h("button", { type: "button", class: "mini", onclick: () => set({ runs: [] }) }, "none") : null,
    view.group ? press("mean ± range", view.aggregate, () => set({ aggregate: !view.aggregate })) : null,
    archived || view.archived ? press(`archived ${archived}`, view.archived, () => set({ archived: !view.archived })) : null]);
  if (document.activeElement !== by("search")) by("search").value = view.q;
}

function bindSide() {
  makeSide(by("list"));
  fill(by("side-toggle"), icon("side"));
  by("side-toggle").addEventListener("click", () => set({ side: !view.side }));
  by("search").addEventListener("input", (event) => set({ q: event.target.value }));
  by("sort").addEventListener("change", (event) => set({ sort: (view.sort.startsWith("-") ? "-" : "") + event.target.value }));
  by("direction").addEventListener("click", () => set({ sort: view.sort.startsWith("-") ? view.sort.slice(1) : `-${view.sort}` }));
  by("group").addEventListener("change", (event) => set({ group: event.target.value }));
}

/** Without a choice: the running ones, or else the newest. */
function firstChoice() {
  const runs = [...data.runs.values()].filter((run) => !run.archived).sort((a, b) => (b.started ?? 0) - (a.started ?? 0));
  const live = runs.filter((run) => run.state === "running");
  return (live.length ? live : runs).slice(0, 5).map((run) => run.id);
}

/** A resume rewrites the curve of a run; it may have happened while nobody listened. */
function noticeResume(run) {
  const before = data.runs.get(run.id);
  if (before && before.resumes !== run.resumes) emit("sse-restart", { run: run.id });
}

async function loadRuns() {
  const found = await get("runs");
  found.runs.forEach(noticeResume);
  data.root = found.root;
  data.runs = new Map(found.runs.map((run) => [run.id, run]));
  data.loaded = true;
  data.sweeps = (await get("sweeps")).sweeps;
  if (view.runs == null) view.runs = firstChoice();
  fill(by("root"), folderName());
  by("root").title = found.root;
  emit("runs");
}

const PARTS = {
  runs: () => {
    drawSideTools();
    drawSide();
  },
  tabs: drawTabs, page: drawPage, bar: () => makeBar(by("bar")), strip: () => drawStrip(by("strip")),
};
const waiting = new Set();
/** Draw parts of the page at the next frame. */
function later(...parts) {
  if (!waiting.size) {
    requestAnimationFrame(() => {
      const now = [...waiting];
      waiting.clear();
      now.forEach((part) => PARTS[part]());
    });
  }
  parts.forEach((part) => waiting.add(part));
}

function bind() {
  const isOnlyDrawn = new Set(["zoom", "smooth", "logx", "logy", "outliers", "events"]);
  on("view", (changed) => {
    if (changed.has("x")) setUnit(view.x);
    if ([...changed].every((key) => isOnlyDrawn.has(key))) {
      if (changed.has("zoom")) refreshSoon();
      later("bar");
      return redraw();
    }
    if (changed.has("runs")) listen();
    return later("runs", "tabs", "page", "bar", "strip");
  });
  on("runs", () => {
    later("runs", "tabs", "page", "strip", "bar");
    listen();
  });
  on("sse-runs", (some) => {
    for (const run of Array.isArray(some) ? some : (some.runs ?? [some])) {
      const before = data.runs.get(run.id);
      noticeResume(run);
      data.runs.set(run.id, { ...before, ...run });
      if (!before) toast(`New run: ${run.name}`);
      if (!before && data.runs.size === 1 && !view.runs?.length) set({ runs: [run.id] });
      if (JSON.stringify(before?.names) !== JSON.stringify(run.names)) later("page", "tabs");
    }
    later("runs", "strip");
    if (["run", "table", "sweeps"].includes(view.tab) || !showing) later("page");
    listen();
  });
  on("sse-sweeps", (some) => {
    data.sweeps = some;
    emit("sweeps");
    later("tabs");
  });
  on("sse-removed", (some) => {
    some.forEach((id) => data.runs.delete(id));
    toggle(some, false);
    later("runs", "page", "strip");
  });
  on("points", () => {
    redraw();
    later("strip");
  });
  on("detail", () => {
    redraw();
    if (view.tab === "run") later("page");
  });
  on("refetch", refresh);
  on("alerts", () => later("tabs", ...(view.tab === "alerts" ? ["page"] : [])));
  on("panel", () => later("page"));
  on("reconnected", () => loadRuns().catch(() => {}));
  on("connection", (isLive) => {
    by("connection").className = `connection ${isLive ? "is-live" : "is-gone"}`;
    by("connection").textContent = isLive ? "live" : "reconnecting";
    by("banner").hidden = isLive;
    by("banner").textContent = isLive ? "" : "The server does not answer. What is shown stays; the page reconnects by itself.";
  });
  addEventListener("theme", () => {
    drawTools();
    later("runs", "page", "strip");
    redraw();
  });
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });
  by("skip").addEventListener("click", (event) => {
    event.preventDefault();
    by("main").focus();
  });
}

let soon = 0;
let soonAt = 0;
/** Fetch the shown range, at most every 120 ms while it moves. */
function refreshSoon() {
  clearTimeout(soon);
  const wait = Math.max(40, 120 - (performance.now() - soonAt));
  soon = setTimeout(() => {
    soonAt = performance.now();
    refresh();
  }, wait);
}

async function begin() {
  fromAddress();
  setUnit(view.x);
  bindSide();
  bind();
  keys();
  drawTools();
  later("runs", "tabs", "page", "bar");
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      await loadRuns();
      break;
    } catch (error) {
      emit("connection", false);
      by("banner").textContent = `The server does not answer: ${error.message}. Trying again …`;
      await new Promise((done) => setTimeout(done, wait));
    }
  }
}

begin();
