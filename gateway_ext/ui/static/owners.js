// Namespaces and functions with shares and quotas: what each may use, and what it uses now.

import { attribute, byId, h, keyed, setText, style } from "./dom.js";
import { bytes, count, few, gpuSeconds, seconds, several } from "./format.js";

const HEAD = [
  "Owner",
  "Weight",
  "Priority",
  "GPU time",
  "Memory",
  "Leases",
  "Waiting",
  "Held back",
  "Refused",
];
// The columns of quotas: the name of the limit and of the use, and how both are shown.
const QUOTAS = [
  { name: "gpu_s", show: gpuSeconds },
  { name: "resident_bytes", show: bytes },
  { name: "leases", show: count },
  { name: "waiting", show: count },
];

const body = h("tbody");
const table = h(
  "table",
  { class: "small owners" },
  h("thead", null, h("tr", null, ...HEAD.map((text) => h("th", { scope: "col", text })))),
  body,
);

/** Put the table in its place; on a narrow screen it is scrolled by itself. */
export function startOwners() {
  const box = { class: "wide", tabindex: "0", role: "group", "aria-label": "Shares and quotas" };
  byId("owners-table").append(h("div", box, table));
}

/** Show these owners; without any, the section is hidden. */
export function drawOwners({ count: all, rows }) {
  byId("owners").hidden = all === 0;
  setText(byId("owners-summary"), summary(all, rows));
  keyed(body, rows, { key: (one) => one.owner, make, update });
}

function summary(all, rows) {
  if (all > rows.length) return `the first ${count(rows.length)} of ${count(all)}`;
  return all === 0 ? "" : several(all, "owner");
}

function make(one) {
  const name = h("th", { scope: "row", class: "clip", text: one.owner });
  const [weight, priority, heldBack, refused] = [number(), number(), number(), number()];
  const quotas = QUOTAS.map(() => {
    const fill = h("span", { class: "share-fill" });
    const track = h("span", { class: "share-track" }, fill);
    const text = h("span");
    return { cell: h("td", { class: "quota" }, text, track), text, track, fill };
  });
  const cells = [weight, priority, ...quotas.map(({ cell }) => cell), heldBack, refused];
  return { node: h("tr", null, name, ...cells), name, weight, priority, quotas, heldBack, refused };
}

function update(view, one) {
  const { terms, use } = one;
  const byFunction = one.set_by === "function";
  attribute(view.name, "title", `set by ${byFunction ? "its annotations" : "an operator"}`);
  setText(view.weight, few(terms.weight));
  setText(view.priority, count(terms.priority));
  QUOTAS.forEach((quota, at) => drawQuota(view.quotas[at], quota, terms, use));
  setText(view.heldBack, count(use.held_back));
  setText(view.refused, count(Object.values(use.refused).reduce((sum, some) => sum + some, 0)));
}

function drawQuota({ text, track, fill }, { name, show }, terms, use) {
  const limit = terms[name];
  const window = name === "gpu_s" && limit !== null ? ` in ${seconds(terms.window_s)}` : "";
  setText(text, limit === null ? show(use[name]) : `${show(use[name])} of ${show(limit)}${window}`);
  track.hidden = limit === null;
  if (limit !== null) style(fill, "width", `${Math.min(100, (100 * use[name]) / limit)}%`);
}

const number = () => h("td", { class: "number" });
