// Colours of runs. Ten that colour-blind people can tell apart (Okabe and Ito, Tol), then the same lighter and darker.

const LIGHT = ["#0072b2", "#d55e00", "#00936b", "#c05c94", "#b87d00", "#3a9bdc", "#882255", "#80802a", "#2f9c8c", "#5a48b8"];
const DARK = ["#4ba3e3", "#f0803c", "#2fc79a", "#e698c4", "#f0b43c", "#8fd0f7", "#dd6f9f", "#c6c65c", "#6fd6c5", "#a496f0"];

export const isDark = () => document.documentElement.dataset.theme === "dark";

function mixed(hex, share, into) {
  const part = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [a, b] = [part(hex), part(into)];
  return `#${a.map((one, i) => Math.round(one + (b[i] - one) * share).toString(16).padStart(2, "0")).join("")}`;
}

/** Return the colour of text on a background. */
export function inkOn(hex) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 130 ? "#14171b" : "#ffffff";
}

/** Return the colour of a number that the server keeps for each run. */
export function colorOf(number) {
  const palette = isDark() ? DARK : LIGHT;
  const base = palette[((number % 10) + 10) % 10];
  const tier = Math.floor(number / 10) % 3;
  return tier === 0 ? base : tier === 1 ? mixed(base, 0.42, "#ffffff") : mixed(base, 0.35, "#000000");
}

const known = new Map();
/** Return a colour of the page, by the name of its CSS variable. */
export function css(name) {
  const key = `${name} ${document.documentElement.dataset.theme}`;
  if (!known.has(key)) known.set(key, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return known.get(key);
}

const RAMP = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"]; // viridis
const SOFT_LIGHT = ["#ffffff", "#e3eef9", "#c3daf0", "#93c0e1", "#5f9fd0", "#357ebd", "#155fa5", "#08437f", "#08306b"];
const SOFT_DARK = ["#18191d", "#152a42", "#143c63", "#175084", "#1f67a7", "#3483c8", "#5a9fdc", "#8bbfee", "#c2e0ff"];

function ramp(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return mixed(stops[low], at - low, stops[low + 1]);
}

/** Colour of a share between 0 and 1, from nothing to much. */
export const heat = (t) => ramp(isDark() ? SOFT_DARK : SOFT_LIGHT, t);
/** The same over many orders of magnitude. */
export const spectrum = (t) => ramp(RAMP, t);
