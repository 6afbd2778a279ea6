// One chart: axes and cursor by uPlot, curves drawn by draw.js, points from series.js.

import uPlot from "./vendor/uPlot.js";
import { fill, h, iconButton } from "./dom.js";
import { drawLines, drawMarks, FONT } from "./draw.js";
import { chartMenu, logTicks } from "./export.js";
import { num, short, xText, xTick } from "./format.js";
import { groupOf, groupColor } from "./grouping.js";
import { marksOf } from "./marks.js";
import { colorOf, css } from "./palette.js";
import { covers, curve, extent, isSmoothed, load, nearest, shown, smoothed, together } from "./series.js";
import { data, focused, openRun, set, view } from "./state.js";
import { hideTip, showTip } from "./tip.js";

const charts = new Set();
const visible = new IntersectionObserver(
  (seen) => seen.forEach((one) => one.target.chart?.setVisible(one.isIntersecting)),
  { rootMargin: "200px" },
);
const sized = new ResizeObserver((seen) => seen.forEach((one) => one.target.chart?.resize()));
let frame = 0;
let pointedAt = null; // the chart under the mouse
const dirty = new Set();

/** Draw charts again at the next frame: one, or all that are on the screen. */
export function redraw(only) {
  for (const one of only ? [only] : charts) dirty.add(one);
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    const some = [...dirty];
    dirty.clear();
    for (const one of some) if (one.isVisible) one.draw();
  });
}

/** Fetch what charts on the screen lack, and draw them. */
export function refresh() {
  for (const one of charts) if (one.isVisible) one.fetch();
  redraw();
}

/** The range that all charts show. */
export function xRange() {
  const found = view.zoom ?? extent(view.runs ?? []) ?? [0, 1];
  const [low, high] = view.logx ? [Math.max(found[0], 1e-3), Math.max(found[1], 1e-2)] : found;
  return low < high ? [low, high] : [low - 0.5, high + 0.5];
}

/** Move the range by a share of its width, and make it wider or narrower around `at`, a share of it. */
export function scroll(by, factor, at = 0.5) {
  const [low, high] = view.logx ? xRange().map(Math.log) : xRange();
  const width = high - low;
  const start = low + by * width + at * width * (1 - factor);
  const ends = [start, start + factor * width];
  set({ zoom: view.logx ? ends.map(Math.exp) : ends });
}

export class Chart {
  /** `spec`: id, title, `sources()` that returns [{run, split, name, dash?, color?, label?}], small. */
  constructor(spec) {
    this.spec = spec;
    this.isVisible = false;
    this.readout = h("div", { class: "readout" });
    this.body = h("div", { class: "plot" });
    this.body.chart = this;
    this.note = h("span", { class: "note" });
    this.log = h("button", { type: "button", class: "mini", title: "Logarithmic y axis", onclick: () => this.toggleLog() }, "log");
    this.bigger = iconButton("expand", "Larger or smaller", () => set({ big: view.big === spec.id ? "" : spec.id }));
    const title = h("h3", { title: spec.title }, spec.title);
    const tools = h("div", { class: "tools" }, this.log, spec.small ? null : this.bigger, chartMenu(this));
    this.element = h("section", { class: "chart", "aria-label": `Chart of ${spec.about ?? spec.title}`, dataset: { chart: spec.id } },
      h("header", {}, title, this.note, this.readout, tools), this.body);
    charts.add(this);
    visible.observe(this.body);
    sized.observe(this.body);
  }

  remove() {
    charts.delete(this);
    visible.unobserve(this.body);
    sized.unobserve(this.body);
    this.abort?.abort();
    this.plot?.destroy();
    this.element.remove();
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (isVisible) {
      this.fetch();
      redraw(this);
    }
  }

  resize() {
    const [width, height] = [this.body.clientWidth, this.body.clientHeight];
    if (!width || !height) return;
    if (this.plot && (this.plot.width !== width || this.plot.height !== height)) this.plot.setSize({ width, height });
    if (this.isVisible) redraw(this);
  }

  get isLog() {
    return view.logy.includes(this.spec.id);
  }

  toggleLog() {
    set({ logy: this.isLog ? view.logy.filter((one) => one !== this.spec.id) : [...view.logy, this.spec.id] });
  }

  sources() {
    return this.spec.sources().map((one) => ({ ...one, curve: curve(one.run, one.split, one.name) }));
  }

  /** Fetch the curves as a whole, then the range that is shown in detail. */
  async fetch() {
    const wanted = this.sources().map((one) => one.curve);
    const lacks = wanted.filter((one) => !covers(one, view.zoom));
    const key = lacks.map((one) => `${one.run}|${one.split}|${one.name}|${Boolean(one.full)}`).join() + view.x + view.zoom;
    if (!lacks.length || key === this.fetching) return;
    this.abort?.abort();
    this.abort = new AbortController();
    this.failed = null;
    this.fetching = key;
    const pixels = Math.max(200, Math.round(this.body.clientWidth));
    try {
      for (const range of view.zoom ? [null, view.zoom] : [null]) {
        const splits = Map.groupBy ? Map.groupBy(lacks, (one) => one.split) : bySplit(lacks);
        await Promise.all([...splits.values()].map((some) => load(some, range, pixels, this.abort.signal)));
      }
      redraw(); // the range of all charts may be another now
    } catch (error) {
      if (error.name !== "AbortError") this.failed = error.message;
    } finally {
      if (this.fetching === key) this.fetching = "";
    }
  }

  /** Return the lines to draw, one for each run or group of runs and split. */
  lines(range) {
    const sources = this.sources().filter((one) => one.curve.full);
    const span = (extent(view.runs ?? []) ?? [0, 1]).reduce((a, b) => b - a);
    const made = (one, rest) => ({ ...one, set: shown(one.curve, view.zoom), full: one.curve.full, span, ...rest });
    if (!view.group || !view.aggregate || this.spec.alone) {
      return sources.map((one) => made(one, { color: one.color ?? colorOf(data.runs.get(one.run)?.color ?? 0) }));
    }
    const groups = new Map();
    for (const one of sources) {
      const key = `${groupOf(data.runs.get(one.run))}\n${one.split}\n${one.name}`;
      groups.set(key, [...(groups.get(key) ?? []), one]);
    }
    return [...groups.values()].map((some) => {
      const group = groupOf(data.runs.get(some[0].run));
      const common = { color: groupColor(group), span, label: group, group, count: some.length };
      if (some.length === 1) return made(some[0], common);
      const joined = together(some.map((one) => shown(one.curve, view.zoom)), range, Math.max(100, this.body.clientWidth >> 1));
      return { ...some[0], ...common, set: joined, full: joined };
    });
  }

  yRange(lines, range) {
    const { isLog } = this;
    let [low, high] = [Infinity, -Infinity];
    const some = [];
    for (const { set: one } of lines) {
      for (let i = 0; i < one.x.length; i++) {
        if (one.x[i] < range[0] || one.x[i] > range[1] || one.min[i] == null) continue;
        const least = isLog && one.min[i] <= 0 ? (one.max[i] > 0 ? one.max[i] : Infinity) : one.min[i];
        low = Math.min(low, least);
        if (!isLog || one.max[i] > 0) high = Math.max(high, one.max[i]);
        if (!view.outliers && one.last[i] != null) some.push(one.last[i]);
      }
    }
    if (!view.outliers && some.length > 20) {
      some.sort((a, b) => a - b);
      [low, high] = [some[Math.floor(0.01 * some.length)], some[Math.ceil(0.97 * some.length) - 1]];
    }
    if (!(low <= high)) return isLog ? [0.1, 10] : [0, 1];
    if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    const pad = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }

  draw() {
    const [width, height] = [this.body.clientWidth, this.body.clientHeight];
    if (!width || !height) return;
    const style = `${this.isLog} ${view.logx} ${view.x} ${document.documentElement.dataset.theme}`;
    if (style !== this.style) {
      this.plot?.destroy();
      this.plot = null;
      this.style = style;
    }
    const range = xRange();
    this.range = range;
    this.current = this.lines(range);
    const [low, high] = this.yRange(this.current, range);
    if (!this.plot) this.make(width, height, range, [low, high]);
    else {
      this.plot.batch(() => {
        this.plot.setScale("x", { min: range[0], max: range[1] });
        this.plot.setScale("y", { min: low, max: high });
      });
    }
    this.log.setAttribute("aria-pressed", String(this.isLog));
    const isEmpty = !this.current.some((one) => one.set.x.length);
    this.body.classList.toggle("is-empty", isEmpty);
    this.body.dataset.empty = isEmpty ? (this.failed ?? (this.fetching ? "loading …" : "no values")) : "";
    if (this.spec.note) fill(this.note, this.spec.note());
  }

  make(width, height, xs, ys) {
    const axis = { stroke: () => css("muted"), font: `11px ${FONT}`, grid: { stroke: () => css("grid"), width: 1 }, ticks: { show: false } };
    const options = {
      width, height, padding: [8, 10, 0, 0],
      legend: { show: false },
      series: [{}],
      scales: {
        x: { time: false, auto: false, distr: view.logx ? 3 : 1, range: () => this.range },
        y: { auto: false, distr: this.isLog ? 3 : 1, range: () => ys },
      },
      axes: [
        { ...axis, ...(view.logx ? LOG : {}), scale: "x", size: 24, gap: 4, space: this.spec.small ? 48 : 64, values: (_, at) => at.map((one) => (one == null ? "" : xTick(view.x, one))) },
        { ...axis, ...(this.isLog ? LOG : {}), scale: "y", size: this.spec.small ? 44 : 52, gap: 6, space: this.spec.small ? 24 : 34, values: (_, at) => labels(at) },
      ],
      cursor: {
        x: true, y: false, points: { show: false },
        drag: { x: true, y: false, setScale: false, dist: 4 },
        bind: {
          dblclick: () => () => set({ zoom: null }, { push: true }),
          mousedown: (plot, target, handler) => (event) => (event.button === 0 ? (event.shiftKey ? this.pan(event) : this.press(event, handler)) : null),
          mouseleave: (plot, target, handler) => (event) => {
            handler(event);
            leave();
          },
        },
      },
      hooks: {
        draw: [(plot) => this.paint(plot)],
        setSelect: [(plot) => this.select(plot)],
        setCursor: [(plot) => this.point(plot)],
      },
    };
    fill(this.body);
    this.plot = new uPlot(options, [[...xs]], this.body);
    this.plot.over.addEventListener("click", (event) => this.click(event));
    this.plot.over.addEventListener("mouseenter", () => (pointedAt = this));
    this.plot.over.addEventListener("wheel", (event) => this.wheel(event));
    this.plot.over.addEventListener("touchstart", (event) => {
      this.pinched = null;
      if (event.touches.length > 1) this.touch(event);
    }, { passive: false });
    this.plot.over.addEventListener("touchmove", (event) => this.touch(event), { passive: false });
    this.plot.batch(() => {
      this.plot.setScale("x", { min: xs[0], max: xs[1] });
      this.plot.setScale("y", { min: ys[0], max: ys[1] });
    });
  }

  /** Return the frame for drawing on the plot's canvas. */
  frame(plot) {
    const { left, top, width, height } = plot.bbox;
    const { x, y } = plot.scales;
    return frameOf({ left, top, width, height, xs: [x.min, x.max], ys: [y.min, y.max], isLogX: view.logx, isLogY: this.isLog, scale: devicePixelRatio || 1 });
  }

  paint(plot) {
    const g = this.frame(plot);
    this.places = view.events && !this.spec.small ? drawMarks(plot.ctx, g, this.marks()) : [];
    const pointed = this.pointed;
    const lines = this.current.map((one) => ({ ...one, dim: pointed && one.run !== pointed, strong: pointed && one.run === pointed }));
    drawLines(plot.ctx, g, lines, { smooth: view.smooth });
  }

  /** Marks of the runs; phases only of the one in focus. */
  marks() {
    const runs = [...new Set(this.current.map((one) => one.run))].slice(0, 8);
    const found = runs.map((id) => marksOf(id));
    const first = runs.indexOf(focused()?.id);
    return { phases: found[first < 0 ? 0 : first]?.phases ?? [], ticks: found.flatMap((one) => one.ticks).sort((a, b) => a.x - b.x) };
  }

  press(event, handler) {
    this.downAt = event.clientX;
    handler(event);
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const ends = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (ends[1] > ends[0]) set({ zoom: ends }, { push: true });
  }

  /** Move the range of all charts with the mouse. */
  pan(event) {
    const [start, [low, high], width] = [event.clientX, this.range, this.plot.over.clientWidth];
    const move = (now) => {
      const share = (start - now.clientX) / width;
      const ends = view.logx
        ? [low, high].map((one) => one * (high / low) ** share)
        : [low, high].map((one) => one + share * (high - low));
      set({ zoom: ends });
    };
    const up = () => {
      removeEventListener("mousemove", move);
      removeEventListener("mouseup", up);
      this.downAt = NaN;
    };
    addEventListener("mousemove", move);
    addEventListener("mouseup", up);
    hideTip();
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    scroll(0, Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200))), event.offsetX / this.plot.over.clientWidth);
  }

  /** A finger moves the cursor; up and down still scrolls. Two fingers move the range and make it wider or narrower. */
  touch(event) {
    const box = this.plot.over.getBoundingClientRect();
    if (event.touches.length > 1) {
      event.preventDefault(); // the browser would enlarge the page
      return this.pinch(box, ...event.touches);
    }
    const [left, top] = [event.touches[0].clientX - box.left, event.touches[0].clientY - box.top];
    pointedAt = this;
    if (left >= 0 && left <= box.width) this.plot.setCursor({ left, top });
    return undefined;
  }

  pinch(box, one, two) {
    const at = ((one.clientX + two.clientX) / 2 - box.left) / box.width;
    const apart = Math.max(Math.hypot(one.clientX - two.clientX, one.clientY - two.clientY), 1);
    const before = this.pinched;
    this.pinched = { at, apart };
    if (!before) return;
    const factor = before.apart / apart;
    scroll(factor * (before.at - at), factor, before.at);
    hideTip();
  }

  click(event) {
    if (Math.abs(event.clientX - this.downAt) > 3 || Number.isNaN(this.downAt)) return;
    if (this.pointed) openRun(this.pointed);
  }

  /** Show values at the cursor here, and the cursor in all other charts. */
  point(plot) {
    const { left, top } = plot.cursor;
    if (pointedAt !== this) return;
    if (left == null || left < 0) return;
    const x = plot.posToVal(left, "x");
    const rows = this.valuesAt(x);
    let best = null;
    for (const one of rows) {
      const away = Math.abs(plot.valToPos(one.shown, "y") - top);
      if (away < 16 && (!best || away < best.away)) best = { away, run: one.line.run };
    }
    if ((best?.run ?? "") !== (this.pointed ?? "")) {
      this.pointed = best?.run ?? "";
      plot.over.classList.toggle("on-line", Boolean(this.pointed));
      redraw(this);
    }
    const scale = devicePixelRatio || 1;
    const near = top < 22 || this.places.some((one) => one.mark.kind === "resume")
      ? this.places.filter((one) => Math.abs(one.x / scale - plot.bbox.left / scale - left) < 6 && (top < 22 || one.mark.kind === "resume"))
      : [];
    showTip(plot.over, left, top, xText(view.x, x), rows, near.map((one) => one.mark), this.pointed);
    for (const one of charts) if (one !== this && one.isVisible && one.plot) one.follow(x);
  }

  follow(x) {
    this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: -10 });
    const rows = this.valuesAt(x).slice(0, 4);
    fill(this.readout, rows.map((one) => h("span", { style: { color: one.line.color } }, num(one.shown))));
  }

  /** Return value, smoothed value and range of every line at x. */
  valuesAt(x) {
    const rows = [];
    for (const line of this.current ?? []) {
      const at = nearest(line.set.x, x);
      if (at < 0 || line.set.last[at] == null) continue;
      if (x > line.set.x.at(-1) + 0.02 * (this.range[1] - this.range[0])) continue;
      const value = line.set.last[at];
      const smooth = isSmoothed(line, view.smooth) ? smoothed(line.set, view.smooth, line.span, line.full)[at] : null;
      rows.push({ line, at: line.set.x[at], value, smooth, shown: smooth ?? value, min: line.set.min[at], max: line.set.max[at] });
    }
    return rows.sort((a, b) => b.shown - a.shown);
  }
}

function leave() {
  pointedAt = null;
  hideTip();
  for (const one of charts) {
    fill(one.readout);
    if (one.pointed) {
      one.pointed = "";
      redraw(one);
    }
    if (one.plot) one.plot.setCursor({ left: -10, top: -10 });
  }
}

const LOG = { splits: (plot, i, low, high) => logTicks(low, high, i ? 6 : 8), filter: (plot, at) => at };

/** Return short labels of ticks that differ from each other. */
function labels(ticks) {
  const shown = ticks.filter((one) => one != null);
  for (let digits = 4; digits <= 12; digits += 2) {
    const made = new Map(shown.map((one) => [one, digits === 4 ? short(one) : String(+one.toPrecision(digits))]));
    if (new Set(made.values()).size === made.size || digits === 12) return ticks.map((one) => made.get(one) ?? "");
  }
  return [];
}

function bySplit(some) {
  const found = new Map();
  for (const one of some) found.set(one.split, [...(found.get(one.split) ?? []), one]);
  return found;
}

/** Return a frame: functions from values to pixels. */
export function frameOf({ left, top, width, height, xs, ys, isLogX, isLogY, scale }) {
  const along = (low, high, start, length, isLog) => {
    if (!isLog) return (value) => start + ((value - low) / (high - low)) * length;
    const [a, b] = [Math.log(low), Math.log(high)];
    return (value) => (value > 0 ? start + ((Math.log(value) - a) / (b - a)) * length : NaN);
  };
  return { left, top, width, height, range: xs, scale, x: along(xs[0], xs[1], left, width, isLogX), y: along(ys[0], ys[1], top + height, -height, isLogY) };
}
