// Elements are made here, from text only: data never becomes markup.

/** Return a new element: `on…` are listeners, `class`, `dataset` and `style` are set as such, the rest are attributes. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "dataset") Object.assign(node.dataset, value);
    else if (key === "style") for (const [name, one] of Object.entries(value)) node.style.setProperty(name, one);
    else if (key === "value" || key === "checked" || key === "indeterminate") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(node, child);
    else if (child != null && child !== false) node.append(child);
  }
}

/** Replace the children of an element. */
export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

/** Replace the children only if `key` is not that of the last time: what stays keeps focus, selection and open menus. */
export function fillOnce(node, key, make) {
  if (node.filledWith === key) return node;
  node.filledWith = key;
  return fill(node, make());
}

const SVG = "http://www.w3.org/2000/svg";
/** Return a new element of a drawing. */
export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
  append(node, children);
  return node;
}

const ICONS = {
  more: "M5 12h.01M12 12h.01M19 12h.01",
  expand: "M15 3h6v6M9 21H3v-6M21 3l-7 7M3 21l7-7",
  shrink: "M4 14h6v6M20 10h-6V4M14 10l7-7M3 21l7-7",
  close: "M18 6 6 18M6 6l12 12",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  moon: "M20 14.5A8 8 0 1 1 9.5 4a6.5 6.5 0 0 0 10.5 10.5z",
  link: "M10 13a5 5 0 0 0 7.5.5l3-3a5 5 0 0 0-7-7l-1.7 1.7M14 11a5 5 0 0 0-7.5-.5l-3 3a5 5 0 0 0 7 7l1.7-1.7",
  help: "M9.1 9a3 3 0 0 1 5.8 1c0 2-3 3-3 3M12 17h.01M12 2a10 10 0 1 0 0 20 10 10 0 0 0 0-20",
  side: "M3 4h18v16H3zM9 4v16",
  archive: "M3 4h18v5H3zM5 9v11h14V9M10 13h4",
  reset: "M3 12a9 9 0 1 0 3-6.7L3 8M3 3v5h5",
  chevron: "m9 6 6 6-6 6",
};

/** Return a line icon by name. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Return a button that shows an icon and has a name for everybody else. */
export const iconButton = (name, label, onclick, props = {}) =>
  h("button", { type: "button", class: "icon-button", title: label, "aria-label": label, onclick, ...props }, icon(name));

let toasts;
/** Show a short message for a few seconds. */
export function toast(text) {
  toasts ??= document.body.appendChild(h("div", { class: "toasts", role: "status", "aria-live": "polite" }));
  const one = toasts.appendChild(h("div", { class: "toast" }, text));
  setTimeout(() => one.remove(), 3500);
}
