// The page of one run: what it is, how it stands, its config, and everything that happened.

import { fill, fillOnce, h, iconButton } from "./dom.js";
import { ago, duration, num, percent, plain, when } from "./format.js";
import { valueOf } from "./grouping.js";
import { detail, forget } from "./marks.js";
import { colorOf } from "./palette.js";
import { change, Rows, stateDot } from "./runs.js";
import { data, focused, on, set, toggle, view } from "./state.js";

const flat = (value, path = "") => (value !== null && typeof value === "object" && !Array.isArray(value)
  ? Object.entries(value).flatMap(([key, one]) => flat(one, path ? `${path}.${key}` : key)) : [[path, value]]);

function facts(run, found) {
  const start = found?.events?.find((one) => one.kind === "start" || one.kind === "resume");
  const rows = [
    ["Best", run.best ? `${num(run.best.value)} · ${run.monitor}${run.best.epoch ? ` · epoch ${run.best.epoch}` : ""}` : null],
    ["Last", valueOf(run, "last") == null ? null : num(valueOf(run, "last"))],
    ["Step", run.total_steps ? `${num(run.step)} of ${num(run.total_steps)} · ${percent(run.progress)}` : num(run.step)],
    ["Epoch", run.total_epochs ? `${num(run.epoch)} of ${num(run.total_epochs)}` : null],
    ["Phase", run.phase || null],
    ["Left", run.left_s == null ? null : duration(run.left_s)],
    ["Duration", duration(run.duration_s)], ["Started", when(run.started)], ["Resumes", run.resumes ? num(run.resumes) : null],
    ["Last sign of life", run.state === "running" || run.state === "lost" ? ago(run.heartbeat) : null],
    ["Parameters", start?.parameters ? num(start.parameters) : null], ["Device", start?.device || null],
  ];
  return h("dl", { class: "facts" }, rows.filter(([, value]) => value != null && value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function tagEditor(run) {
  const input = h("input", { type: "text", placeholder: "Add a tag", "aria-label": "Add a tag", maxlength: 64, onkeydown: (event) => {
    const tag = event.target.value.trim();
    if (event.key !== "Enter" || !tag) return;
    change(run, { tags: [...new Set([...(run.tags ?? []), tag])] });
    event.target.value = "";
  } });
  return h("div", { class: "tags" }, (run.tags ?? []).map((tag) => h("span", { class: "tag" }, tag, h("button", { type: "button", "aria-label": `Remove tag ${tag}`, onclick: () => change(run, { tags: run.tags.filter((one) => one !== tag) }) }, " ×"))), input);
}

function table(rows, query) {
  const some = rows.filter(([key, value]) => !query || `${key} ${plain(value)}`.toLowerCase().includes(query));
  return h("table", { class: "pairs" }, h("tbody", {}, some.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, plain(value))))));
}

const KINDS = { warning: "warn", recovery: "bad", end: "", checkpoint: "muted", phase: "accent", resume: "accent" };

function eventRow(event) {
  const words = event.message || event.path || event.status || "";
  return h("div", { class: "event" }, h("span", { class: "n muted" }, num(event.step)), h("span", { class: `kind ${KINDS[event.kind] ?? ""}` }, event.kind), h("span", { class: "words", title: words }, words), h("time", { class: "muted" }, when(event.time)));
}

/** Return the page; it keeps its fields while the run goes on. */
export function runPage() {
  const [head, factBox, configBox, envBox, gitBox] = ["div", "div", "div", "div", "div"].map((tag) => h(tag));
  const search = h("input", { type: "search", placeholder: "Filter config", "aria-label": "Filter config", oninput: () => draw() });
  const kinds = h("select", { "aria-label": "Kinds of events", onchange: () => draw() });
  const eventBox = h("div", { class: "events-box", tabindex: "0", "aria-label": "Events" });
  const list = new Rows(eventBox, 26, eventRow);
  const section = (title, tools, body, name) => h("section", { class: `card part part-${name}` }, h("header", {}, h("h2", {}, title), h("span", { class: "push" }, tools)), body);
  const parts = h("div", { class: "run-parts" }, section("Events", kinds, eventBox, "events"), section("Config", search, configBox, "config"), section("Environment", null, [envBox, gitBox], "env"));
  const page = h("div", { class: "run-page" }, head, factBox, parts);
  const nothing = h("div", { class: "hint" }, h("h2", {}, "No run is open"), h("p", {}, "Click on the name of a run."));
  const element = h("div", {}, nothing, page);
  let tagsOf = "";

  function draw() {
    const run = data.runs.get(view.focus) ?? focused();
    page.hidden = !run;
    nothing.hidden = Boolean(run);
    if (!run) return;
    const found = detail(run.id);
    const isShown = (view.runs ?? []).includes(run.id);
    const key = JSON.stringify([run.id, run.tags, run.archived, isShown, run.state, run.name, run.message, document.documentElement.dataset.theme]);
    if (key !== tagsOf) {
      tagsOf = key;
      fill(head, h("header", { class: "run-head" }, h("i", { class: "swatch-dot", style: { "--run": colorOf(run.color ?? 0) } }), h("h2", {}, run.name), stateDot(run), h("span", { class: "muted mono id" }, run.id),
        h("span", { class: "push" }, h("button", { type: "button", class: "button", onclick: () => toggle([run.id]) }, isShown ? "Hide its curves" : "Show its curves"),
          h("button", { type: "button", class: "button", onclick: () => set({ runs: [run.id], tab: "curves" }) }, "Only this one"),
          iconButton("archive", run.archived ? "Bring it back" : "Archive it", () => change(run, { archived: !run.archived })))),
        run.message ? h("p", { class: `message is-${run.state}` }, run.message) : null, tagEditor(run));
    }
    fill(factBox, facts(run, found));
    if (!found) return;
    if (found.error) {
      fill(configBox, h("p", { class: "nothing" }, found.error));
      return;
    }
    const query = search.value.trim().toLowerCase();
    fillOnce(configBox, JSON.stringify([run.id, query, found.config]), () => table(flat(found.config ?? {}), query));
    fillOnce(envBox, JSON.stringify(found.env), () => table(flat(found.env ?? {})));
    fillOnce(gitBox, found.git_diff ?? "", () => (found.git_diff ? h("details", {}, h("summary", {}, "Changes that were not committed"), h("pre", { class: "text diff" }, found.git_diff.split("\n").map((line) => h("span", { class: line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : "" }, `${line}\n`)))) : null));
    drawEvents(found.events ?? []);
  }

  function drawEvents(events) {
    const names = ["all", ...new Set(events.map((one) => one.kind))];
    if (kinds.children.length !== names.length) {
      const before = kinds.value;
      fill(kinds, names.map((one) => h("option", { value: one }, one)));
      kinds.value = names.includes(before) ? before : "all";
    }
    list.show(events.filter((one) => kinds.value === "all" || one.kind === kinds.value).reverse());
  }

  on("sse-runs", (some) => (Array.isArray(some) ? some : []).forEach((run) => run.state !== "running" && run.id === view.focus && forget(run.id)));
  return { element, draw };
}
