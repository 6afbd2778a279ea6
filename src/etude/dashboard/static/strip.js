// The strip about the run in focus: how fast it is, and what limits it.

import { get } from "./api.js";
import { fillOnce, h } from "./dom.js";
import { bytes, num, percent, short } from "./format.js";
import { colorOf, isDark } from "./palette.js";
import { focused, openRun, view } from "./state.js";

const EVERY_MS = 4000;
const known = new Map();

/** Show the strip, asking the server now and then while the run is alive. */
export function drawStrip(box) {
  const run = focused();
  box.hidden = !run || !["curves", "tasks", "layers"].includes(view.tab);
  if (box.hidden) return;
  const found = known.get(run.id);
  const isOld = !found || (run.state === "running" && performance.now() - found.at > EVERY_MS);
  if (isOld) {
    known.set(run.id, { ...found, at: performance.now() });
    get("limits", { run: run.id }).then((limits) => {
      known.set(run.id, { at: performance.now(), limits });
      if (focused()?.id === run.id) show(box, run, limits);
    }, () => {});
  }
  show(box, run, found?.limits ?? {});
}

function show(box, run, limits) {
  const facts = [
    ["samples/s", limits.samples_per_s && short(limits.samples_per_s)], ["tokens/s", limits.tokens_per_s && short(limits.tokens_per_s)],
    ["MFU", limits.mfu != null && percent(limits.mfu, 1)], ["data wait", limits.data_wait != null && percent(limits.data_wait, 1)],
    ["memory", limits.memory_bytes != null && bytes(limits.memory_bytes)], ["steps/s", run.steps_per_s && num(run.steps_per_s, 3)],
  ].filter(([, value]) => value);
  fillOnce(box, JSON.stringify([run.id, run.color, isDark(), facts, limits.words]), () => [h("button", { type: "button", class: "who", title: run.id, onclick: () => openRun(run.id) }, h("i", { class: "swatch-dot", style: { "--run": colorOf(run.color ?? 0) } }), h("span", {}, run.name)),
    facts.length ? h("dl", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))) : null,
    limits.words ? h("p", { class: "words", title: limits.words }, limits.words) : null]);
}
