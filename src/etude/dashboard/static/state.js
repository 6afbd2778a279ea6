// What the page shows. All of it is in the address, so that a link opens the same view.

const START = {
  tab: "curves", runs: null, focus: "", x: "step", smooth: 0, logx: false, logy: [], zoom: null, events: true, outliers: true,
  q: "", sort: "-started", group: "", aggregate: true, archived: false, closed: [], big: "", filter: "", side: true,
  media: "", mediaStep: null, task: "", sweep: "",
};

/** The view; change it with `set`. */
export const view = { ...START };
/** What the server said: runs by id, in its order. */
export const data = { root: "", runs: new Map(), loaded: false, alerts: [], fired: 0, sweeps: [] };

const listeners = new Map();
/** Call `then` whenever `topic` happens. */
export function on(topic, then) {
  for (const one of topic.split(" ")) listeners.set(one, [...(listeners.get(one) ?? []), then]);
}
/** Tell everybody who listens to `topic`. */
export function emit(topic, ...facts) {
  for (const then of listeners.get(topic) ?? []) then(...facts);
}

/** Change the view, its address, and tell which keys changed. */
export function set(changes, { push = false } = {}) {
  const changed = Object.keys(changes).filter((key) => JSON.stringify(view[key]) !== JSON.stringify(changes[key]));
  if (!changed.length) return;
  Object.assign(view, changes);
  remember(push || changed.includes("tab"));
  emit("view", new Set(changed));
}

let later = 0;
let waiting = "";
function write() {
  clearTimeout(later);
  if (waiting) history.replaceState(null, "", waiting);
  waiting = "";
}
/** Write the address: as a new entry of the history, or into the one of now, not too often. */
function remember(push) {
  if (push) {
    write();
    history.pushState(null, "", address());
  } else {
    clearTimeout(later);
    waiting = address();
    later = setTimeout(write, 150);
  }
}

/** Return the address of the view: what differs from the start. */
export function address() {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(view)) {
    if (JSON.stringify(value) === JSON.stringify(START[key])) continue;
    if (key === "runs") (value.length ? value : [""]).forEach((one) => query.append("run", one));
    else if (Array.isArray(value) && key !== "zoom") value.forEach((one) => query.append(key, one));
    else query.set(key, typeof value === "boolean" ? Number(value) : key === "zoom" ? value.join("~") : value);
  }
  return `#${query}`;
}

function parsed() {
  const query = new URLSearchParams(location.hash.slice(1));
  const found = { ...START };
  for (const [key, first] of Object.entries(START)) {
    if (key === "runs") found.runs = query.has("run") ? query.getAll("run").filter(Boolean) : null;
    else if (!query.has(key)) continue;
    else if (key === "zoom") {
      const ends = query.get(key).split("~").map(Number);
      found.zoom = ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
    } else if (Array.isArray(first)) found[key] = query.getAll(key);
    else if (typeof first === "boolean") found[key] = query.get(key) !== "0";
    else if (typeof first === "number") found[key] = Number(query.get(key)) || 0;
    else if (key === "mediaStep") found[key] = Number(query.get(key));
    else found[key] = query.get(key);
  }
  found.smooth = Math.min(Math.max(found.smooth, 0), 0.999);
  return found;
}

/** Take the view from the address, now and whenever somebody goes back. */
export function fromAddress() {
  Object.assign(view, parsed());
  addEventListener("popstate", () => {
    const found = parsed();
    found.runs ??= view.runs;
    const changed = Object.keys(found).filter((key) => JSON.stringify(view[key]) !== JSON.stringify(found[key]));
    Object.assign(view, found);
    if (changed.length) emit("view", new Set(changed));
  });
}

/** Runs that are shown, as the server knows them now. */
export const chosen = () => (view.runs ?? []).map((id) => data.runs.get(id)).filter(Boolean);
/** The run that strips and panels of one run are about. */
export function focused() {
  return data.runs.get(view.focus) ?? chosen().find((one) => one.state === "running") ?? chosen()[0] ?? null;
}
/** Show or hide a run. */
export function toggle(ids, shown) {
  const now = new Set(view.runs ?? []);
  for (const id of ids) (shown ?? !now.has(id)) ? now.add(id) : now.delete(id);
  set({ runs: [...now] });
}
/** Open the page of one run. */
export const openRun = (id) => set({ focus: id, tab: "run" }, { push: true });
