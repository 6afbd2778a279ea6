// Rules that watch runs, and what they found.

import { get, post } from "./api.js";
import { fill, h, iconButton, toast } from "./dom.js";
import { when } from "./format.js";
import { data, emit, on, openRun, view } from "./state.js";

const EXAMPLES = ["loss is nan", "no step for 10 min", "val_loss > 2 * best"];

let seen = null; // when the newest alert that somebody saw fired

/** Keep the alerts, newest first, and count those that nobody saw. */
function keep(alerts) {
  data.alerts = alerts;
  const newest = alerts[0]?.time ?? 0;
  if (seen === null || view.tab === "alerts") seen = newest;
  data.fired = alerts.filter((one) => one.time > seen).length;
  emit("alerts");
}

async function load() {
  try {
    const found = await get("alerts");
    data.rules = found.rules;
    keep(found.alerts.toReversed());
  } catch {
    data.rules ??= [];
  }
}

async function act(body, method) {
  try {
    await post("alerts", body, method);
    await load();
    return true;
  } catch (error) {
    toast(error.message);
    return false;
  }
}

export function alertsPage() {
  const input = h("input", { type: "text", placeholder: "val_loss > 2 * best", "aria-label": "New rule", spellcheck: "false" });
  const form = h("form", { class: "rule-form", onsubmit: (event) => {
    event.preventDefault();
    const rule = input.value.trim();
    if (rule) act({ rule }, "POST").then((isDone) => isDone && (input.value = ""));
  } }, input, h("button", { class: "button main" }, "Add rule"));
  const examples = h("p", { class: "muted examples" }, "For example: ", EXAMPLES.map((one) => h("button", { type: "button", class: "mini mono", onclick: () => {
    input.value = one;
    input.focus();
  } }, one)));
  const [rules, fired] = [h("div", { class: "rules" }), h("div", { class: "fired" })];
  const element = h("div", { class: "alerts-page" }, h("section", { class: "card part" }, h("header", {}, h("h2", {}, "Rules")), form, examples, rules), h("section", { class: "card part" }, h("header", {}, h("h2", {}, "Fired")), fired));
  on("sse-alert", (one) => {
    if ((data.alerts ?? []).some((other) => other.time === one.time && other.message === one.message)) return;
    toast(`Alert: ${one.message}`);
    keep([one, ...(data.alerts ?? [])].slice(0, 200));
  });
  on("runs", () => data.rules ?? load());
  on("opened", load); // an alert may have fired between two streams
  return {
    element,
    draw() {
      if (data.fired) keep(data.alerts);
      if (!data.rules) load();
      fill(rules, (data.rules ?? []).map((rule) => h("div", { class: "rule" }, h("code", { class: "mono" }, rule), iconButton("close", `Remove the rule ${rule}`, () => act({ rule }, "DELETE")))), data.rules?.length ? null : h("p", { class: "nothing" }, "No rules yet."));
      const some = data.alerts ?? [];
      fill(fired, some.map((one) => h("div", { class: "rule" }, h("time", { class: "muted" }, when(one.time)), h("button", { type: "button", class: "name", onclick: () => openRun(one.run) }, data.runs.get(one.run)?.name ?? one.run), h("span", { class: "words" }, one.message))), some.length ? null : h("p", { class: "nothing" }, "Nothing has fired."));
    },
  };
}
