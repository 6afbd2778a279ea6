// What happened in a run, placed on the x axis.

import { get } from "./api.js";
import { num } from "./format.js";
import { curve } from "./series.js";
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
  const key = `${view.x} ${found.events.length} ${run.step} ${rates?.x.length} ${rates?.version}`;
  if (placed.get(id)?.key !== key) placed.set(id, { key, ...place(run, found) });
  return placed.get(id);
}

function place(run, found) {
  const at = placer(run, found.events);
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

/** Return a function from events to x: steps are known exactly, other units follow from the run's own curve. */
function placer(run, events) {
  if (view.x === "step") return (event) => event.step;
  if (view.x === "time") return timer(events);
  if (view.x === "epoch") {
    const steps = run.steps_per_epoch ?? events.find((one) => one.steps_per_epoch)?.steps_per_epoch;
    return (event) => (steps ? event.step / steps : null);
  }
  const known = run.metrics?.[view.x];
  return (event) => (known && run.step ? (event.step * known) / run.step : null);
}

function timer(events) {
  let [spent, begun, last] = [0, null, null];
  const at = new Map();
  for (const event of events) {
    if (event.kind === "start" || event.kind === "resume") {
      if (begun != null) spent += Math.max(0, last - begun);
      begun = event.time;
    }
    at.set(event, spent + (begun == null ? 0 : event.time - begun));
    last = event.time;
    if (event.kind === "end" && begun != null) {
      spent += Math.max(0, event.time - begun);
      begun = null;
    }
  }
  return (event) => at.get(event);
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
  if (found?.events) found.events.push(record);
  emit("detail", run);
});
on("sse-restart", ({ run }) => forget(run));
