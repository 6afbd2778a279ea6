// One sweep: the history of its values, every trial as a line through its settings, which settings matter, its trials.

import { get } from "./api.js";
import { fill, fillOnce, h, svg } from "./dom.js";
import { duration, num, percent, plain, short } from "./format.js";
import { spectrum } from "./palette.js";
import { data, on, openRun, set, view } from "./state.js";
import { hideTip, showWords } from "./tip.js";

const LEFT = 58, RIGHT = 14, TOP = 10, BOTTOM = 26;
const STATES = { complete: "finished", pruned: "stopped", failed: "failed", running: "running", waiting: "stopped", stopped: "interrupted" };

/** A running trial whose run is not running any more was stopped with its sweep. */
function stateOf(trial) {
  const runs = trial.runs.map((id) => data.runs.get(id)).filter(Boolean);
  const isOver = runs.length && !runs.some((run) => ["running", "reading", "finished"].includes(run.state));
  return trial.state === "running" && isOver ? "stopped" : trial.state;
}

const stateMark = (state, title) => h("span", { class: `state is-${STATES[state]}`, title: title || state }, h("i", { class: "dot" }), state);
const open = (trial) => trial.runs.length && openRun(trial.runs[0]);
const settings = (trial) => Object.entries(trial.params).map(([key, value]) => `${key} = ${typeof value === "number" ? num(value) : plain(value)}`);

function words(sweep, trial) {
  return [`trial ${trial.number} · ${stateOf(trial)}`, `${sweep.metric} ${num(trial.value)}`, ...settings(trial)];
}

/** Let an element of a chart tell and open its trial. */
function live(node, box, sweep, trial) {
  node.addEventListener("pointermove", (event) => {
    const bounds = box.getBoundingClientRect();
    showWords(box, event.clientX - bounds.left, event.clientY - bounds.top, ...words(sweep, trial));
  });
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("click", () => open(trial));
  if (trial.runs.length) node.classList.add("is-link");
  return node;
}

const label = (x, y, text, anchor = "middle", kind = "tick") => svg("text", { x, y, "text-anchor": anchor, class: kind }, text);

/** Return a scale from values to pixels, and its ticks; logarithmic where values differ by orders of magnitude. */
function scaleOf(values, low, high) {
  let [least, most] = [Math.min(...values), Math.max(...values)];
  if (least === most) [least, most] = [least - (Math.abs(least) || 1) / 10, most + (Math.abs(most) || 1) / 10];
  const isLog = least > 0 && most / least > 100;
  const to = isLog ? Math.log10 : (one) => one;
  const [a, b] = [to(least), to(most)];
  const at = (one) => low + ((to(one) - a) / (b - a)) * (high - low);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => (isLog ? 10 ** (a + share * (b - a)) : a + share * (b - a)));
  return { at, ticks, isLog };
}

/** Values by trial, and the best so far. */
function drawHistory(box, sweep) {
  const width = box.clientWidth, height = 240;
  const known = sweep.trials.filter((one) => one.value != null);
  if (!known.length) return fill(box, h("p", { class: "nothing" }, "No trial has a value yet."));
  const last = Math.max(...sweep.trials.map((one) => one.number), 1);
  const x = (number) => LEFT + (number / last) * (width - LEFT - RIGHT);
  const y = scaleOf(known.map((one) => one.value), height - BOTTOM, TOP);
  const grid = y.ticks.map((one) => [svg("line", { x1: LEFT, x2: width - RIGHT, y1: y.at(one), y2: y.at(one), class: "rule-line" }), label(LEFT - 6, y.at(one) + 4, short(one), "end")]);
  const ticks = [...new Set([0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * last)))].map((one) => label(x(one), height - 8, one));
  let best = null;
  let path = "";
  for (const one of known.filter((trial) => trial.state === "complete")) {
    if (best == null || (sweep.mode === "max" ? one.value > best : one.value < best)) best = one.value;
    path += path ? `H${x(one.number)}V${y.at(best)}` : `M${x(one.number)},${y.at(best)}`;
  }
  const dots = known.map((one) => live(svg("circle", { cx: x(one.number), cy: y.at(one.value), r: 4, class: `trial is-${stateOf(one)}`, "data-trial": one.number }), box, sweep, one));
  return fill(box, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${sweep.metric} by trial` },
    grid, ticks, path && svg("path", { d: `${path}H${width - RIGHT}`, class: "best-line" }), dots));
}

/** Where a value is on the axis of its setting, from 0 to 1. */
function share(axis, value) {
  if (axis.values) {
    const at = axis.values.findIndex((one) => one === value);
    return at < 0 ? null : axis.values.length > 1 ? at / (axis.values.length - 1) : 0.5;
  }
  const to = axis.log ? Math.log : (one) => one;
  const found = (to(value) - to(axis.low)) / (to(axis.high) - to(axis.low));
  return Number.isFinite(found) ? Math.min(Math.max(found, 0), 1) : null;
}

const MOST_TICKS = 12;
function ticksOf(axis) {
  if (axis.values) return axis.values.length > MOST_TICKS ? [] : axis.values.map((one) => [share(axis, one), plain(one)]);
  return [0, 0.5, 1].map((at) => [at, short(axis.log ? axis.low * (axis.high / axis.low) ** at : axis.low + at * (axis.high - axis.low))]);
}

/** The colour of a value by its rank: the best is bright in the dark, and dark on white. */
function colors(sweep, trials) {
  const sorted = trials.toSorted((a, b) => (sweep.mode === "max" ? b.value - a.value : a.value - b.value));
  const rank = new Map(sorted.map((one, i) => [one.number, sorted.length > 1 ? i / (sorted.length - 1) : 0]));
  return (one) => tint(rank.get(one.number));
}
/** The colour of a rank from 0, the best, to 1. */
const tint = (rank) => (document.documentElement.dataset.theme === "dark" ? spectrum(0.95 - 0.7 * rank) : spectrum(0.1 + 0.75 * rank));

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Every complete trial as a line through its settings, coloured by its value. */
function drawParallel(box, sweep) {
  const done = sweep.trials.filter((one) => one.state === "complete" && one.value != null);
  const keys = Object.keys(sweep.space);
  if (done.length < 2 || !keys.length) return fill(box, h("p", { class: "nothing" }, "Two complete trials are needed."));
  const width = Math.max(box.clientWidth, 140 * keys.length + 104), height = 280, top = 30, bottom = 18, side = 52;
  const x = (i) => side + (i / keys.length) * (width - 2 * side);
  const value = scaleOf(done.map((one) => one.value), height - bottom, top);
  const color = colors(sweep, done);
  const axes = keys.map((key, i) => [svg("line", { x1: x(i), x2: x(i), y1: top, y2: height - bottom, class: "axis-line" }), label(x(i), 14, shortened(key.split(".").slice(-2).join("."), 22), "middle", "axis-name"),
    ticksOf(sweep.space[key]).map(([at, text]) => label(x(i) + 5, height - bottom - at * (height - bottom - top) + 4, shortened(text, 12), "start"))]);
  const end = [svg("line", { x1: x(keys.length), x2: x(keys.length), y1: top, y2: height - bottom, class: "axis-line" }), label(x(keys.length), 14, sweep.metric, "middle", "axis-name"), value.ticks.filter((_, i) => i % 2 === 0).map((one) => label(x(keys.length) + 5, value.at(one) + 4, short(one), "start"))];
  const lines = done.toSorted((a, b) => (sweep.mode === "max" ? a.value - b.value : b.value - a.value)).map((one) => {
    const places = keys.map((key, i) => [x(i), share(sweep.space[key], one.params[key])]).filter(([, at]) => at != null).map(([left, at]) => `${left},${height - bottom - at * (height - bottom - top)}`);
    return live(svg("polyline", { points: [...places, `${x(keys.length)},${value.at(one.value)}`].join(" "), class: "trial-line", stroke: color(one), "data-trial": one.number }), box, sweep, one);
  });
  return fill(box, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Settings of the trials" }, lines, axes, end));
}

function drawImportance(box, sweep) {
  const shares = Object.entries(sweep.importance).toSorted((a, b) => b[1] - a[1]);
  fill(box, shares.length ? shares.map(([key, one]) => h("div", { class: "share" }, h("span", { title: key }, key), h("div", { class: "bar" }, h("i", { style: { width: `${100 * one}%` } })), h("b", { class: "n" }, percent(one))))
    : h("p", { class: "nothing" }, "Known after four complete trials."));
}

let order = "number";
const COLUMNS = (sweep) => [["number", "Trial", (one) => one.number], ["state", "State", stateOf], ["value", sweep.metric, (one) => one.value], ["time", "Time", (one) => (one.start == null ? null : (one.end ?? Date.now() / 1000) - one.start)],
  ...Object.keys(sweep.space).map((key) => [`p:${key}`, key.split(".").at(-1), (one) => one.params[key]])];

function cell(key, value, trial, sweep) {
  if (key === "number") return h("td", {}, trial.runs.length ? h("button", { type: "button", class: "name link", title: "Open its run", onclick: () => open(trial) }, `trial ${value}`) : `trial ${value}`, sweep.best?.number === value ? h("span", { class: "tag" }, "best") : null);
  if (key === "state") return h("td", {}, stateMark(value, trial.error), trial.error ? h("small", { class: "muted" }, ` ${trial.error}`) : null);
  if (key === "value") return h("td", { class: "n" }, num(value));
  if (key === "time") return h("td", { class: "n" }, duration(value));
  return h("td", { class: "n" }, typeof value === "number" ? num(value) : plain(value));
}

function drawTable(box, sweep) {
  const columns = COLUMNS(sweep);
  const read = (columns.find(([key]) => key === order.replace(/^-/, "")) ?? columns[0])[2];
  const sign = order.startsWith("-") ? -1 : 1;
  const rows = sweep.trials.toSorted((a, b) => {
    const [one, other] = [read(a), read(b)];
    if (one == null || other == null) return (one == null) - (other == null);
    return sign * (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other)));
  });
  const sort = (key) => {
    order = order === key ? `-${key}` : key;
    drawTable(box, sweep);
  };
  fill(box, h("table", { class: "trials" }, h("thead", {}, h("tr", {}, columns.map(([key, title]) => h("th", { scope: "col", "aria-sort": order === key ? "ascending" : order === `-${key}` ? "descending" : "none" }, h("button", { type: "button", title: key.replace(/^p:/, ""), onclick: () => sort(key) }, title, order === key ? " ↑" : order === `-${key}` ? " ↓" : ""))))),
    h("tbody", {}, rows.map((trial) => h("tr", { dataset: { trial: trial.number } }, columns.map(([key, , of]) => cell(key, of(trial), trial, sweep)))))));
}

/** Tick the runs of a sweep, and show their curves. */
const showCurves = (sweep) => set({ runs: sweep.trials.flatMap((one) => one.runs), tab: "curves" }, { push: true });

function headOf(sweep) {
  const states = sweep.trials.map(stateOf);
  const counts = [...new Set(states)].map((state) => `${states.filter((one) => one === state).length} ${state}`).join(", ");
  const facts = [["trials", `${sweep.trials.length} of ${sweep.total ?? "?"}`], ["states", counts], ["best", sweep.best ? `${num(sweep.best.value)} (trial ${sweep.best.number})` : "–"], ["metric", `${sweep.metric} (${sweep.mode})`]];
  const choice = h("select", { "aria-label": "Sweep", onchange: (event) => set({ sweep: event.target.value }) }, data.sweeps.map((one) => h("option", { value: one.id, selected: one.id === sweep.id }, one.id === "." ? one.name : one.id)));
  return [h("div", { class: "run-head" }, h("h2", {}, sweep.experiment ?? sweep.name), data.sweeps.length > 1 ? choice : h("span", { class: "muted id" }, sweep.id === "." ? sweep.name : sweep.id), h("button", { type: "button", class: "button", onclick: () => showCurves(sweep) }, "Curves of all trials")),
    h("dl", { class: "facts" }, facts.map(([key, one]) => h("div", {}, h("dt", {}, key), h("dd", {}, one))))];
}

const card = (title, box, legend = null) => h("section", { class: "card", "aria-label": title }, h("header", {}, h("h2", {}, title), legend), box);

export function sweepsPage() {
  const boxes = ["head", "history", "parallel", "importance", "table"].map((name) => [name, h("div", { class: `sweep-${name}` })]);
  const box = Object.fromEntries(boxes);
  const ramp = h("span", { class: "legend" });
  const element = h("div", { class: "sweep-page" }, box.head, h("div", { class: "cards" }, card("History", box.history, h("span", { class: "legend" }, h("i", { class: "key best-key" }), "best so far")), card("Importance of settings", box.importance), h("div", { class: "wide" }, card("Settings", box.parallel, ramp)), h("div", { class: "wide" }, card("Trials", box.table))));
  let found = null;
  let asked = "";
  const wanted = () => (data.sweeps.some((one) => one.id === view.sweep) ? view.sweep : data.sweeps[0]?.id);
  const show = () => {
    if (!found || view.tab !== "sweeps") return;
    const states = found.trials.map(stateOf);
    fillOnce(box.head, JSON.stringify([found, states, data.sweeps.map((one) => one.id)]), () => headOf(found));
    fillOnce(ramp, document.documentElement.dataset.theme, () => ["best", ...[0, 0.25, 0.5, 0.75, 1].map((at) => h("i", { class: "swatch-dot", style: { "--run": tint(at) } })), "worst"]);
    const drawn = JSON.stringify([found, states, box.history.clientWidth, document.documentElement.dataset.theme]);
    if (element.drawnWith === drawn) return;
    element.drawnWith = drawn;
    drawHistory(box.history, found);
    drawParallel(box.parallel, found);
    drawImportance(box.importance, found);
    drawTable(box.table, found);
  };
  const ask = () => {
    const id = wanted();
    const key = JSON.stringify(data.sweeps.find((one) => one.id === id));
    if (!id || key === asked) return show();
    asked = key;
    return get("sweep", { sweep: id }).then((answer) => {
      if (asked !== key) return;
      found = answer;
      show();
    }, (error) => {
      asked = "";
      fill(box.head, h("p", { class: "nothing" }, error.message));
    });
  };
  new ResizeObserver(() => show()).observe(box.history);
  on("sweeps", () => view.tab === "sweeps" && ask());
  return { element, isUseful: () => view.tab === "sweeps" || data.sweeps.length > 0, draw: () => (data.sweeps.length ? ask() : fill(box.head, h("div", { class: "hint" }, h("h2", {}, "No sweeps here"), h("p", {}, "A sweep appears with its first trial."), h("code", {}, "etude sweep EXPERIMENT optimizer.lr=1e-4..1e-1:log --trials 20")))) };
}
