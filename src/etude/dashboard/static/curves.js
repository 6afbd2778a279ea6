// The curves: one chart for each metric, training and validation together.

import { Chart, refresh } from "./chart.js";
import { fill, h, icon } from "./dom.js";
import { fold } from "./runs.js";
import { chosen, view } from "./state.js";

export const DASH = [5, 4];
const SPEED = /(_per_s$|^mfu$|^data_wait$|memory|^step_time|_s$)/;
const RATES = /^(lr|grad_norm.*|weight_norm|skipped|loss_scale|phase|momentum|.*_scale)$/;
const HIDDEN = new Set(["phase", "samples", "tokens", "flops"]);

/** Return the metrics of runs as {base: [{split, name}]}: `val_loss` belongs to `loss`. */
export function metricsOf(runs) {
  const found = new Map();
  const put = (base, split, name) => {
    if (!found.has(base)) found.set(base, new Map());
    found.get(base).set(`${split} ${name}`, { split, name });
  };
  for (const run of runs) {
    for (const name of run.names?.train ?? []) if (!HIDDEN.has(name)) put(name, "train", name);
    for (const name of run.names?.val ?? []) if (!HIDDEN.has(name)) put(name.replace(/^val_/, ""), "val", name);
  }
  for (const run of runs) {
    for (const name of run.names?.epoch ?? []) {
      const base = name.replace(/^val_/, "");
      if (!HIDDEN.has(name) && !found.has(base)) put(base, "epoch", name);
    }
  }
  return new Map([...found].map(([base, some]) => [base, [...some.values()]]));
}

/** Return what a chart of some metrics draws: a line for each run that has them. */
export function sourcesOf(metrics) {
  return chosen().flatMap((run) => metrics.filter(({ split, name }) => (run.names?.[split] ?? []).includes(name)).map(({ split, name }) => ({
    run: run.id, split, name, dash: metrics.length > 1 && split === "val" ? DASH : undefined })));
}

function sectionOf(base) {
  if (base.startsWith("lr/")) return "Optimization";
  if (base.includes("/")) return null;
  return SPEED.test(base) ? "Speed" : RATES.test(base) ? "Optimization" : "Metrics";
}

const splits = () => h("span", { class: "splits" }, h("i", { class: "key" }), "train", h("i", { class: "key dashed" }), "val");

const ORDER = ["loss", "accuracy", "perplexity", "f1"];
const rank = (base) => (ORDER.indexOf(base) + 1 || 99);

/** A page of sections of charts that keeps the charts which stay. */
export class ChartPage {
  constructor(sections) {
    this.sections = sections;
    this.charts = new Map();
    this.boxes = new Map();
    this.element = h("div", { class: "charts-page" });
  }

  /** Make and remove charts so that they are those of the chosen runs. */
  draw() {
    const wanted = this.sections();
    const kept = new Set(wanted.flatMap((section) => section.charts.map((one) => one.id)));
    for (const [id, chart] of this.charts) {
      if (kept.has(id)) continue;
      chart.remove();
      this.charts.delete(id);
    }
    const names = new Set(wanted.map((one) => one.name));
    for (const [name, box] of this.boxes) {
      if (names.has(name)) continue;
      box.remove();
      this.boxes.delete(name);
    }
    for (const section of wanted) this.drawSection(section);
    const boxes = wanted.map((one) => this.boxes.get(one.name));
    if (boxes.some((one, i) => this.element.children[i] !== one)) this.element.replaceChildren(...boxes);
    refresh();
  }

  drawSection({ name, charts, small, lead }) {
    const key = `section:${name}`;
    if (!this.boxes.has(name)) {
      const button = h("button", { type: "button", class: "section-title", onclick: () => fold(key) });
      this.boxes.set(name, h("section", { class: "section" }, h("h2", {}, button), h("div", { class: "lead" }), h("div", { class: small ? "grid small" : "grid" })));
    }
    const box = this.boxes.get(name);
    const isClosed = view.closed.includes(key);
    const button = box.querySelector(".section-title");
    button.setAttribute("aria-expanded", String(!isClosed));
    fill(button, h("span", { class: isClosed ? "fold" : "fold is-open" }, icon("chevron")), name, h("small", {}, ` ${charts.length}`));
    const [, leading, grid] = box.children;
    fill(leading, isClosed ? null : lead?.());
    grid.hidden = isClosed;
    const nodes = charts.map((spec) => {
      if (!this.charts.has(spec.id)) this.charts.set(spec.id, new Chart(spec));
      const chart = this.charts.get(spec.id);
      chart.spec = Object.assign(chart.spec, spec);
      chart.element.classList.toggle("is-big", view.big === spec.id);
      return chart.element;
    });
    if (nodes.length !== grid.children.length || nodes.some((one, i) => grid.children[i] !== one)) fill(grid, nodes);
  }
}

/** The page of all curves. */
export function curvesPage() {
  return new ChartPage(() => {
    const found = metricsOf(chosen());
    const sections = new Map([["Metrics", []], ["Optimization", []], ["Speed", []]]);
    for (const [base, metrics] of found) {
      const name = sectionOf(base);
      if (!name || (view.filter && !base.toLowerCase().includes(view.filter.toLowerCase()))) continue;
      sections.get(name).push({ id: base, title: base, sources: () => sourcesOf(metrics), note: () => (new Set(metrics.map((one) => one.split)).size > 1 ? splits() : null) });
    }
    return [...sections].filter(([, charts]) => charts.length)
      .map(([name, charts]) => ({ name, charts: charts.sort((a, b) => rank(a.id) - rank(b.id) || a.id.localeCompare(b.id)) }));
  });
}
