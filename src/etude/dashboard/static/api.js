// Requests, and the one stream of new points, events and states.

import { data, emit, on, view } from "./state.js";

/** Return the answer of the server to a request; throws an error with its words. */
export async function get(path, query = {}, { signal, method = "GET", body } = {}) {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one != null && one !== "") search.append(key, one);
  }
  const text = search.toString();
  const options = { signal, method, headers: body ? { "Content-Type": "application/json" } : {}, body: body && JSON.stringify(body) };
  const answer = await fetch(`api/${path}${text ? `?${text}` : ""}`, options);
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || `${answer.status} ${answer.statusText}`);
  return found;
}
export const post = (path, body, method = "POST") => get(path, {}, { method, body });

/** Bytes of each run's metrics that the page has; the stream goes on from there. */
const cursors = new Map();
/** Where the stream of now began for each run. */
const begun = new Map();
const streams = new Set();
let source = null;
let listened = "";
let wait = 500;
let timer = 0;
let opening = 0;
let isBehind = false;

/** Listen for the runs that are shown, if not already. */
export function listen() {
  clearTimeout(opening);
  opening = setTimeout(open, 60);
}

const HIDDEN_MS = 300_000;
let hidden = 0;
let isResting = false;
// A browser has six connections to a server: pages that nobody looks at give theirs back.
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) {
    hidden = setTimeout(() => {
      isResting = true;
      closeAll();
      source = null;
    }, HIDDEN_MS);
  } else if (isResting) {
    isResting = false;
    open(true);
    emit("reconnected");
  }
});

/** A curve has all points up to `cursor`: the stream begins there, again if it began later or at an unknown place. */
export function known(run, cursor) {
  if (cursor >= (begun.get(run) ?? Infinity)) return;
  cursors.set(run, Math.min(cursor, cursors.get(run) ?? cursor));
  isBehind = true;
  listen();
}

on("sse-restart", ({ run }) => [cursors, begun].forEach((one) => one.delete(run)));

function open(again = false) {
  const runs = (view.runs ?? []).filter((id) => data.runs.has(id));
  const wanted = runs.join("\n");
  if (isResting || (source && wanted === listened && !again && !isBehind)) return;
  isBehind = false;
  clearTimeout(timer);
  listened = wanted;
  const query = new URLSearchParams();
  runs.forEach((id) => query.append("run", id));
  runs.forEach((id) => query.append("after", cursors.get(id) ?? ""));
  begun.clear();
  for (const id of runs) if (cursors.has(id)) begun.set(id, cursors.get(id));
  source = new EventSource(`api/stream?${query}`);
  streams.add(source);
  follow(source);
}

function closeAll(but = null) {
  for (const one of streams) {
    if (one === but) continue;
    one.close();
    streams.delete(one);
  }
}

/** Take what a stream says. The one before ends when the newest has begun, so that nothing is missed between them. */
function follow(next) {
  next.onopen = () => {
    if (source !== next) return;
    closeAll(next);
    emit("opened");
    if (wait > 500) emit("reconnected");
    wait = 500;
    emit("connection", true);
  };
  next.onerror = () => {
    // Reconnecting by itself the browser would ask for old points again.
    next.close();
    streams.delete(next);
    if (source !== next) return;
    closeAll();
    source = null;
    emit("connection", false);
    timer = setTimeout(() => open(true), wait);
    wait = Math.min(wait * 2, 8000);
  };
  for (const kind of ["runs", "points", "restart", "event", "media", "alert", "removed", "exact", "sweeps"]) {
    next.addEventListener(kind, (message) => {
      const found = JSON.parse(message.data);
      if (kind === "points" && source === next) cursors.set(found.run, found.cursor);
      emit(`sse-${kind}`, found);
    });
  }
}
