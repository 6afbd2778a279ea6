// The list of runs at the side, and the same as a table. Only rows on the screen are in the page.

import { post } from "./api.js";
import { fillOnce, h, icon, iconButton, toast } from "./dom.js";
import { duration, num, percent, plain, when } from "./format.js";
import { differing, groupColor, listed, rows, summary, valueOf } from "./grouping.js";
import { colorOf } from "./palette.js";
import { data, emit, openRun, set, toggle, view } from "./state.js";

const WORDS = { running: "running", finished: "finished", stopped: "stopped early", interrupted: "interrupted", failed: "failed", lost: "lost", unreadable: "unreadable" };

/** Keep a list of rows of one height in step with scrolling. */
export class Rows {
  constructor(box, height, make) {
    [this.box, this.height, this.make, this.items] = [box, height, make, []];
    this.space = h("div", { class: "rows-space" });
    box.append(this.space);
    box.addEventListener("scroll", () => this.later(), { passive: true });
    new ResizeObserver(() => this.later()).observe(box);
    // a row must not be replaced between the press and the release of a button
    box.addEventListener("pointerdown", () => (this.isHeld = true));
    for (const end of ["pointerup", "pointercancel"]) {
      addEventListener(end, () => {
        if (!this.isHeld) return;
        this.isHeld = false;
        setTimeout(() => this.later());
      });
    }
  }
  show(items) {
    this.items = items;
    this.space.style.height = `${items.length * this.height}px`;
    this.draw();
  }
  later() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }
  draw() {
    if (this.isHeld) return;
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.height) - 4);
    const last = Math.min(this.items.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / this.height) + 4);
    const active = document.activeElement?.closest?.("[data-row]")?.dataset.row;
    const focusKey = document.activeElement?.dataset?.key;
    const made = this.items.slice(first, last).map((item, i) => {
      const node = this.make(item);
      node.style.setProperty("top", `${(first + i) * this.height}px`);
      node.style.setProperty("height", `${this.height}px`);
      return node;
    });
    this.space.replaceChildren(...made);
    if (active != null && focusKey) made.find((one) => one.dataset.row === active)?.querySelector(`[data-key="${focusKey}"]`)?.focus({ preventScroll: true });
  }
  reveal(index) {
    const [top, bottom] = [index * this.height, (index + 1) * this.height];
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (bottom > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = bottom - this.box.clientHeight;
  }
}

const check = (run) => h("input", {
  type: "checkbox", dataset: { key: "check" }, class: "swatch", checked: (view.runs ?? []).includes(run.id), "aria-label": `Show ${run.name}`,
  style: { "--run": colorOf(run.color ?? 0) }, onchange: (event) => toggle([run.id], event.target.checked),
});

const checkGroup = (group, runs) => {
  const shown = runs.filter((run) => (view.runs ?? []).includes(run.id)).length;
  return h("input", {
    type: "checkbox", dataset: { key: "check" }, class: "swatch", checked: shown === runs.length, indeterminate: shown > 0 && shown < runs.length,
    style: { "--run": groupColor(group) }, "aria-label": `Show all of ${group}`, onchange: (event) => toggle(runs.map((run) => run.id), event.target.checked),
  });
};

const bar = (run) => h("div", { class: `bar is-${run.state}`, role: "progressbar", "aria-label": "Progress", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * (run.progress ?? 0)) },
  h("i", { style: { width: `${100 * (run.progress ?? (run.state === "finished" ? 1 : 0))}%` } }));

export const stateDot = (run) => h("span", { class: `state is-${run.state}`, title: run.message || WORDS[run.state] || run.state }, h("i", { class: "dot" }), WORDS[run.state] ?? run.state);

const tagList = (run) => (run.tags ?? []).slice(0, 3).map((tag) => h("span", { class: "tag" }, tag));

/** Tell apart runs of one name: the end of their folder. */
export const place = (run) => (run.id.endsWith(run.name) ? "" : run.id.split("/").at(-1));

function stand(run) {
  if (run.state === "running") return `${percent(run.progress)}${run.left_s == null ? "" : ` · ${duration(run.left_s)} left`}${run.activity && run.activity !== "training" ? ` · ${run.activity}` : ""}`;
  return `${duration(run.duration_s)}${run.progress != null && run.progress < 1 ? ` · ${percent(run.progress)}` : ""}`;
}

function card({ run, group, runs, inGroup }) {
  if (group != null) {
    const found = summary(runs);
    const isClosed = view.closed.includes(`group:${group}`);
    return h("div", { class: "run group", role: "listitem", dataset: { row: `group:${group}` } }, checkGroup(group, runs),
      h("button", { type: "button", class: "name", dataset: { key: "name" }, "aria-expanded": String(!isClosed), onclick: () => fold(`group:${group}`) }, h("span", { class: isClosed ? "fold" : "fold is-open" }, icon("chevron")), h("span", {}, group), h("small", {}, ` ${runs.length}`)),
      h("span", { class: "value", title: "mean of the best values" }, found ? num(found.mean) : "–"),
      h("div", { class: "under" }, h("span", { class: "muted" }, found?.count > 1 ? `${num(found.min)} … ${num(found.max)}` : "")));
  }
  const best = valueOf(run, "best");
  const isFocus = view.focus === run.id;
  return h("div", { class: `run${inGroup ? " in-group" : ""}${isFocus ? " is-focus" : ""}${run.archived ? " is-archived" : ""}`, role: "listitem", dataset: { row: run.id, run: run.id } }, check(run),
    h("button", { type: "button", class: "name", dataset: { key: "name" }, title: run.id, onclick: () => openRun(run.id) }, h("span", {}, run.name), h("small", {}, place(run))),
    h("span", { class: "value", title: best == null ? "" : `best ${run.monitor} (last ${num(valueOf(run, "last"))})` }, num(best ?? valueOf(run, "last"))),
    h("div", { class: "under" }, stateDot(run), h("span", { class: "muted" }, stand(run)), tagList(run), archiver(run)),
    bar(run));
}

const archiver = (run) => iconButton("archive", run.archived ? `Bring ${run.name} back` : `Archive ${run.name}`, () => change(run, { archived: !run.archived }), { dataset: { key: "archive" } });

/** Keep tags or the archive mark of a run at the server. */
export async function change(run, changes) {
  const wanted = { tags: run.tags ?? [], archived: Boolean(run.archived), ...changes };
  try {
    await post("tags", { run: run.id, ...wanted });
    Object.assign(run, wanted);
    if (wanted.archived) toggle([run.id], false);
    emit("runs");
  } catch (error) {
    toast(error.message);
  }
}

/** Open or close a section, a panel or a group; the address remembers it. */
export const fold = (name) => set({ closed: view.closed.includes(name) ? view.closed.filter((one) => one !== name) : [...view.closed, name] });

let side;
let sideBox;
const SIDE_HEIGHT = 54;

/** Build the list at the side. */
export function makeSide(box) {
  sideBox = box;
  box.setAttribute("role", "list");
  side = new Rows(box, SIDE_HEIGHT, card);
}

/** Show the runs as they are now. */
export function drawSide() {
  side.show(rows());
  let empty = sideBox.querySelector(".nothing");
  if (side.items.length) empty?.remove();
  else if (data.loaded) {
    empty ??= sideBox.appendChild(h("p", { class: "nothing" }));
    empty.textContent = data.runs.size ? "No run matches the search." : "No runs yet.";
  }
}

/** Move the focus by some runs, and return where it is. */
export function step(by) {
  const items = listed();
  if (!items.length) return;
  const now = items.findIndex((run) => run.id === view.focus);
  const next = items[Math.min(Math.max(now < 0 ? (by > 0 ? 0 : items.length - 1) : now + by, 0), items.length - 1)];
  set({ focus: next.id });
  side.reveal(side.items.findIndex((one) => one.run?.id === next.id));
}

const COLUMNS = [
  ["name", "Run", 250, (run) => [h("button", { type: "button", class: "name", dataset: { key: "name" }, title: run.id, onclick: () => openRun(run.id) }, h("span", {}, run.name), h("small", {}, place(run)))]],
  ["state", "State", 116, (run) => [stateDot(run)]],
  ["progress", "Progress", 136, (run) => [bar(run), h("small", { class: "n" }, percent(run.progress))]],
  ["eta", "Left", 80, (run) => (run.left_s == null ? "" : duration(run.left_s)), "n"],
  ["best", "Best", 92, (run) => num(valueOf(run, "best")), "n"],
  ["last", "Last", 92, (run) => num(valueOf(run, "last")), "n"],
  ["step", "Step", 84, (run) => num(run.step), "n"],
  ["duration", "Duration", 92, (run) => duration(run.duration_s), "n"],
  ["started", "Started", 146, (run) => when(run.started), "n"],
  ["tags", "Tags", 130, (run) => tagList(run)],
];

/** The table of all runs, with a column for each key in which configs differ. */
export class RunTable {
  constructor() {
    this.head = h("div", { class: "table-head", role: "row" });
    this.box = h("div", { class: "table-box", role: "table", "aria-label": "Runs", tabindex: "0" }, this.head);
    this.rows = new Rows(this.box, 36, (item) => this.row(item));
    this.element = h("div", { class: "table-view" }, this.box);
  }
  draw() {
    const runs = listed();
    const keys = differing(runs).slice(0, 40);
    const ends = keys.map((key) => key.split(".").at(-1));
    const extra = keys.map((key, i) => {
      const label = ends.filter((one) => one === ends[i]).length > 1 ? key.split(".").slice(-2).join(".") : ends[i];
      const isNumber = typeof runs.find((run) => run.config?.[key] != null)?.config[key] === "number";
      return [key, label, Math.min(200, Math.max(84, 7 * label.length + 34)), (run) => plain(run.config?.[key]), isNumber ? "n" : ""];
    });
    const after = COLUMNS.findIndex(([key]) => key === "last") + 1;
    const isLive = runs.some((run) => run.left_s != null);
    this.columns = COLUMNS.toSpliced(after, 0, ...extra).filter(([key]) => key !== "eta" || isLive);
    const sorted = view.sort.replace(/^-/, "");
    this.box.style.setProperty("--columns", `34px ${this.columns.map((one) => `${one[2]}px`).join(" ")} 40px`);
    const isDown = view.sort.startsWith("-");
    const header = ([key, label, , , kind]) => h("span", { role: "columnheader", "aria-sort": sorted !== key ? "none" : isDown ? "descending" : "ascending" },
      h("button", { type: "button", class: kind ?? "", title: key, onclick: () => set({ sort: view.sort === key ? `-${key}` : key }) }, label, sorted === key ? (isDown ? " ↓" : " ↑") : ""));
    fillOnce(this.head, JSON.stringify([this.columns, view.sort]), () => [h("span", { role: "columnheader", "aria-label": "Shown" }), this.columns.map(header), h("span", { role: "columnheader", "aria-label": "Archive" })]);
    this.rows.show(rows());
  }
  row({ run, group, runs }) {
    if (group != null) {
      const found = summary(runs);
      return h("div", { class: "table-row group", role: "row", dataset: { row: `group:${group}` } }, h("span", { role: "cell" }, checkGroup(group, runs)), h("span", { class: "wide", role: "cell" }, `${group} · ${runs.length} run${runs.length > 1 ? "s" : ""}`, found ? ` · best ${num(found.mean)}${found.count > 1 ? ` (${num(found.min)} … ${num(found.max)})` : ""}` : ""));
    }
    return h("div", { class: `table-row${view.focus === run.id ? " is-focus" : ""}`, role: "row", dataset: { row: run.id, run: run.id } }, h("span", { role: "cell" }, check(run)),
      this.columns.map(([, , , show, kind]) => h("span", { class: kind ?? "", role: "cell" }, show(run))), h("span", { role: "cell" }, archiver(run)));
  }
}
