// Every function with its replicas and what it costs: only the rows in sight exist.

import { ask, askLines, Refused } from "./api.js";
import { open } from "./dialog.js";
import { attribute, byId, facts, h, inUse, keyed, onceAFrame, setText, style, viewsOf } from "./dom.js";
import { bytes, count, gibSeconds, gpuSeconds, rate, seconds, several, shortCount } from "./format.js";
import { knownModels } from "./models.js";

const SPARE_ROWS = 6;
const LOG_LINES = 20;
const natural = new Intl.Collator("en", { numeric: true }).compare;
const COLUMNS = [
  { key: "name", title: "Function", text: true, show: (one) => one.name },
  { key: "replicas", title: "Replicas", show: (one) => replicas(one) },
  { key: "in_flight", title: "Running", show: (one) => count(one.in_flight), wide: true },
  { key: "rate", title: "Calls/s", show: (one) => rate(one.rate), wide: true },
  { key: "p95_s", title: "p95", show: (one) => seconds(one.p95_s), wide: true },
  { key: "calls", title: "Calls", show: (one) => shortCount(one.calls), wide: true },
  { key: "errors", title: "Errors", show: (one) => shortCount(one.errors), wide: true },
  { key: "gpu_seconds", title: "GPU time", show: (one) => gpuSeconds(one.gpu_seconds), bar: true },
];

const table = h("div", {
  class: "window",
  role: "table",
  "aria-label": "Functions. Up and down arrow keys move, Enter opens.",
});
const head = h("div", { class: "row head", role: "row" });
const body = h("div", { class: "window-body", role: "rowgroup" });
const find = byId("functions-find");
const headers = new Map();
let feed = null;
let all = [];
let rows = [];
let sorted = { key: "gpu_seconds", down: true };
let active = null;
let most = 0;
let seen = { rowPx: 36, topPx: 0, heightPx: 0 };

/** Initialise the table. */
export function startFunctions(source) {
  feed = source;
  for (const column of COLUMNS) head.append(header(column));
  table.append(h("div", { role: "rowgroup", class: "head-group" }, head), body);
  byId("functions-table").append(table);
  const redraw = onceAFrame(() => {
    measure();
    drawRows();
  });
  table.addEventListener("scroll", redraw, { passive: true });
  new ResizeObserver(redraw).observe(table);
  body.addEventListener("click", (event) => openRow(event.target.closest(".row")));
  body.addEventListener("keydown", moved);
  body.addEventListener("focusin", (event) => (active = event.target.dataset.id ?? active));
  find.addEventListener(
    "input",
    onceAFrame(() => arrange()),
  );
}

/** Show these functions; while the table is in use, their order stays. */
export function drawFunctions(functions) {
  all = [...functions.values()];
  byId("functions-empty").hidden = all.length > 0;
  byId("functions-table").hidden = all.length === 0;
  find.hidden = all.length === 0;
  if (inUse(table)) {
    rows = rows.map((one) => functions.get(one.id)).filter(Boolean);
    const known = new Set(rows);
    rows.push(...found().filter((one) => !known.has(one)));
    drawRows();
  } else arrange();
}

function arrange() {
  rows = found().sort(compare);
  drawRows();
}

function found() {
  const wanted = find.value.trim().toLowerCase();
  return wanted ? all.filter((one) => one.id.toLowerCase().includes(wanted)) : [...all];
}

function compare(a, b) {
  const [left, right] = [a[sorted.key], b[sorted.key]];
  const way = sorted.down ? -1 : 1;
  const order = sorted.key === "name" ? natural(left, right) : (left ?? -1) - (right ?? -1);
  return order * way || natural(a.id, b.id);
}

function header(column) {
  const button = h("button", { type: "button", text: column.title, onclick: () => sortBy(column) });
  const cell = h(
    "div",
    { role: "columnheader", class: `cell of-${column.key}${column.wide ? " wide" : ""}` },
    button,
  );
  headers.set(column.key, cell);
  attribute(cell, "aria-sort", column.key === sorted.key ? "descending" : "none");
  return cell;
}

function sortBy(column) {
  const down = sorted.key === column.key ? !sorted.down : !column.text;
  sorted = { key: column.key, down };
  for (const [key, cell] of headers) {
    attribute(cell, "aria-sort", key !== sorted.key ? "none" : down ? "descending" : "ascending");
  }
  table.scrollTop = 0;
  measure();
  arrange();
}

// -- rows -----------------------------------------------------------------------------------------

/** Read only when it can have changed: reading it forces a layout. */
function measure() {
  const rowPx = Number.parseFloat(getComputedStyle(table).getPropertyValue("--row")) || 36;
  seen = { rowPx, topPx: table.scrollTop, heightPx: table.clientHeight };
}

function drawRows() {
  const { rowPx: height, topPx, heightPx } = seen;
  const first = Math.max(0, Math.floor(topPx / height) - SPARE_ROWS);
  const end = Math.ceil((topPx + heightPx) / height) + SPARE_ROWS;
  const shown = rows.slice(first, end).map((one, at) => ({ one, place: first + at }));
  most = all.reduce((top, one) => Math.max(top, one.gpu_seconds ?? 0), 0);
  style(body, "height", `${rows.length * height}px`);
  style(byId("functions-table"), "--rows", String(rows.length));
  attribute(table, "aria-rowcount", rows.length + 1);
  keyed(body, shown, {
    key: ({ one }) => one.id,
    make,
    update: (view, item) => update(view, item, height),
  });
  setText(byId("functions-summary"), summary());
  keepOneTabStop();
}

function summary() {
  if (all.length === 0) return "";
  if (rows.length < all.length)
    return `${count(rows.length)} of ${several(all.length, "function")}`;
  const spent = all.reduce((sum, one) => sum + (one.gpu_seconds ?? 0), 0);
  return `${several(all.length, "function")}, ${gpuSeconds(spent)} of GPU time`;
}

function make({ one }) {
  const cells = COLUMNS.map((column) =>
    h("div", { role: "cell", class: `cell of-${column.key}${column.wide ? " wide" : ""}` }),
  );
  const fill = h("span", { class: "cost" });
  const node = h("div", { class: "row", role: "row", tabindex: "-1" }, ...cells);
  node.dataset.id = one.id;
  const texts = cells.map((cell, at) => {
    const text = h("span");
    if (COLUMNS[at].bar) cell.append(fill);
    cell.append(text);
    return text;
  });
  return { node, texts, fill, one: null, place: -1, top: 0 };
}

function update(view, { one, place }, height) {
  if (view.place !== place || view.height !== height) {
    view.place = place;
    view.height = height;
    style(view.node, "transform", `translateY(${place * height}px)`);
    attribute(view.node, "aria-rowindex", place + 2);
  }
  style(view.fill, "--part", String(most ? (one.gpu_seconds ?? 0) / most : 0));
  if (view.one === one) return;
  view.one = one;
  COLUMNS.forEach((column, at) => setText(view.texts[at], column.show(one)));
  view.node.classList.toggle("plain", !one.gpu);
  view.node.classList.toggle("failing", one.errors > 0);
  view.node.classList.toggle("short", one.replicas < one.wanted);
}

const replicas = (one) =>
  one.replicas === one.wanted
    ? count(one.replicas)
    : `${count(one.replicas)} of ${count(one.wanted)}`;

// -- mouse and keys -------------------------------------------------------------------------------

function moved(event) {
  const row = event.target.closest(".row");
  const page = Math.max(1, Math.floor(seen.heightPx / seen.rowPx) - 2);
  const steps = {
    ArrowDown: 1,
    ArrowUp: -1,
    PageDown: page,
    PageUp: -page,
    Home: -rows.length,
    End: rows.length,
  };
  if (event.key in steps) go(rows.findIndex((one) => one.id === row.dataset.id) + steps[event.key]);
  else if (event.key === "Enter" || event.key === " ") openRow(row);
  else return;
  event.preventDefault();
}

function go(to) {
  const place = Math.min(rows.length - 1, Math.max(0, to));
  const height = seen.rowPx;
  const [top, headPx] = [place * height, head.offsetHeight];
  if (top < table.scrollTop) table.scrollTop = top;
  else if (top + height > table.scrollTop + table.clientHeight - headPx)
    table.scrollTop = top + height - table.clientHeight + headPx;
  active = rows[place].id;
  measure();
  drawRows();
  viewsOf(body).get(active)?.node.focus({ preventScroll: true });
}

/** One stop for the tab key: the row where one was last, else the first in sight. */
function keepOneTabStop() {
  const views = viewsOf(body);
  const stop = views.get(active) ?? views.values().next().value;
  for (const view of views.values()) if (view !== stop) view.node.tabIndex = -1;
  if (stop) stop.node.tabIndex = 0;
}

function openRow(row) {
  const one = row && feed.state.functions.get(row.dataset.id);
  if (!one) return;
  const content = h("div");
  let instances = {};
  const refresh = (state) => {
    const now = state.functions.get(one.id);
    content.replaceChildren(
      now ? about(now, state, instances) : h("p", { text: "It was removed." }),
    );
  };
  refresh(feed.state);
  open({ title: one.name, content, className: "narrow", refresh });
  for (const asked of [instancesOf(one), logOf(one)])
    asked.then((found) => {
      instances = { ...instances, ...found };
      refresh(feed.state);
    });
}

/** What is known of a function's instances, which costs too much to be part of every row. */
async function instancesOf(one) {
  const [name, namespace] = [one.name, one.namespace].map(encodeURIComponent);
  try {
    const status = await ask(`../system/function/${name}?namespace=${namespace}&usage=1`);
    const memory = status.usage?.totalMemoryBytes;
    return {
      memory: memory ? bytes(memory) : null,
      template: status.template,
      trouble: (status.annotations ?? {})["com.gpufaas.trouble"],
    };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { trouble: error.message };
  }
}

/** The end of a function's log. */
async function logOf(one) {
  const [name, namespace] = [one.name, one.namespace].map(encodeURIComponent);
  const path = `../system/logs?name=${name}&namespace=${namespace}&tail=${LOG_LINES}`;
  try {
    const lines = await askLines(path);
    return { log: lines.map((line) => line.text).join("\n") };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { log: error.message };
  }
}

function about(one, state, instances) {
  const known = knownModels(state);
  const models = (one.models ?? []).map((model) => {
    const { on, bytes: size } = known.get(model) ?? { on: [], bytes: null };
    const where = on.length
      ? `${bytes(size)} on ${on.length > 4 ? several(on.length, "GPU") : on.join(", ")}`
      : "on no GPU";
    return h("li", null, h("code", { text: model }), `, ${where}`);
  });
  const local = (one.local ?? []).map((line) => h("li", { text: line }));
  return facts([
    ["Namespace", one.namespace],
    ["Image", h("code", { text: one.image || "–" })],
    ["Uses a GPU", one.gpu ? "yes" : "no"],
    ["Replicas", `${count(one.replicas)} ready, ${count(one.wanted)} wanted`],
    ["Memory of its instances", instances.memory],
    ["Template", instances.template],
    ["Trouble", instances.trouble],
    [
      "Calls running",
      one.waiting
        ? `${count(one.in_flight)}, ${count(one.waiting)} wait for an instance`
        : count(one.in_flight),
    ],
    ["Calls", `${count(one.calls)}, ${rate(one.rate)} lately`],
    ["Errors", count(one.errors)],
    ["p95 of its calls", seconds(one.p95_s)],
    ["GPU time", gpuSeconds(one.gpu_seconds)],
    [
      "GPU time a call",
      one.calls && one.gpu_seconds !== null ? seconds(one.gpu_seconds / one.calls) : null,
    ],
    ["GPU memory", gibSeconds(one.gpu_gib_seconds)],
    ["Cost", one.cost ?? null],
    ["Models", models.length ? h("ul", { class: "plain" }, ...models) : null],
    ["Without a GPU", local.length ? h("ul", { class: "plain" }, ...local) : null],
    ["Its log", h("code", { class: "command", text: one.log_command })],
    ["Last lines", instances.log ? h("pre", { class: "log", text: instances.log }) : null],
  ]);
}
