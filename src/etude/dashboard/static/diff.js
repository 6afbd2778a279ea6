// What differs between the shown runs: config, environment and code.

import { get } from "./api.js";
import { fill, fillOnce, h } from "./dom.js";
import { num, plain } from "./format.js";
import { valueOf } from "./grouping.js";
import { colorOf } from "./palette.js";
import { place } from "./runs.js";
import { chosen, openRun } from "./state.js";

const MOST = 12;

function cell(key, value, isOdd) {
  if (key.endsWith("diff") && typeof value === "string") return h("td", {}, h("details", {}, h("summary", {}, `${value.split("\n").length} lines`), h("pre", { class: "text" }, value)));
  return h("td", { class: isOdd ? "is-odd" : "" }, plain(value));
}

function rowsOf(title, rows, count) {
  if (!rows?.length) return [];
  return [h("tr", { class: "title" }, h("th", { colspan: count + 1, scope: "colgroup" }, title)), rows.map(({ key, values }) => {
    const texts = values.map(plain);
    const usual = texts.toSorted((a, b) => texts.filter((one) => one === b).length - texts.filter((one) => one === a).length)[0];
    return h("tr", {}, h("th", { scope: "row" }, key), values.map((value, i) => cell(key, value, texts.length > 2 && texts[i] !== usual)));
  })];
}

export function diffPage() {
  const element = h("div", { class: "diff-page" });
  let asked = "";
  let found = null;
  const show = (runs) => {
    const all = [["Config", found.config], ["Environment", found.env], ["Code", found.git]];
    const isSame = all.every(([, rows]) => !rows?.length);
    const head = h("tr", {}, h("th", { scope: "col", "aria-label": "Setting" }), runs.map((run) => h("th", { scope: "col" }, h("button", { type: "button", class: "name", title: run.id, onclick: () => openRun(run.id) }, h("i", { class: "swatch-dot", style: { "--run": colorOf(run.color ?? 0) } }), h("span", {}, `${run.name} ${place(run)}`)))));
    const best = h("tr", {}, h("th", { scope: "row" }, "best"), runs.map((run) => h("td", {}, num(valueOf(run, "best")))));
    fillOnce(element, JSON.stringify([found, runs.map((run) => [run.id, run.color, valueOf(run, "best")]), document.documentElement.dataset.theme]), () => [h("div", { class: "card diff-box", tabindex: "0", "aria-label": "Differences" }, h("table", { class: "diff-table" }, h("thead", {}, head), h("tbody", {}, best, all.flatMap(([title, rows]) => rowsOf(title, rows, runs.length))))),
      isSame ? h("p", { class: "nothing" }, "Config, environment and code are the same.") : null]);
  };
  return {
    element,
    draw() {
      const runs = chosen().slice(0, MOST);
      if (runs.length < 2) {
        asked = element.filledWith = "";
        return fill(element, h("div", { class: "hint" }, h("h2", {}, "Compare runs"), h("p", {}, "Tick two or more runs in the list to see in what they differ.")));
      }
      const key = runs.map((run) => run.id).join("\n");
      if (key === asked) return found && show(runs);
      asked = key;
      found = null;
      return get("diff", { run: runs.map((run) => run.id) }).then((answer) => {
        if (asked !== key) return;
        found = answer;
        show(runs);
      }, (error) => fillOnce(element, error.message, () => h("p", { class: "nothing" }, error.message)));
    },
  };
}
