// Rules that watch runs, and what they found.

import { get, post } from "./api.js";
import { fill, h, iconButton, toast } from "./dom.js";
import { when } from "./format.js";
import { data, emit, on, openRun, view } from "./state.js";

const EXAMPLES = ["loss is nan", "no step for 10 min", "val_loss > 2 * best"];

async function load() {
  try {
    const found = await get("alerts");
    data.rules = found.rules;
    data.alerts = (found.alerts ?? []).toReversed();
    data.webhook = found.webhook;
    emit("alerts");
  } catch {
    data.rules ??= [];
  }
}

async function act(body, method) {
  try {
    await post("alerts", body, method);
    await load();
  } catch (error) {
    toast(error.message);
  }
}

export function alertsPage() {
  const input = h("input", { type: "text", placeholder: "val_loss > 2 * best", "aria-label": "New rule", spellcheck: "false" });
  const form = h("form", { class: "rule-form", onsubmit: (event) => {
    event.preventDefault();
    const rule = input.value.trim();
    if (rule) act({ rule }, "POST").then(() => (input.value = ""));
  } }, input, h("button", { class: "button main" }, "Add rule"));
  const examples = h("p", { class: "muted examples" }, "For example: ", EXAMPLES.map((one) => h("button", { type: "button", class: "mini mono", onclick: () => {
    input.value = one;
    input.focus();
  } }, one)));
  const [rules, fired] = [h("div", { class: "rules" }), h("div", { class: "fired" })];
  const element = h("div", { class: "alerts-page" }, h("section", { class: "card part" }, h("header", {}, h("h2", {}, "Rules")), form, examples, rules), h("section", { class: "card part" }, h("header", {}, h("h2", {}, "Fired")), fired));
  on("sse-alert", (one) => {
    data.alerts = [one, ...(data.alerts ?? [])].slice(0, 200);
    if (view.tab !== "alerts") data.fired += 1;
    toast(`Alert: ${one.message}`);
    emit("alerts");
  });
  on("runs", () => data.rules ?? load());
  on("reconnected", load);
  return {
    element,
    draw() {
      if (data.fired) {
        data.fired = 0;
        emit("alerts");
      }
      if (!data.rules) load();
      fill(rules, (data.rules ?? []).map((rule) => h("div", { class: "rule" }, h("code", { class: "mono" }, rule), iconButton("close", `Remove the rule ${rule}`, () => act({ rule }, "DELETE")))), data.rules?.length ? null : h("p", { class: "nothing" }, "No rules yet."));
      const some = data.alerts ?? [];
      fill(fired, some.map((one) => h("div", { class: "rule" }, h("time", { class: "muted" }, when(one.time)), h("button", { type: "button", class: "name", onclick: () => openRun(one.run) }, data.runs.get(one.run)?.name ?? one.run), h("span", { class: "words" }, one.message))), some.length ? null : h("p", { class: "nothing" }, "Nothing has fired."));
    },
  };
}
