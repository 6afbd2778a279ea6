// Texts and confusion matrices by step, of all shown runs beside each other.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { FONT } from "./draw.js";
import { saveMenu, saveText } from "./export.js";
import { num, percent, plain } from "./format.js";
import { colorOf, css, heat, inkOn } from "./palette.js";
import { place } from "./runs.js";
import { chosen, emit, on, set, view } from "./state.js";
import { hideTip, showWords } from "./tip.js";

const indexes = new Map();
const records = new Map();
const MOST_NUMBERS = 24;
let isShare = true;

/** Fetch once, and draw the page again when it is here. */
function once(store, key, path, query) {
  if (!store.has(key)) {
    store.set(key, null);
    get(path, query).then((found) => store.set(key, found), (error) => store.set(key, { error: error.message })).finally(() => emit("panel"));
  }
  return store.get(key);
}

const indexOf = (run) => {
  const found = once(indexes, run.id, "media", { run: run.id });
  return Array.isArray(found) ? found : (found?.media ?? []);
};

function matrix({ classes, matrix: rows }) {
  const canvas = h("canvas", { role: "img", "aria-label": `Confusion matrix of ${rows.length} classes` });
  const box = h("div", { class: "matrix-box" }, canvas);
  const names = rows.map((_, i) => String(classes?.[i] ?? i));
  let [left, cell] = [0, 0];
  const draw = () => {
    const width = box.clientWidth;
    if (!width) return;
    const ctx = canvas.getContext("2d");
    ctx.font = `11px ${FONT}`;
    left = Math.min(110, Math.max(...names.map((one) => ctx.measureText(one).width)) + 12, width * 0.32);
    cell = Math.min((Math.min(width, 620) - left - 6) / rows.length, 44);
    const scale = devicePixelRatio || 1;
    const [wide, high] = sizeOf(rows, left, cell);
    [canvas.width, canvas.height] = [wide * scale, high * scale];
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    paint(ctx, rows, names, left, cell, scale);
  };
  new ResizeObserver(draw).observe(box);
  canvas.addEventListener("mousemove", (event) => {
    const [x, y] = [Math.floor((event.offsetX - left) / cell), Math.floor(event.offsetY / cell)];
    if (!(y in rows) || !(x in rows[y])) return hideTip();
    const sum = rows[y].reduce((a, b) => a + b, 0) || 1;
    return showWords(canvas, event.offsetX, event.offsetY, `true ${names[y]}, predicted ${names[x]}`, `${num(rows[y][x])} · ${percent(rows[y][x] / sum, 1)} of ${names[y]}`);
  });
  canvas.addEventListener("mouseleave", hideTip);
  return box;
}

const sizeOf = (rows, left, cell) => [left + cell * rows.length + 2, cell * rows.length + left];
const quoted = (one) => `"${String(one).replaceAll('"', '""')}"`;

function menu(name, { classes, matrix: rows }) {
  const names = rows.map((_, i) => String(classes?.[i] ?? i));
  const draw = (ctx, scale) => {
    ctx.fillStyle = css("surface");
    ctx.fillRect(0, 0, ...sizeOf(rows, 110, 40).map((one) => one * scale));
    paint(ctx, rows, names, 110, 40, scale);
  };
  const csv = () => [["true", ...names], ...rows.map((row, i) => [names[i], ...row])].map((row) => row.map(quoted).join(",")).join("\n");
  return saveMenu(name, () => sizeOf(rows, 110, 40), draw, (file) => saveText(`${csv()}\n`, file));
}

function paint(ctx, rows, names, left, cell, scale) {
  if (scale !== 1) ctx.scale(scale, scale);
  const most = Math.max(...rows.flat(), 1e-9);
  rows.forEach((row, y) => {
    const sum = row.reduce((a, b) => a + b, 0) || 1;
    row.forEach((value, x) => {
      const share = isShare ? value / sum : value / most;
      const background = heat(share ** 0.6);
      ctx.fillStyle = background;
      ctx.fillRect(left + x * cell, y * cell, cell - (cell > 8 ? 1 : 0), cell - (cell > 8 ? 1 : 0));
      if (rows.length > MOST_NUMBERS || cell < 22 || !value) return;
      ctx.fillStyle = inkOn(background);
      [ctx.font, ctx.textAlign, ctx.textBaseline] = [`${Math.min(11, cell / 3.2)}px ${FONT}`, "center", "middle"];
      const text = isShare ? `${Math.round(100 * share)}` : String(value);
      ctx.fillText(text, left + (x + 0.5) * cell, (y + 0.5) * cell);
    });
  });
  [ctx.font, ctx.fillStyle, ctx.textBaseline] = [`11px ${FONT}`, css("muted"), "middle"];
  const every = Math.ceil(12 / cell);
  names.forEach((name, i) => {
    if (i % every) return;
    ctx.textAlign = "right";
    ctx.fillText(name, left - 6, (i + 0.5) * cell, left - 8);
    ctx.save();
    ctx.translate(left + (i + 0.5) * cell, cell * rows.length + 6);
    ctx.rotate(-Math.PI / 2);
    ctx.fillText(name, 0, 0, left - 10);
    ctx.restore();
  });
}

function isMatrix(record) {
  const rows = Array.isArray(record?.data) ? record.data : record?.data?.matrix;
  return record?.media === "matrix" && Array.isArray(rows) && rows.length > 0 && rows.every((row) => Array.isArray(row) && row.every((one) => typeof one === "number"));
}

function shown(run, record) {
  const data = record?.data;
  if (record == null) return h("p", { class: "nothing" }, "loading …");
  if (record.error) return h("p", { class: "nothing" }, record.error);
  if (isMatrix(record)) return matrix(Array.isArray(data) ? { matrix: data } : data);
  if (record.media === "image") return h("img", { class: "picture", src: `api/picture?${new URLSearchParams({ run: run.id, name: record.name, step: record.step })}`, alt: `${record.name} at step ${record.step}` });
  const parts = Array.isArray(data) ? data : [data];
  return parts.map((one) => h("pre", { class: "text" }, typeof one === "object" && one !== null ? Object.entries(one).map(([key, value]) => `${key}: ${plain(value)}`).join("\n") : String(one)));
}

function card(run, name, step) {
  const steps = indexOf(run).find((one) => one.name === name)?.steps ?? [];
  const own = steps.filter((one) => one <= step).at(-1) ?? steps[0];
  const record = once(records, `${run.id}\n${name}\n${own}`, "media", { run: run.id, name, step: own });
  return h("section", { class: "card medium", "aria-label": `${name} of ${run.name}` }, h("header", {}, h("i", { class: "swatch-dot", style: { "--run": colorOf(run.color ?? 0) } }), h("h2", {}, run.name), h("span", { class: "muted" }, place(run)), h("span", { class: "push muted" }, record?.media === "matrix" ? "rows true, columns predicted · " : "", `step ${num(own)}`), isMatrix(record) ? menu(name, Array.isArray(record.data) ? { matrix: record.data } : record.data) : null), shown(run, record));
}

const NOTHING = () => h("div", { class: "hint" }, h("h2", {}, "No texts or matrices"), h("p", {}, "Runs with the metric confusion_matrix or the callback text_samples have them, and callbacks that call publish."));

export function mediaPage() {
  const [tabs, slide, body] = [h("div", { class: "media-tabs" }), h("input", { type: "range", class: "steps", "aria-label": "Step" }), h("div", { class: "cards" })];
  const [label, rows] = [h("output", {}), h("button", { type: "button", class: "mini", title: "Colours by share of the true class" }, "share of rows")];
  const bar = h("div", { class: "media-bar" }, tabs, slide, label, rows);
  const element = h("div", {}, bar, body);
  let steps = [];
  slide.addEventListener("input", () => set({ mediaStep: Number(slide.value) >= steps.length - 1 ? null : steps[slide.value] }));
  rows.addEventListener("click", () => {
    isShare = !isShare;
    emit("panel");
  });
  on("sse-media", ({ run }) => {
    indexes.delete(run);
    emit("panel");
  });
  return {
    element,
    isUseful: () => true,
    draw() {
      const runs = chosen();
      const all = runs.flatMap((run) => indexOf(run).map((one) => ({ ...one, run })));
      const names = [...new Set(all.map((one) => one.name))].sort();
      const name = names.includes(view.media) ? view.media : names[0];
      bar.hidden = !names.length;
      if (!names.length) {
        const isLoading = runs.some((run) => indexes.get(run.id) === null);
        return fill(body, isLoading ? h("p", { class: "nothing" }, "loading …") : NOTHING());
      }
      fill(tabs, names.map((one) => h("button", { type: "button", class: "mini", "aria-pressed": String(one === name), onclick: () => set({ media: one }) }, one)));
      const mine = all.filter((one) => one.name === name);
      steps = [...new Set(mine.flatMap((one) => one.steps))].sort((a, b) => a - b);
      [slide.min, slide.max, slide.step] = [0, steps.length - 1, 1];
      const step = view.mediaStep ?? steps.at(-1);
      slide.value = Math.max(0, steps.findLastIndex((one) => one <= step));
      label.textContent = `step ${num(steps[slide.value])}`;
      slide.disabled = steps.length < 2;
      rows.hidden = mine[0].media !== "matrix";
      rows.setAttribute("aria-pressed", String(isShare));
      return fill(body, mine.slice(0, 8).map((one) => card(one.run, name, step)));
    },
  };
}
