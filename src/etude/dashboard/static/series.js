// The points that the page has: for each curve one set over its whole length, and one for the range that is shown.
//
// A set has, for every pixel or so, the smallest, largest and last value (`raw`: these are the points themselves). New
// points come from the stream and are appended; nothing is fetched twice.

import { get, known } from "./api.js";
import { data, emit, on } from "./state.js";

const MOST = 6000; // points of a set, after which neighbours are joined
const AGAIN_MS = 1500;
const KEPT = 400; // records of a run that are kept for curves still on their way
const curves = new Map();
const recent = new Map();
let unit = "step";

const keyOf = (run, split, name) => `${run}\n${split}\n${name}`;

/** Return the curve of a metric; its sets are empty until `load` fetched them. */
export function curve(run, split, name) {
  const key = keyOf(run, split, name);
  if (!curves.has(key)) curves.set(key, { run, split, name, full: null, part: null, asked: false });
  return curves.get(key);
}

/** Forget everything about the other units when the x axis changes. */
export function setUnit(x) {
  if (x !== unit) {
    unit = x;
    curves.clear();
  }
}

function setOf(found, from, to) {
  const isAll = from != null || found.x.length >= (found.total ?? 0);
  const raw = isAll && found.exact !== false && found.x.every((_, i) => found.min[i] === found.max[i]);
  const kept = { from, to, raw, exact: found.exact !== false, nonfinite: found.nonfinite ?? [], version: 0 };
  return { ...kept, x: found.x, min: found.min, max: found.max, last: found.last };
}

/** Whether a curve has points enough for a range. */
export function covers(one, range) {
  if (!one.full || one.asked) return false;
  if (!range || one.full.raw) return true;
  const width = range[1] - range[0];
  return Boolean(one.part && one.part.from <= range[0] && one.part.to >= range[1] && one.part.to - one.part.from < 4.5 * width);
}

/** Return the set to draw for a range. */
export const shown = (one, range) => (range && !one.full?.raw && one.part && one.part.from <= range[0] && one.part.to >= range[1] ? one.part : one.full);

/** Fetch what is missing of some curves of one split; `range` is a pair or null for all. Returns whether anything came. */
export async function load(wanted, range, pixels, signal) {
  const asked = unit;
  const missing = wanted.filter((one) => (range ? one.full && !one.full.raw : !one.full || one.asked));
  for (const one of missing) if (!range) one.asked = false;
  if (!missing.length) return false;
  const runs = [...new Set(missing.map((one) => one.run))];
  const names = [...new Set(missing.map((one) => one.name))];
  const query = { run: runs, name: names, split: missing[0].split, x: asked, pixels };
  const width = range && range[1] - range[0];
  const ends = range && [range[0] - width, range[1] + width];
  if (ends) Object.assign(query, { from: ends[0], to: ends[1], pixels: 3 * pixels });
  const found = await get("series", query, { signal });
  if (asked !== unit) return false;
  for (const one of found.series) {
    const mine = curve(one.run, one.split, one.name);
    if (ends) mine.part = setOf(one, ends[0], ends[1]);
    else mine.full = setOf(one, null, null);
    if (one.exact) known(one.run, one.cursor);
    for (const record of recent.get(one.run) ?? []) add(mine, record);
  }
  const sampled = found.series.filter((one) => !one.exact).map((one) => one.run);
  if (sampled.length) setTimeout(() => askAgain(sampled), AGAIN_MS);
  for (const one of missing) one.full ??= setOf({ x: [], min: [], max: [], last: [] }, null, null);
  return true;
}

/** Ask for curves of which the server had sent some points only: it says when it has read their file, if somebody listens. */
function askAgain(runs) {
  const late = [...curves.values()].filter((one) => runs.includes(one.run) && one.full && !one.full.exact);
  for (const one of late) [one.asked, one.part] = [true, null];
  if (late.length) emit("refetch");
}
on("sse-exact", ({ run }) => askAgain([run]));

/** Return the place of a record on the x axis; null if it has none. */
function xOf(run, record) {
  if (unit === "time") return record.elapsed ?? null;
  if (unit === "flops") {
    const tokens = record.tokens ?? run.metrics?.tokens;
    return run.parameters && tokens != null ? 6 * run.parameters * tokens : null;
  }
  if (unit === "epoch") {
    const steps = run.steps_per_epoch ?? (run.total_epochs ? run.total_steps / run.total_epochs : null);
    return steps ? record.step / steps : null;
  }
  return record[unit] ?? run.metrics?.[unit] ?? null; // records of validation have no samples and tokens of their own
}

function add(one, record) {
  const run = data.runs.get(one.run);
  if (record.split !== one.split || !one.full || !run || !(one.name in record)) return;
  const x = xOf(run, record);
  if (x == null) return;
  for (const set of [one.full, one.part]) {
    if (!set || (set.to != null && x > set.to) || (set.x.length && x <= set.x.at(-1))) continue;
    const value = record[one.name];
    if (value == null) set.nonfinite.push(x);
    for (const [key, what] of [["x", x], ["min", value], ["max", value], ["last", value]]) set[key].push(what);
    if (set.x.length > MOST) halve(set);
    set.version += 1;
  }
}

function halve(set) {
  const last = set.x.length - 1;
  const joined = { x: [], min: [], max: [], last: [] };
  const extreme = (a, b, better) => (a == null ? b : b == null ? a : better(a, b));
  for (let i = 0; i <= last; i += 2) {
    const j = Math.min(i + 1, last);
    joined.x.push(set.x[j]);
    joined.min.push(extreme(set.min[i], set.min[j], Math.min));
    joined.max.push(extreme(set.max[i], set.max[j], Math.max));
    joined.last.push(set.last[j]);
  }
  Object.assign(set, joined, { raw: false });
}

/** Return the first and last x of all curves of some runs. */
export function extent(runs) {
  const wanted = new Set(runs);
  let [low, high] = [Infinity, -Infinity];
  for (const one of curves.values()) {
    if (!wanted.has(one.run) || !one.full?.x.length) continue;
    low = Math.min(low, one.full.x[0]);
    high = Math.max(high, one.full.x.at(-1));
  }
  return low <= high ? [low, high] : null;
}

/** Return the index of the last point at or before x; -1 if there is none. */
export function indexAt(xs, x) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Return the index of the point nearest to x. */
export function nearest(xs, x) {
  const at = indexAt(xs, x);
  if (at < 0) return xs.length ? 0 : -1;
  return at + 1 < xs.length && xs[at + 1] - x < x - xs[at] ? at + 1 : at;
}

/** Whether a line is smoothed: short ones, such as those of validation, and settings are left as they are. */
export const isSmoothed = ({ full, name }, amount) => amount > 0 && (full?.x.length ?? 0) >= 30 && !/^lr(\/|$)|^phase$|^skipped$|\/weight$/.test(name);

/** Return the exponential moving average of a set's values: it forgets by distance on the x axis, so zooming keeps it. */
export function smoothed(set, amount, span, full) {
  const key = `${amount} ${span} ${set.version} ${set.x.length}`;
  if (set.smoothKey === key) return set.smooth;
  const rate = span > 0 ? Math.min(400, Math.max(full?.x.length ?? set.x.length, 2)) / span : 1;
  const result = new Array(set.x.length);
  let [mean, before] = [null, 0];
  if (full && full !== set && set.x.length) {
    const at = indexAt(full.x, set.x[0]);
    if (at >= 0) [mean, before] = [smoothed(full, amount, span, full)[at], set.x[0]];
  }
  for (let i = 0; i < set.x.length; i++) {
    const value = set.last[i];
    if (value != null) {
      const kept = mean == null ? 0 : amount ** Math.max((set.x[i] - before) * rate, 1e-9);
      mean = mean == null ? value : mean * kept + value * (1 - kept);
      before = set.x[i];
    }
    result[i] = value == null ? null : mean;
  }
  set.smoothKey = key;
  set.smooth = result;
  return result;
}

/** Return the mean of several sets with the range over them, on a common grid: how a group of runs is drawn. */
export function together(sets, range, pixels) {
  const made = { x: [], min: [], max: [], last: [], raw: false, nonfinite: [], version: 0, members: sets.length };
  const points = Math.max(...sets.map((set) => set.x.length), 0);
  const count = Math.min(pixels, Math.max(points, 2));
  for (let i = 0; i < count; i++) {
    const x = range[0] + ((range[1] - range[0]) * i) / (count - 1);
    const values = sets.map((set) => between(set, x)).filter((value) => value != null);
    if (!values.length) continue;
    made.x.push(x);
    made.min.push(Math.min(...values));
    made.max.push(Math.max(...values));
    made.last.push(values.reduce((a, b) => a + b, 0) / values.length);
  }
  return made;
}

function between(set, x) {
  const at = indexAt(set.x, x);
  if (at < 0 || (at === set.x.length - 1 && x > set.x[at])) return null;
  const [a, b] = [set.last[at], set.last[at + 1]];
  if (b == null || a == null) return a;
  return a + ((b - a) * (x - set.x[at])) / (set.x[at + 1] - set.x[at]);
}

on("sse-points", ({ run, records, elapsed }) => {
  if (elapsed) records.forEach((record, i) => (record.elapsed = elapsed[i]));
  const known = data.runs.get(run)?.metrics ?? {};
  for (const record of records) for (const key of ["samples", "tokens"]) if (record[key] != null) known[key] = record[key];
  const kept = [...(recent.get(run) ?? []), ...records].slice(-KEPT);
  recent.set(run, kept);
  for (const one of curves.values()) if (one.run === run) records.forEach((record) => add(one, record));
  emit("points", run, records);
});

on("sse-restart", ({ run }) => {
  recent.delete(run);
  for (const one of curves.values()) if (one.run === run) [one.asked, one.part] = [true, null];
  emit("refetch");
});

