// The controls above the charts.

import { fill, h, icon } from "./dom.js";
import { xLabel, xNames, xText } from "./format.js";
import { set, view } from "./state.js";

let made = null;

function make() {
  const press = (key, label, title) => h("button", { type: "button", class: "mini", title, dataset: { key }, onclick: () => set({ [key]: !view[key] }) }, label);
  made = {
    x: h("select", { "aria-label": "x axis", onchange: (event) => set({ x: event.target.value, zoom: null }) }, xNames.map((one) => h("option", { value: one }, xLabel(one)))),
    smooth: h("input", { type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "Smoothing", oninput: (event) => set({ smooth: Number(event.target.value) }) }),
    amount: h("output", {}),
    presses: [press("logx", "log x", "Logarithmic x axis"), press("events", "events", "Phases, checkpoints, resumes, warnings and rate changes"), press("outliers", "outliers", "Fit the y axis to all values, also to rare ones")],
    zoom: h("button", { type: "button", class: "mini", title: "Show everything (double click)", onclick: () => set({ zoom: null }, { push: true }) }, icon("reset")),
    range: h("span", {}),
    filter: h("input", { type: "search", placeholder: "Filter charts", "aria-label": "Filter charts", oninput: (event) => set({ filter: event.target.value }) }),
  };
  made.zoomBox = h("label", { class: "zoom" }, made.range, made.zoom);
  made.all = [h("label", {}, "x", made.x), h("label", { title: "Exponential moving average; curves of fewer than 30 points stay as they are" }, "smooth", made.smooth, made.amount), made.presses, made.zoomBox, h("span", { class: "push" }, made.filter)];
}

/** Show the controls on pages of charts, with their values. */
export function makeBar(box) {
  if (!made) make();
  const isWanted = ["curves", "tasks"].includes(view.tab);
  if (isWanted && !box.children.length) fill(box, made.all);
  else if (!isWanted && box.children.length) fill(box);
  if (!isWanted) return;
  made.x.value = view.x;
  made.smooth.value = view.smooth;
  made.amount.textContent = view.smooth ? view.smooth.toFixed(2) : "off";
  for (const one of made.presses) one.setAttribute("aria-pressed", String(view[one.dataset.key]));
  made.zoomBox.hidden = !view.zoom;
  made.range.textContent = view.zoom ? `${xLabel(view.x)} ${xText(view.x, view.zoom[0])} – ${xText(view.x, view.zoom[1])}` : "";
  if (document.activeElement !== made.filter) made.filter.value = view.filter;
}
