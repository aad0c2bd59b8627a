// Requests that wait for a GPU: the number by function, and the first ones in order.

import { byId, h, keyed, setText, style } from "./dom.js";
import { count, seconds, several, times } from "./format.js";

const MOST_BARS = 8;
const MOST_HEAD = 10;

const bars = h("ul", { class: "shares", "aria-label": "Waiting by function" });
const rest = h("p", { class: "hint" });
const head = h("tbody");
const table = h(
  "table",
  { class: "small queue-head" },
  h("caption", { text: "The first in the queue" }),
  h(
    "thead",
    null,
    h(
      "tr",
      null,
      ...["Function", "Waited", "Passed over"].map((text) => h("th", { scope: "col", text })),
    ),
  ),
  head,
);

/** Put the parts in their place. */
export function startQueue() {
  byId("queue-body").append(bars, rest, table);
}

/** Show the waiting requests. */
export function drawQueue(queue) {
  const isEmpty = queue.length + queue.local === 0;
  byId("queue-empty").hidden = !isEmpty;
  byId("queue-body").hidden = isEmpty;
  setText(byId("queue-summary"), isEmpty ? "" : waiting(queue));
  drawBars(queue);
  table.hidden = queue.head.length === 0;
  keyed(head, queue.head.slice(0, MOST_HEAD), {
    key: (one) => one.request,
    make: makeRow,
    update: updateRow,
  });
}

/** The number of waiting requests by function. */
export function waiting({ length, local }) {
  return `${count(length)} for any GPU${local ? `, ${count(local)} for a certain one` : ""}`;
}

function drawBars({ length, by_function: by }) {
  const most = by.slice(0, MOST_BARS);
  const longest = Math.max(1, ...most.map((one) => one.length));
  keyed(bars, most, {
    key: (one) => one.function,
    make: makeBar,
    update: (view, one) => {
      setText(view.number, count(one.length));
      style(view.fill, "width", `${(100 * one.length) / longest}%`);
    },
  });
  const others = length - most.reduce((sum, one) => sum + one.length, 0);
  setText(
    rest,
    by.length > most.length
      ? `and ${count(others)} more, of ${several(by.length - most.length, "other function")}`
      : "",
  );
}

function makeBar(one) {
  const number = h("span", { class: "number" });
  const fill = h("span", { class: "share-fill" });
  const node = h(
    "li",
    { class: "share" },
    h("span", { class: "share-name", text: one.function }),
    h("span", { class: "share-track" }, fill),
    number,
  );
  return { node, number, fill };
}

function makeRow(one) {
  const waited = h("td", { class: "number" });
  const visits = h("td", { class: "number" });
  const name = h("td", { class: "clip", text: one.function, title: `request ${one.request}` });
  return { node: h("tr", null, name, waited, visits), waited, visits };
}

function updateRow(view, one) {
  setText(view.waited, seconds(one.waited_s));
  setText(view.visits, times(one.visits));
}
