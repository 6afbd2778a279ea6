// What happened in a run, placed on the x axis.

import { get } from "./api.js";
import { num } from "./format.js";
import { curve, indexAt } from "./series.js";
import { data, emit, on, view } from "./state.js";

const KINDS = new Set(["checkpoint", "resume", "warning", "recovery", "unfreeze"]);
const details = new Map();

/** Return all that the server knows of a run: config, environment, events; null until it is here. */
export function detail(id) {
  const found = details.get(id);
  if (!found || found.isStale) {
    details.set(id, { state: "loading", ...found, isStale: false });
    get("run", { run: id }).then(
      (one) => {
        details.set(id, { state: "here", ...one });
        emit("detail", id);
      },
      (error) => {
        details.set(id, { state: "failed", error: error.message });
        emit("detail", id);
      },
    );
  }
  if (!found) return null;
  return found.state === "loading" ? null : found;
}

/** Ask again, as after the end of a run; what was known is shown until then. */
export function forget(id) {
  if (details.has(id)) details.get(id).isStale = true;
}

const placed = new Map();
/** Return marks of one run: {phases, ticks}, both in order. */
export function marksOf(id) {
  const run = data.runs.get(id);
  const found = detail(id);
  if (!run || !found?.events) return { phases: [], ticks: [] };
  const rates = curve(id, "train", "lr").full;
  const ruler = view.x === "step" ? null : rulerOf(run);
  const key = `${view.x} ${found.events.length} ${ruler?.x.length} ${ruler?.x.at(-1)} ${rates?.x.length} ${rates?.version}`;
  if (placed.get(id)?.key !== key) placed.set(id, { key, ...place(run, found, ruler) });
  return placed.get(id);
}

const rulers = new Map();
/** Return where steps are on the x axis, {steps, x}, both rising; asks again when the run is much further. */
function rulerOf(run) {
  const key = `${run.id}\n${view.x}`;
  const found = rulers.get(key);
  if (!found || (found.steps && run.step > 1.1 * (found.steps.at(-1) ?? 0) + 10 && performance.now() - found.asked > 5000)) {
    rulers.set(key, { steps: [], x: [], ...found, asked: performance.now() });
    get("ruler", { run: run.id, x: view.x }).then((ruler) => {
      rulers.set(key, { ...ruler, asked: performance.now() });
      emit("detail", run.id);
    }, () => {});
  }
  return rulers.get(key);
}

function between({ steps, x }, step) {
  const at = Math.min(Math.max(indexAt(steps, step), 0), steps.length - 2);
  if (steps.length < 2 || step == null) return x[0] ?? null;
  return Math.max(0, x[at] + ((step - steps[at]) / (steps[at + 1] - steps[at] || 1)) * (x[at + 1] - x[at]));
}

function place(run, found, ruler) {
  const at = (event) => (ruler ? between(ruler, event.step) : event.step);
  const phases = [];
  const ticks = rateChanges(run);
  for (const event of found.events) {
    const x = at(event);
    if (x == null || !Number.isFinite(x)) continue;
    if (event.kind === "phase") {
      if (phases.length) phases.at(-1).end = x;
      phases.push({ x, end: null, number: phases.length, label: String(event.phase ?? event.message ?? ""), kind: "phase", event, run });
    } else if (KINDS.has(event.kind)) ticks.push({ x, kind: event.kind, event, run });
  }
  ticks.sort((a, b) => a.x - b.x);
  return { phases, ticks };
}

function rateChanges(run) {
  const set = curve(run.id, "train", "lr").full;
  if (!set || set.x.length < 3) return [];
  const found = [];
  for (let i = 2; i < set.x.length; i++) {
    const [a, b, c] = [set.last[i - 2], set.last[i - 1], set.last[i]];
    if (a == null || b !== a || c == null || Math.abs(c - b) <= 0.01 * Math.abs(b)) continue;
    found.push({ x: set.x[i], kind: "rate", event: { kind: "rate", message: `learning rate ${num(b)} → ${num(c)}` }, run });
  }
  return found.length > 60 ? [] : found;
}

on("sse-event", ({ run, record }) => {
  const found = details.get(run);
  const isKnown = found?.events?.slice(-20).some((one) => one.time === record.time && one.kind === record.kind && one.message === record.message);
  if (found?.events && !isKnown) found.events.push(record);
  emit("detail", run);
});
on("sse-restart", ({ run }) => forget(run));
