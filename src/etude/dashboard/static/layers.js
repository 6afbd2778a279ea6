// Gradient norms of all layers over time, as a heat map for each run.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { FONT } from "./draw.js";
import { csvPath, saveFrom, saveMenu } from "./export.js";
import { num, xTick } from "./format.js";
import { colorOf, css, spectrum } from "./palette.js";
import { place } from "./runs.js";
import { chosen, emit, on, view } from "./state.js";
import { hideTip, showWords } from "./tip.js";

const PREFIX = "grad_norm/";
const EVERY_MS = 5000;
const [LEFT, BELOW] = [190, 24];
const known = new Map();
const hasLayers = (run) => (run.names?.train ?? []).some((name) => name.startsWith(PREFIX));

function mapOf(run) {
  const key = `${run.id} ${view.x}`;
  const found = known.get(key);
  const isOld = !found || (run.state === "running" && performance.now() - found.at > EVERY_MS);
  if (isOld) {
    known.set(key, { ...found, at: performance.now() });
    get("heatmap", { run: run.id, prefix: PREFIX, x: view.x, pixels: 400 }).then(
      (map) => known.set(key, { at: performance.now(), map }),
      (error) => known.set(key, { at: performance.now(), error: error.message }),
    ).finally(() => emit("panel"));
  }
  return found;
}

function card(run) {
  const found = mapOf(run);
  const body = found?.map?.rows.length ? drawn(found.map) : h("p", { class: "nothing" }, found?.error ?? (found?.map ? "no layers recorded" : "loading …"));
  return h("section", { class: "card heat", "aria-label": `Layers of ${run.name}` }, h("header", {}, h("i", { class: "swatch-dot", style: { "--run": colorOf(run.color ?? 0) } }), h("h2", {}, run.name), h("span", { class: "muted" }, place(run)), found?.map?.rows.length ? [legend(found.map), menu(run, found.map)] : null), body);
}

const heightOf = (map) => Math.min(Math.max(map.rows.length * 15, 90), 900);

function menu(run, map) {
  const draw = (ctx, scale) => {
    ctx.fillStyle = css("surface");
    ctx.fillRect(0, 0, 1000 * scale, (heightOf(map) + BELOW) * scale);
    paint(ctx, 1000, heightOf(map), LEFT, map, scale);
  };
  const sources = map.rows.map((row) => ({ run: run.id, name: PREFIX + row }));
  return saveMenu(`layers of ${run.name}`, () => [1000, heightOf(map) + BELOW], draw, (name) => saveFrom(csvPath(sources), name));
}

function ends(map) {
  let [low, high] = [Infinity, -Infinity];
  for (const row of map.cells) for (const value of row) if (value > 0) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low > high) return [1e-8, 1];
  return low < high ? [low, high] : [low / 2, high * 2];
}

function legend(map) {
  const [low, high] = ends(map);
  const bar = h("canvas", { class: "legend-bar", width: 120, height: 8, "aria-hidden": "true" });
  const ctx = bar.getContext("2d");
  for (let x = 0; x < 120; x++) {
    ctx.fillStyle = spectrum(x / 119);
    ctx.fillRect(x, 0, 1, 8);
  }
  return h("span", { class: "legend" }, num(low, 2), bar, num(high, 2));
}

function drawn(map) {
  const height = heightOf(map);
  const canvas = h("canvas", { role: "img", "aria-label": `Gradient norms of ${map.rows.length} layers` });
  const box = h("div", { class: "heat-box", style: { height: `${height + BELOW}px` } }, canvas);
  const left = () => Math.min(LEFT, box.clientWidth * 0.36);
  const draw = () => {
    const scale = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [box.clientWidth * scale, (height + BELOW) * scale];
    if (box.clientWidth) paint(canvas.getContext("2d"), box.clientWidth, height, left(), map, scale);
  };
  new ResizeObserver(draw).observe(box);
  canvas.addEventListener("mousemove", (event) => {
    const [x, y] = [event.offsetX, event.offsetY];
    const row = Math.floor((y / height) * map.rows.length);
    const column = Math.floor(((x - left()) / (box.clientWidth - left())) * map.x.length);
    if (!(row in map.rows) || !(column in map.x)) return hideTip();
    const value = map.cells[row][column];
    return showWords(canvas, x, y, map.rows[row], `${view.x} ${xTick(view.x, rounded(map.x[column]))}`, value == null ? "not recorded, or not finite" : `largest norm ${num(value)}`);
  });
  canvas.addEventListener("mouseleave", hideTip);
  return box;
}

function paint(ctx, width, height, left, map, scale) {
  if (scale !== 1) ctx.scale(scale, scale);
  const [low, high] = ends(map).map(Math.log);
  const [tall, wide] = [height / map.rows.length, (width - left) / map.x.length];
  map.cells.forEach((row, y) => row.forEach((value, x) => {
    ctx.fillStyle = value == null ? css("hover") : value > 0 ? spectrum((Math.log(value) - low) / (high - low)) : css("faint");
    ctx.fillRect(left + x * wide, y * tall, Math.ceil(wide * 2) / 2 + 0.5, tall + 0.5);
  }));
  ctx.font = `11px ${FONT}`;
  ctx.fillStyle = css("muted");
  [ctx.textBaseline, ctx.textAlign] = ["middle", "right"];
  const every = Math.ceil(12 / tall);
  map.rows.forEach((name, i) => i % every === 0 && ctx.fillText(fitted(ctx, name, left - 10), left - 8, (i + 0.5) * tall));
  ctx.textAlign = "center";
  const ticks = Math.max(2, Math.min(8, Math.floor((width - left) / 90)));
  for (const at of new Set(Array.from({ length: ticks }, (_, i) => Math.round(((map.x.length - 1) * (i + 0.5)) / ticks)))) {
    ctx.fillText(xTick(view.x, rounded(map.x[at])), left + (at + 0.5) * wide, height + 13);
  }
}

const rounded = (x) => (view.x === "epoch" ? x : Math.round(x));

/** Cut a name at its start so that it fits. */
function fitted(ctx, name, width) {
  if (ctx.measureText(name).width <= width) return name;
  let text = name;
  while (text.length > 3 && ctx.measureText(`…${text}`).width > width) text = text.slice(1);
  return `…${text}`;
}

export function layersPage() {
  const element = h("div", { class: "cards" });
  on("sse-restart", ({ run }) => [...known.keys()].filter((key) => key.startsWith(`${run} `)).forEach((key) => known.delete(key)));
  on("points", (run) => view.tab === "layers" && chosen().some((one) => one.id === run) && emit("panel"));
  return {
    element,
    isUseful: () => view.tab === "layers" || chosen().some(hasLayers),
    draw() {
      const runs = chosen().filter(hasLayers).slice(0, 6);
      fill(element, runs.length ? runs.map(card) : h("div", { class: "hint" }, h("h2", {}, "No gradient norms of layers"), h("p", {}, "The callback gradient_monitor records them."), h("pre", {}, "callbacks:\n- name: gradient_monitor\n  log_layers: true")));
    },
  };
}
