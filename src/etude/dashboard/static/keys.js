// Keys for those who do not like mice.

import { h } from "./dom.js";
import { scroll } from "./chart.js";
import { step } from "./runs.js";
import { openRun, set, toggle, view } from "./state.js";

const WORDS = [
  [["j", "↓"], "next run"], [["k", "↑"], "previous run"], [["space"], "show or hide it"], [["enter"], "open it"], [["/"], "search runs"],
  [["1", "…", "8"], "views"], [["["], "list of runs"], [["l"], "logarithmic x axis"], [["e"], "events on the curves"], [["s"], "smoothing on or off"], [["r"], "show everything again"], [["t"], "dark or light"],
  [["←", "→"], "move the range of all charts"], [["+", "−"], "zoom"], [["drag"], "zoom into a range"], [["shift", "drag"], "move the range"], [["ctrl", "wheel"], "zoom at the cursor"], [["double click"], "show everything"], [["click on a line"], "open its run"], [["?"], "this help"],
];
let dialog;

/** Show all keys. */
export function help() {
  dialog ??= document.body.appendChild(h("dialog", { "aria-label": "Keys" }, h("h2", {}, "Keys and mouse"),
    h("dl", { class: "keys" }, WORDS.map(([some, words]) => [h("dt", {}, some.map((one, i) => [i ? " " : "", h("kbd", {}, one)])), h("dd", {}, words)])),
    h("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close")));
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

const TABS = ["curves", "table", "tasks", "layers", "media", "run", "diff", "alerts"];
const ACTIONS = {
  j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
  " ": () => view.focus && toggle([view.focus]),
  Enter: () => view.focus && openRun(view.focus),
  "/": () => {
    set({ side: true, ...(innerWidth <= 820 ? { tab: "list" } : {}) });
    requestAnimationFrame(() => document.getElementById("search").focus());
  },
  "[": () => set({ side: !view.side }),
  ArrowLeft: () => scroll(-0.2, 1), ArrowRight: () => scroll(0.2, 1), "+": () => scroll(0, 0.6), "-": () => scroll(0, 1 / 0.6),
  l: () => set({ logx: !view.logx }), e: () => set({ events: !view.events }), r: () => set({ zoom: null }, { push: true }),
  s: () => set({ smooth: view.smooth ? 0 : 0.6 }), t: () => globalThis.switchTheme(), "?": help,
};

export function keys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog?.open) return;
    const target = event.target;
    if (event.key === "Escape") {
      document.querySelectorAll("details.menu[open]").forEach((one) => (one.open = false));
      if (target.matches("input, textarea, select")) target.blur();
      return;
    }
    if (target.matches("input:not([type=checkbox]), textarea, select")) return;
    const isOnControl = target.matches("button, summary, a, input");
    if (isOnControl && (event.key === " " || event.key === "Enter")) return;
    if (target.closest(".table-box, .page") && event.key.startsWith("Arrow") && !isOnControl && target !== document.body) return;
    const tab = TABS[Number(event.key) - 1];
    const action = tab ? () => set({ tab }) : ACTIONS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
