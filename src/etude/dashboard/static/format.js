// Numbers, times and sizes as short text.

/** Four significant digits; large and small numbers with an exponent. */
export function num(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 2).replace("e+", "e").replace("-", "−");
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(places, 6)).replace("-", "−");
}

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
/** As on an axis: 12k, 3.5M. */
export function short(value) {
  if (Math.abs(value) >= 1e15) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  for (const [size, unit] of UNITS) {
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${unit}`;
  }
  const size = Math.abs(value);
  return size && (size >= 1e3 || size < 1e-3) ? num(value, 3) : String(+value.toPrecision(4)).replace("-", "−");
}

/** Seconds as 1 h 05 min. */
export function duration(s) {
  if (s == null || !Number.isFinite(s)) return "–";
  if (s < 1) return s <= 0 ? "0 s" : `${Math.round(s * 1000)} ms`;
  if (s < 90) return `${Math.round(s)} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")}`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** How long ago a time in seconds since 1970 is. */
export function ago(time, now = Date.now() / 1000) {
  return time == null ? "–" : now - time < 5 ? "now" : `${duration(now - time)} ago`;
}

/** A date and time of day. */
export const when = (time) =>
  time == null ? "–" : new Date(time * 1000).toLocaleString("sv-SE").slice(0, 16);

/** Bytes as GiB, MiB. */
export function bytes(n) {
  if (n == null) return "–";
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (n >= size) return `${(n / size).toFixed(1)} ${unit}`;
  }
  return `${n} B`;
}

/** A share as per cent. */
export const percent = (share, digits = 0) => (share == null ? "–" : `${(100 * share).toFixed(digits)} %`);

/** A value of a config, as one line. */
export function plain(value) {
  if (value == null) return "–";
  if (typeof value === "number") return Number.isFinite(value) ? String(+value.toPrecision(8)) : String(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

const AXES = {
  step: ["step", short],
  samples: ["samples", short],
  tokens: ["tokens", short],
  epoch: ["epoch", (v) => String(+v.toFixed(2))],
  time: ["time", duration],
  flops: ["FLOPs", short],
};
export const xNames = Object.keys(AXES);
export const xLabel = (x) => AXES[x][0];
/** A position on the x axis as text. */
export const xText = (x, value) => (x === "time" || x === "flops" ? AXES[x][1](value) : num(x === "epoch" ? +value.toFixed(3) : Math.round(value), 7));
/** A tick of the x axis as text. */
export const xTick = (x, value) => AXES[x][1](value);
