// Charts as files: PNG and SVG are drawn by the same code, CSV has all points from the server.

import { frameOf } from "./chart.js";
import { h, icon, toast } from "./dom.js";
import { drawLines, drawMarks, FONT } from "./draw.js";
import { short, xLabel, xTick } from "./format.js";
import { css } from "./palette.js";
import { data, view } from "./state.js";

const [WIDTH, HEIGHT] = [900, 500];

/** Return a menu that saves something as PNG and SVG, both by `draw(ctx, scale)`, and as CSV. */
export function saveMenu(title, size, draw, csv) {
  const file = (end) => `${title.replace(/[^\w.-]+/g, "_").slice(0, 60)}.${end}`;
  const png = () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = size().map((one) => 2 * one);
    draw(canvas.getContext("2d"), 2);
    canvas.toBlob((blob) => download(blob, file("png")));
  };
  const svg = () => {
    const ctx = new SvgContext(...size());
    draw(ctx, 1);
    download(new Blob([ctx.toString()], { type: "image/svg+xml" }), file("svg"));
  };
  const entry = (label, then) => h("button", { type: "button", onclick: () => {
    then();
    box.open = false;
  } }, label);
  const box = h("details", { class: "menu" }, h("summary", { title: "Save", "aria-label": `Save ${title}` }, icon("more")),
    h("div", { class: "menu-list" }, entry("PNG", png), entry("SVG", svg), entry("CSV of all points", () => csv(file("csv")))));
  return box;
}

/** A canvas that writes SVG instead: the few calls that our drawing makes. */
class SvgContext {
  constructor(width, height) {
    this.size = [width, height];
    this.parts = [];
    this.stack = [];
    this.clips = 0;
    Object.assign(this, { globalAlpha: 1, lineWidth: 1, strokeStyle: "#000", fillStyle: "#000", font: "", textAlign: "left", textBaseline: "top", dash: [], d: "" });
  }
  save() {
    this.stack.push([this.globalAlpha, this.parts.length, 1]);
    this.parts.push("<g>");
  }
  restore() {
    const [alpha, , groups] = this.stack.pop();
    this.parts.push("</g>".repeat(groups));
    this.globalAlpha = alpha;
  }
  transform(text) {
    this.parts.push(`<g transform="${text}">`);
    this.stack.at(-1)[2] += 1;
  }
  translate(x, y) {
    this.transform(`translate(${at(x)} ${at(y)})`);
  }
  rotate(angle) {
    this.transform(`rotate(${at((angle * 180) / Math.PI)})`);
  }
  clip() {
    const id = `c${this.clips++}`;
    this.parts[this.stack.at(-1)[1]] = `<clipPath id="${id}"><path d="${this.d}"/></clipPath><g clip-path="url(#${id})">`;
  }
  beginPath() {
    this.d = "";
  }
  moveTo(x, y) {
    this.d += `M${at(x)} ${at(y)}`;
  }
  lineTo(x, y) {
    this.d += `${this.d ? "L" : "M"}${at(x)} ${at(y)}`;
  }
  closePath() {
    this.d += "Z";
  }
  rect(x, y, width, height) {
    this.d += `M${at(x)} ${at(y)}h${at(width)}v${at(height)}h${at(-width)}Z`;
  }
  arc(x, y, r) {
    this.d += `M${at(x - r)} ${at(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
  }
  setLineDash(dash) {
    this.dash = dash;
  }
  stroke() {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    if (this.d) this.parts.push(`<path d="${this.d}" fill="none" stroke="${safe(this.strokeStyle)}" stroke-width="${this.lineWidth}" stroke-linejoin="round" opacity="${this.globalAlpha}"${dash}/>`);
  }
  fill() {
    if (this.d) this.parts.push(`<path d="${this.d}" fill="${safe(this.fillStyle)}" opacity="${this.globalAlpha}"/>`);
  }
  fillRect(x, y, width, height) {
    this.parts.push(`<rect x="${at(x)}" y="${at(y)}" width="${at(width)}" height="${at(height)}" fill="${safe(this.fillStyle)}" opacity="${this.globalAlpha}"/>`);
  }
  fillText(text, x, y) {
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    const [, weight, size] = /^(\d+ )?([\d.]+)px/.exec(this.font) ?? [0, "", 11];
    const below = this.textBaseline === "top" ? 0.8 : this.textBaseline === "middle" ? 0.35 : 0;
    this.parts.push(`<text x="${at(x)}" y="${at(y + below * size)}" fill="${safe(this.fillStyle)}" text-anchor="${anchor}" font-size="${size}" font-weight="${(weight || "400").trim()}">${safe(text)}</text>`);
  }
  measureText(text) {
    return { width: String(text).length * 6.2 };
  }
  toString() {
    const [width, height] = this.size;
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" font-family="${safe(FONT)}">${this.parts.join("\n")}</svg>\n`;
  }
}

const at = (value) => (Number.isFinite(value) ? Math.round(value * 100) / 100 : 0);
const safe = (text) => String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "�").replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);

/** Return ticks of a logarithmic axis: powers of ten, with 2 and 5 between them where there is room. */
export function logTicks(low, high, most) {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const powers = Array.from({ length: to - from + 1 }, (_, i) => +`1e${from + i}`);
  const isIn = (one) => one >= low * 0.9999 && one <= high * 1.0001;
  const all = powers.flatMap((one) => [one, 2 * one, 5 * one]).filter(isIn);
  if (all.length <= 2) return linearTicks(low, high, most);
  if (all.length <= most + 2) return all;
  const every = Math.max(1, Math.ceil(powers.filter(isIn).length / most));
  return powers.filter((one, i) => isIn(one) && i % every === 0);
}

const ticks = (low, high, isLog, most) => (isLog ? logTicks : linearTicks)(low, high, most);

function linearTicks(low, high, most) {
  const rough = (high - low) / most;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 5, 10].find((one) => one * size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

/** Draw a whole chart with title, axes and names. */
function render(ctx, chart, scale) {
  const lines = chart.current ?? [];
  const [width, height] = [WIDTH * scale, HEIGHT * scale];
  const names = [...new Map(lines.map((one) => [`${one.run}\n${one.label}`, one])).values()].slice(0, 12);
  const bottom = 44 + 18 * Math.ceil(names.length / 3);
  const box = { left: 62 * scale, top: 44 * scale, width: (WIDTH - 84) * scale, height: (HEIGHT - 44 - bottom) * scale };
  const [xs, ys] = [chart.range, [chart.plot.scales.y.min, chart.plot.scales.y.max]];
  const g = frameOf({ ...box, xs, ys, isLogX: view.logx, isLogY: chart.isLog, scale });
  ctx.fillStyle = css("surface");
  ctx.fillRect(0, 0, width, height);
  const words = (text, x, y, size, align, color, weight = "") => {
    ctx.font = `${weight}${size * scale}px ${FONT}`;
    [ctx.textAlign, ctx.textBaseline, ctx.fillStyle] = [align, "middle", color];
    ctx.fillText(text, x, y);
  };
  words(chart.spec.title, 20 * scale, 22 * scale, 15, "left", css("text"), "600 ");
  ctx.lineWidth = scale;
  const rule = (x1, y1, x2, y2) => {
    ctx.strokeStyle = css("grid");
    ctx.beginPath();
    ctx.moveTo(x1, y1);
    ctx.lineTo(x2, y2);
    ctx.stroke();
  };
  for (const value of ticks(ys[0], ys[1], chart.isLog, 6)) {
    rule(box.left, g.y(value), box.left + box.width, g.y(value));
    words(short(value), box.left - 8 * scale, g.y(value), 11, "right", css("muted"));
  }
  for (const value of ticks(xs[0], xs[1], view.logx, 8)) {
    rule(g.x(value), box.top, g.x(value), box.top + box.height);
    words(xTick(view.x, value), g.x(value), box.top + box.height + 13 * scale, 11, "center", css("muted"));
  }
  words(xLabel(view.x), box.left + box.width, box.top + box.height + 28 * scale, 11, "right", css("muted"));
  if (view.events) drawMarks(ctx, g, chart.marks());
  drawLines(ctx, g, lines, { smooth: view.smooth });
  names.forEach((one, i) => {
    const [x, y] = [(20 + (i % 3) * ((WIDTH - 40) / 3)) * scale, (HEIGHT - bottom + 42 + 18 * Math.floor(i / 3)) * scale];
    ctx.fillStyle = one.color;
    ctx.fillRect(x, y - 1.5 * scale, 16 * scale, 3 * scale);
    words(cut(one.label ?? data.runs.get(one.run)?.name ?? one.run), x + 22 * scale, y, 11, "left", css("text"));
  });
}

const cut = (text) => (text.length > 38 ? `${text.slice(0, 37)}…` : text);

function download(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  [link.href, link.download] = [url, name];
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Save a file of the server. */
export function saveFrom(path, name) {
  const link = document.createElement("a");
  [link.href, link.download] = [path, name];
  document.body.append(link);
  link.click();
  link.remove();
}

/** Save text. */
export const saveText = (text, name) => download(new Blob([text], { type: "text/csv" }), name);

/** The address of all points of some metrics of some runs. */
export function csvPath(sources) {
  const query = new URLSearchParams();
  new Set(sources.map((one) => one.run)).forEach((one) => query.append("run", one));
  new Set(sources.map((one) => one.name)).forEach((one) => query.append("name", one));
  return `api/csv?${query}`;
}

export function chartMenu(chart) {
  const csv = (name) => (chart.spec.sources().length ? saveFrom(csvPath(chart.spec.sources()), name) : toast("There is nothing to save."));
  return saveMenu(chart.spec.title, () => [WIDTH, HEIGHT], (ctx, scale) => render(ctx, chart, scale), csv);
}
