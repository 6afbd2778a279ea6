// Small charts for each task or modality: names such as `TASK/loss`, `TASK/weight` and `val_TASK/loss`.

import { ChartPage, DASH } from "./curves.js";
import { num } from "./format.js";
import { place } from "./runs.js";
import { colorOf } from "./palette.js";
import { chosen, focused, view } from "./state.js";

const OTHERS = /^(grad_norm|lr|weight_norm|time)\//;

/** Return the tasks of runs with their measures: {task: {measure: [{split, name}]}}. */
export function tasksOf(runs) {
  const found = new Map();
  for (const run of runs) {
    for (const split of ["train", "val"]) {
      for (const name of run.names?.[split] ?? []) {
        const base = split === "val" ? name.replace(/^val_/, "") : name;
        const cut = base.lastIndexOf("/");
        if (cut <= 0 || OTHERS.test(base)) continue;
        const [task, measure] = [base.slice(0, cut), base.slice(cut + 1)];
        if (!found.has(task)) found.set(task, new Map());
        const measures = found.get(task);
        if (!measures.has(measure)) measures.set(measure, []);
        if (!measures.get(measure).some((one) => one.name === name)) measures.get(measure).push({ split, name });
      }
    }
  }
  return found;
}

const ORDER = ["loss", "accuracy", "weight"];
const rank = (name) => (name === "weight" ? 999 : ORDER.indexOf(name) + 1 || 99);

function specOf(task, measure, metrics) {
  const sources = () => chosen().flatMap((run) => metrics.filter(({ split, name }) => (run.names?.[split] ?? []).includes(name))
    .map(({ split, name }) => ({ run: run.id, split, name, dash: split === "val" && metrics.length > 1 ? DASH : undefined })));
  const weight = () => focused()?.metrics?.[`${task}/weight`];
  return { id: `task:${task}/${measure}`, title: task, about: `${measure} of ${task}`, small: true, sources, note: () => (measure === "loss" && weight() != null ? `weight ${num(weight(), 3)}` : null) };
}

/** One chart for each run with the weights of all its tasks. */
function weightsOf(run, tasks) {
  const own = [...tasks.keys()].filter((task) => (run.names?.train ?? []).includes(`${task}/weight`));
  if (!own.length) return null;
  const sources = () => own.map((task, i) => ({ run: run.id, split: "train", name: `${task}/weight`, color: colorOf(i), label: task }));
  return { id: `weights:${run.id}`, title: `${run.name} ${place(run)}`.trim(), about: `weights of ${run.name}`, alone: true, sources };
}

export function tasksPage() {
  const page = new ChartPage(() => {
    const tasks = tasksOf(chosen());
    const measures = [...new Set([...tasks.values()].flatMap((one) => [...one.keys()]))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
    const isWanted = (task) => !view.filter || task.toLowerCase().includes(view.filter.toLowerCase());
    const sections = measures.map((measure) => ({
      name: measure, small: true,
      charts: [...tasks].filter(([task, own]) => own.has(measure) && isWanted(task)).map(([task, own]) => specOf(task, measure, own.get(measure))),
    }));
    const weights = chosen().slice(0, 6).map((run) => weightsOf(run, tasks)).filter(Boolean);
    return [...sections, { name: "all weights of a run", charts: weights }].filter((one) => one.charts.length);
  });
  page.isUseful = () => view.tab === "tasks" || tasksOf(chosen()).size > 0;
  return page;
}
