// Which runs the list shows: search, order, groups, and the keys of configs in which runs differ.

import { plain } from "./format.js";
import { colorOf } from "./palette.js";
import { data, view } from "./state.js";

const OWN = {
  name: (run) => run.name,
  id: (run) => run.id,
  state: (run) => run.state,
  progress: (run) => run.progress,
  eta: (run) => run.left_s,
  best: (run) => run.best?.value ?? null,
  last: (run) => (typeof run.last === "object" ? (run.last?.value ?? null) : run.last),
  duration: (run) => run.duration_s,
  started: (run) => run.started,
  step: (run) => run.step,
  epoch: (run) => run.epoch,
  resumes: (run) => run.resumes,
  phase: (run) => run.phase,
  tags: (run) => (run.tags ?? []).join(" "),
  tag: (run) => (run.tags ?? []).join(" "),
  folder: (run) => run.id.split("/").slice(0, -1).join("/") || ".",
  monitor: (run) => run.monitor,
};

/** Return a property, config value or last metric of a run. */
export function valueOf(run, key) {
  if (Object.hasOwn(OWN, key)) return OWN[key](run);
  const has = [run.config, run.metrics].find((one) => one && Object.hasOwn(one, key));
  return has?.[key] ?? null;
}

/** Return the config key that somebody means: whole, or its last part. */
function keyOf(run, typed) {
  if (Object.hasOwn(OWN, typed) || Object.hasOwn(run.config ?? {}, typed)) return typed;
  return Object.keys(run.config ?? {}).find((key) => key.endsWith(`.${typed}`)) ?? typed;
}

const TEST = /^([\w./-]+)(!=|>=|<=|=|>|<)(.*)$/;

function matches(run, word) {
  const test = TEST.exec(word);
  if (!test) {
    const text = `${run.name} ${run.id} ${(run.tags ?? []).join(" ")} ${run.state}`.toLowerCase();
    return text.includes(word.toLowerCase());
  }
  const [, key, relation, wanted] = test;
  const value = valueOf(run, keyOf(run, key));
  if (relation === ">" || relation === "<" || relation === ">=" || relation === "<=") {
    const [a, b] = [Number(value), Number(wanted)];
    return value != null && wanted !== "" && { ">": a > b, "<": a < b, ">=": a >= b, "<=": a <= b }[relation];
  }
  const isSame = wanted === "" || String(value).toLowerCase() === wanted.toLowerCase() || (wanted !== "" && Number(value) === Number(wanted))
    || ((key === "tag" || key === "tags" || typeof value === "string") && String(value).toLowerCase().includes(wanted.toLowerCase()));
  return relation === "=" ? isSame : !isSame;
}

function compare(a, b) {
  if (a == null || b == null) return a == null ? (b == null ? 0 : 1) : -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Return the runs that match the search, in order. */
export function listed() {
  const words = view.q.split(/\s+/).filter(Boolean);
  const some = [...data.runs.values()].filter((run) => (view.archived || !run.archived) && words.every((word) => matches(run, word)));
  const [key, sign] = view.sort.startsWith("-") ? [view.sort.slice(1), -1] : [view.sort, 1];
  const isLate = (run) => valueOf(run, key) == null; // unknown values are last in both orders
  return some.sort((a, b) => isLate(a) - isLate(b) || sign * compare(valueOf(a, key), valueOf(b, key)) || compare(a.id, b.id));
}

/** All runs that may be listed. */
export const present = () => [...data.runs.values()].filter((run) => view.archived || !run.archived);

const cached = new Map();
/** Return the keys of configs in which runs differ: first those that all of them have. */
export function differing(runs) {
  const key = runs.map((run) => run.id).sort().join("\n");
  if (cached.has(key)) return cached.get(key);
  const seen = new Map();
  for (const run of runs) {
    for (const [name, value] of Object.entries(run.config ?? {})) {
      if (!seen.has(name)) seen.set(name, new Map());
      const text = plain(value);
      seen.get(name).set(text, (seen.get(name).get(text) ?? 0) + 1);
    }
  }
  const isIn = (values) => [...values.values()].reduce((a, b) => a + b, 0);
  const differs = [...seen].filter(([name, values]) => (values.size > 1 || isIn(values) < runs.length) && runs.length > 1 && name !== "name");
  const keys = differs.map(([name, values]) => ({ name, isRare: isIn(values) < runs.length })).sort((a, b) => a.isRare - b.isRare || a.name.localeCompare(b.name)).map(({ name }) => name);
  if (cached.size > 20) cached.clear();
  cached.set(key, keys);
  return keys;
}

/** Return the group of a run, as text. */
export function groupOf(run) {
  if (!run || !view.group) return "";
  const value = valueOf(run, view.group);
  return Object.hasOwn(OWN, view.group) ? plain(value || null) : `${view.group.split(".").at(-1)} = ${plain(value)}`;
}

/** Return rows of the list: runs, or headers with the runs below them. */
export function rows() {
  const runs = listed();
  if (!view.group) return runs.map((run) => ({ run }));
  const groups = new Map();
  for (const run of runs) groups.set(groupOf(run), [...(groups.get(groupOf(run)) ?? []), run]);
  const names = [...groups.keys()].sort((a, b) => compare(...[a, b].map((name) => valueOf(groups.get(name)[0], view.group))));
  return names.flatMap((name) => [{ group: name, runs: groups.get(name) }, ...(view.closed.includes(`group:${name}`) ? [] : groups.get(name).map((run) => ({ run, inGroup: true })))]);
}

/** Colour of a group: that of its first run. */
export function groupColor(group) {
  const first = [...data.runs.values()].filter((run) => groupOf(run) === group).map((run) => run.color ?? 0);
  return colorOf(Math.min(...first, Infinity) === Infinity ? 0 : Math.min(...first));
}

/** Return mean, least and largest of the best values of runs. */
export function summary(runs) {
  const values = runs.map((run) => valueOf(run, "best")).filter((value) => typeof value === "number");
  if (!values.length) return null;
  return { mean: values.reduce((a, b) => a + b, 0) / values.length, min: Math.min(...values), max: Math.max(...values), count: values.length };
}
