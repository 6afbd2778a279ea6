"use strict";
// Shows the values under the pointer. The page is complete without it.
const near = (x, at) => {
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle; else high = middle;
  }
  return Math.abs(x[low] - at) <= Math.abs(x[high] - at) ? low : high;
};
for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg"), box = JSON.parse(svg.dataset.box);
  let lines = null, note = null, cursor = null;
  const leave = () => { note?.remove(); cursor?.remove(); note = cursor = null; };
  svg.addEventListener("pointermove", (event) => {
    lines ??= [...svg.querySelectorAll("[data-points]")].map((one) => JSON.parse(one.dataset.points));
    const all = lines.flatMap((line) => [line.x[0], line.x.at(-1)]);
    const left = Math.min(...all), right = Math.max(...all);
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const share = Math.min(1, Math.max(0, (point.x - box[0]) / (box[2] - box[0])));
    const at = left + share * (right - left);
    if (note === null) {
      note = document.createElement("div");
      note.className = "values";
      cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
      cursor.setAttribute("class", "cursor");
      cursor.setAttribute("y1", box[1]);
      cursor.setAttribute("y2", box[3]);
      svg.append(cursor);
      figure.append(note);
    }
    const first = lines[0].x[near(lines[0].x, at)];
    const place = box[0] + (right > left ? (first - left) / (right - left) : 0.5) * (box[2] - box[0]);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    const words = lines.map((line) => `${line.name}  ${line.y[near(line.x, first)] ?? "nan"}`);
    note.textContent = [`step ${first}`, ...words].join("\n");
    const frame = figure.getBoundingClientRect(), wide = note.offsetWidth;
    const x = event.clientX - frame.left;
    note.style.left = `${x + wide + 20 > frame.width ? Math.max(0, x - wide - 12) : x + 12}px`;
    note.style.top = `${event.clientY - frame.top + 14}px`;
  });
  svg.addEventListener("pointerleave", leave);
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
