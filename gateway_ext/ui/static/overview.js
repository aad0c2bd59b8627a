// The figures at the top: a number for now, and a chart of the last minutes under it.

import { Chart } from "./chart.js";
import { byId, h, setText } from "./dom.js";
import { count, few, rate, seconds, share } from "./format.js";
import { waiting } from "./queue.js";

const PERCENTILES = [
  { kind: "p50", label: "p50" },
  { kind: "p95", label: "p95" },
  { kind: "p99", label: "p99" },
];

const tiles = [];

/** Make the tiles. */
export function startOverview() {
  tile("Throughput", {
    chart: { lines: [{ kind: "throughput", label: "" }], format: rate },
    big: ({ totals }) => rate(totals.rate),
    small: ({ totals }) => `${count(totals.requests)} requests, ${count(totals.failed)} failed`,
  });
  tile("Hit ratio", {
    chart: { lines: [{ kind: "hit_ratio", label: "" }], format: share, most: 1 },
    big: ({ totals }) => share(totals.hit_ratio),
    small: ({ totals }) =>
      `${count(totals.misses)} misses, ${count(totals.false_misses)} false, ${count(totals.evictions)} evictions`,
  });
  tile("Latency", {
    chart: { lines: PERCENTILES, format: seconds, least: 0.01 },
    big: ({ totals }) => seconds(totals.p50_s),
    small: ({ totals }) =>
      h(
        "span",
        { class: "percentiles" },
        ...PERCENTILES.map(({ kind, label }, place) =>
          h("span", {
            class: `key key-${place}`,
            text: place === 0 ? label : `${label} ${seconds(totals[`${kind}_s`])}`,
          }),
        ),
      ),
  });
  tile("Waiting", {
    chart: { lines: [{ kind: "queue", label: "" }], format: few, least: 4 },
    big: ({ queue }) => count(queue.length + queue.local),
    small: ({ queue }) => waiting(queue),
  });
}

/** Show the current figures. */
export function drawFigures(state) {
  for (const { big, small, of } of tiles) {
    setText(big, of.big(state));
    const text = of.small(state);
    if (text instanceof Node) small.replaceChildren(text);
    else setText(small, text);
  }
}

/** Draw the charts. */
export function drawHistory(state) {
  for (const { chart } of tiles) chart.draw(state.history);
}

function tile(title, of) {
  const chart = new Chart({ title, ...of.chart });
  const big = h("p", { class: "big" });
  const small = h("p", { class: "small-print" });
  const node = h(
    "div",
    { class: "tile card" },
    h("div", { class: "tile-head" }, h("h2", { text: title }), big),
    small,
    chart.node,
  );
  byId("overview").append(node);
  tiles.push({ chart, big, small, of });
}
