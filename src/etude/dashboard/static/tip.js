// The tooltip of charts: values at the cursor, and what happened there.

import { fill, h } from "./dom.js";
import { num } from "./format.js";
import { data, view } from "./state.js";

const MOST = 12;
const box = h("div", { class: "tip", role: "presentation" });
document.body.append(box);

export function hideTip() {
  box.classList.remove("is-open");
}

/** Show rows of values and marks beside a place in an element. */
export function showTip(over, left, top, title, rows, marks, pointed) {
  const shown = rows.slice(0, MOST);
  fill(box, h("div", { class: "tip-title" }, `${view.x} ${title}`),
    marks.slice(0, 4).map((one) => h("div", { class: `tip-mark kind-${one.kind}` }, markText(one))),
    h("table", {}, shown.map((one) => row(one, pointed))),
    rows.length > MOST && h("div", { class: "tip-more" }, `and ${rows.length - MOST} more`));
  place(over.getBoundingClientRect(), left, top);
}

/** Show some words beside a place in an element. */
export function showWords(over, left, top, ...words) {
  fill(box, words.map((one) => h("div", {}, one)));
  place(over.getBoundingClientRect(), left, top);
}

function place(bounds, left, top) {
  box.classList.add("is-open");
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  let x = bounds.left + left + 16;
  if (x + width > innerWidth - 8) x = Math.max(8, bounds.left + left - width - 16);
  const y = Math.min(Math.max(8, bounds.top + top - height / 2), innerHeight - height - 8);
  box.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
}

function row({ line, value, smooth, min, max }, pointed) {
  const name = line.label ?? data.runs.get(line.run)?.name ?? line.run;
  const spread = min != null && max > min ? `${num(min, 3)} … ${num(max, 3)}` : "";
  return h("tr", { class: pointed && line.run === pointed ? "is-pointed" : "" },
    h("td", {}, h("i", { class: line.dash ? "key dashed" : "key", style: { color: line.color } })),
    h("td", { class: "name" }, name, line.count > 1 ? ` (${line.count})` : "", h("small", {}, line.split === "train" ? "" : ` ${line.split}`)),
    h("td", { class: "n" }, num(smooth ?? value)),
    h("td", { class: "n faint" }, smooth == null ? spread : num(value)));
}

/** What a mark says. */
export function markText({ event, run, kind }) {
  const at = event.step == null ? "" : ` at step ${num(event.step)}`;
  const words = kind === "checkpoint" ? `checkpoint${at}` : kind === "resume" ? `resumed${at}` : `${kind}: ${event.message ?? ""}`;
  return `${words} · ${run.name}`;
}
