// Drawing of curves and marks, on a canvas or into an SVG file: both have the same few calls.
//
// A frame `g` has left, top, width and height in pixels, functions x and y from values to pixels, `range` in x, and
// `scale`, the pixels of a CSS pixel.

import { css } from "./palette.js";
import { indexAt, isSmoothed, smoothed } from "./series.js";

const MANY = 16; // lines, above which they are one pixel wide: without a GPU these are drawn ten times as fast

/** Draw lines; each has a set, a color, maybe a dash, and `dim` if another one is pointed at. */
export function drawLines(ctx, g, lines, { smooth = 0 } = {}) {
  clipped(ctx, g, () => {
    for (const line of lines) if (!line.set.raw) (lines.length > MANY ? drawSpans : drawBand)(ctx, g, line);
    for (const line of lines) drawLine(ctx, g, line, smooth, lines.length > MANY);
    for (const line of lines) drawNonfinite(ctx, g, line);
  });
}

function clipped(ctx, g, draw) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(g.left, g.top, g.width, g.height);
  ctx.clip();
  draw();
  ctx.restore();
}

function ends(set, range) {
  return [Math.max(indexAt(set.x, range[0]), 0), Math.min(indexAt(set.x, range[1]) + 1, set.x.length - 1)];
}

function drawBand(ctx, g, { set, color, dim }) {
  const [first, last] = ends(set, g.range);
  ctx.globalAlpha = dim ? 0.05 : 0.18;
  ctx.fillStyle = color;
  let start = -1;
  for (let i = first; i <= last + 1; i++) {
    const isGap = i > last || set.min[i] == null;
    if (!isGap && start < 0) start = i;
    if (!isGap || start < 0) continue;
    ctx.beginPath();
    for (let j = start; j < i; j++) ctx.lineTo(g.x(set.x[j]), g.y(set.max[j]));
    for (let j = i - 1; j >= start; j--) ctx.lineTo(g.x(set.x[j]), g.y(set.min[j]));
    ctx.closePath();
    ctx.fill();
    start = -1;
  }
  ctx.globalAlpha = 1;
}

/** Draw a band as thin upright lines. */
function drawSpans(ctx, g, { set, color, dim }) {
  const [first, last] = ends(set, g.range);
  ctx.globalAlpha = dim ? 0.1 : 0.35;
  ctx.strokeStyle = color;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let i = first; i <= last; i++) {
    if (set.min[i] == null || set.min[i] === set.max[i]) continue;
    const x = g.x(set.x[i]);
    ctx.moveTo(x, g.y(set.min[i]));
    ctx.lineTo(x, g.y(set.max[i]));
  }
  ctx.stroke();
  ctx.globalAlpha = 1;
}

function trace(ctx, g, set, values, first, last) {
  ctx.beginPath();
  let down = false;
  for (let i = first; i <= last; i++) {
    const y = values[i] == null ? NaN : g.y(values[i]);
    if (Number.isNaN(y)) down = false;
    else if (down) ctx.lineTo(g.x(set.x[i]), y);
    else {
      ctx.moveTo(g.x(set.x[i]), y);
      down = true;
    }
  }
  ctx.stroke();
}

function drawLine(ctx, g, line, smooth, isOneOfMany) {
  const { set, color, dash, dim, strong, full, span } = line;
  if (!set.x.length) return;
  const [first, last] = ends(set, g.range);
  ctx.strokeStyle = ctx.fillStyle = color;
  ctx.lineJoin = "round";
  const isThin = isOneOfMany && !strong;
  ctx.lineWidth = isThin ? 1 : (strong ? 2.4 : 1.6) * g.scale;
  const alpha = dim ? 0.2 : 1;
  const isSmooth = isSmoothed(line, smooth);
  ctx.globalAlpha = isSmooth ? 0.22 * alpha : alpha;
  ctx.setLineDash((isSmooth ? [] : (dash ?? [])).map((one) => one * g.scale));
  if (isSmooth) ctx.lineWidth = isThin ? 1 : g.scale;
  trace(ctx, g, set, set.last, first, last);
  if (isSmooth) {
    ctx.globalAlpha = alpha;
    ctx.lineWidth = isThin ? 1 : (strong ? 2.6 : 1.9) * g.scale;
    ctx.setLineDash((dash ?? []).map((one) => one * g.scale));
    trace(ctx, g, set, smoothed(set, smooth, span, full), first, last);
  }
  ctx.setLineDash([]);
  if (last - first + 1 <= Math.max(g.width / (14 * g.scale), 1)) {
    for (let i = first; i <= last; i++) if (set.last[i] != null) dot(ctx, g.x(set.x[i]), g.y(set.last[i]), 2.1 * g.scale);
  }
  ctx.globalAlpha = 1;
}

function dot(ctx, x, y, radius) {
  if (Number.isNaN(y)) return;
  ctx.beginPath();
  ctx.arc(x, y, radius, 0, 2 * Math.PI);
  ctx.fill();
}

function drawNonfinite(ctx, g, { set, color }) {
  const bottom = g.top + g.height - 7 * g.scale;
  const size = 3 * g.scale;
  ctx.lineWidth = 1.8 * g.scale;
  let before = -Infinity;
  for (const at of set.nonfinite) {
    const x = g.x(at);
    if (x - before < 3 * g.scale || at < g.range[0] || at > g.range[1]) continue;
    before = x;
    ctx.strokeStyle = color;
    ctx.beginPath();
    ctx.moveTo(x - size, bottom - size);
    ctx.lineTo(x + size, bottom + size);
    ctx.moveTo(x - size, bottom + size);
    ctx.lineTo(x + size, bottom - size);
    ctx.stroke();
  }
}

const MARKS = { checkpoint: "muted", resume: "text", warning: "warn", recovery: "bad", rate: "accent", end: "muted", unfreeze: "accent" };

/** Draw what happened: phases shaded, the rest as ticks at the upper edge. Returns where, for tooltips. */
export function drawMarks(ctx, g, marks) {
  const places = [];
  const [text, band, muted] = [css("text"), css("phase"), css("muted")];
  ctx.font = `${10 * g.scale}px ${FONT}`;
  ctx.textAlign = "left";
  ctx.textBaseline = "top";
  clipped(ctx, g, () => {
    for (const one of marks.phases) {
      const [from, to] = [Math.max(g.x(one.x), g.left), Math.min(one.end == null ? Infinity : g.x(one.end), g.left + g.width)];
      if (!(to > from)) continue;
      if (one.number % 2) {
        ctx.fillStyle = band;
        ctx.fillRect(from, g.top, to - from, g.height);
      }
      ctx.fillStyle = muted;
      if (to - from > 46 * g.scale) ctx.fillText(one.label, from + 4 * g.scale, g.top + 10 * g.scale);
      places.push({ x: from, mark: one });
    }
    let lastByKind = {};
    for (const one of marks.ticks) {
      const x = g.x(one.x);
      if (!(x >= g.left - 1 && x <= g.left + g.width + 1)) continue;
      const near = lastByKind[one.kind];
      if (near && x - near.x < 3 * g.scale) {
        near.more = (near.more ?? 0) + 1;
        continue;
      }
      tick(ctx, g, x, one, css(MARKS[one.kind] ?? "muted") || text);
      lastByKind[one.kind] = { x, mark: one };
      places.push(lastByKind[one.kind]);
    }
  });
  return places;
}

function tick(ctx, g, x, mark, color) {
  ctx.fillStyle = ctx.strokeStyle = color;
  const size = 4 * g.scale;
  ctx.globalAlpha = 0.9;
  ctx.beginPath();
  if (mark.kind === "resume") {
    ctx.lineWidth = g.scale;
    ctx.setLineDash([3 * g.scale, 3 * g.scale]);
    ctx.moveTo(x, g.top);
    ctx.lineTo(x, g.top + g.height);
    ctx.globalAlpha = 0.45;
    ctx.stroke();
    ctx.setLineDash([]);
  } else if (mark.kind === "warning" || mark.kind === "recovery") {
    ctx.moveTo(x - size, g.top + 1);
    ctx.lineTo(x + size, g.top + 1);
    ctx.lineTo(x, g.top + 1 + 1.7 * size);
    ctx.closePath();
    ctx.fill();
  } else {
    ctx.fillRect(x - 0.75 * g.scale, g.top, 1.5 * g.scale, (mark.kind === "checkpoint" ? 5 : 8) * g.scale);
  }
  ctx.globalAlpha = 1;
}

export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
