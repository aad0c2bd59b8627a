// The latest decisions; each opens its explanation.

import { byId, h, inUse, keyed, setText } from "./dom.js";
import { openExplanation } from "./explanation.js";
import { ago, count, seconds } from "./format.js";

const HEAD = ["When", "Function", "GPU", "Cache", "Waited", "Load", "Run", "Outcome"];
const WIDE = new Set(["Load", "Run"]);

const list = h("ol", { class: "decisions" });
let feed = null;
let held = null;

/** Initialise the section. */
export function startDecisions(source) {
  feed = source;
  const head = HEAD.map((text) => h("span", { class: WIDE.has(text) ? "wide" : "", text }));
  const box = h(
    "div",
    { class: "decisions-box" },
    h("div", { class: "decision head", "aria-hidden": "true" }, ...head),
    list,
  );
  byId("decisions-list").append(box);
  list.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) openExplanation(button.dataset.request);
  });
  list.addEventListener("keydown", moved);
  for (const over of ["pointerleave", "focusout"])
    list.addEventListener(over, () => setTimeout(release));
  setText(byId("decisions-hint"), `curl ${location.origin}/function/NAME`);
}

/** Show the newest first. While the list is in use its rows stay in place, and are updated. */
export function drawDecisions(decisions, now) {
  const newest = [...decisions.values()];
  byId("decisions-empty").hidden = newest.length > 0;
  byId("decisions-list").hidden = newest.length === 0;
  if (!inUse(list)) held = null;
  else held ??= [...list.querySelectorAll("button")].map((button) => button.dataset.request);
  const known = held?.filter((request) => decisions.has(request));
  const shown = known?.length ? known.map((request) => decisions.get(request)) : newest;
  keyed(list, shown, {
    key: (one) => one.request,
    make,
    update: (view, one) => update(view, one, now),
  });
  setText(byId("decisions-summary"), summary(newest, shown));
  keepOneTabStop();
}

function summary(newest, shown) {
  if (newest.length === 0) return "";
  const newer = shown === newest ? 0 : newest.findIndex((one) => one.request === shown[0].request);
  return newer > 0
    ? `held while you read, ${count(newer)} newer`
    : `the latest ${count(newest.length)}`;
}

function release() {
  if (held && !inUse(list)) drawDecisions(feed.state.decisions, feed.state.now);
}

function make(one) {
  const cells = HEAD.map((name) =>
    h("span", { class: `of-${name.toLowerCase()}${WIDE.has(name) ? " wide" : ""}` }),
  );
  const badge = h("span", { class: "badge" });
  cells[3].append(badge);
  const node = h(
    "li",
    null,
    h(
      "button",
      { type: "button", class: "decision", tabindex: "-1", "aria-haspopup": "dialog" },
      ...cells,
    ),
  );
  node.firstElementChild.dataset.request = one.request;
  return { node, cells, badge, one: null };
}

function update(view, one, now) {
  setText(view.cells[0], ago(one.at, now));
  if (view.one === one) return;
  view.one = one;
  const [, called, gpu, , waited, load, run, outcome] = view.cells;
  setText(called, one.function);
  setText(gpu, one.gpu ?? "in a queue");
  const cache = one.hit === null ? "" : one.hit ? "hit" : one.false_miss ? "false miss" : "miss";
  setText(view.badge, cache);
  view.badge.dataset.kind = cache;
  setText(waited, seconds(one.waited_s));
  setText(load, one.hit ? "–" : seconds(one.load_s));
  setText(run, one.run_s ? seconds(one.run_s) : "–"); // nothing was measured of it, so far
  setText(outcome, one.outcome ?? "running");
  outcome.dataset.kind = one.outcome ?? "running";
  const words = [
    `${one.function} on ${one.gpu ?? "no GPU yet"}`,
    cache,
    `waited ${seconds(one.waited_s)}`,
    one.outcome ?? "running",
  ];
  view.node.firstElementChild.setAttribute(
    "aria-label",
    `Why: ${words.filter(Boolean).join(", ")}`,
  );
}

function moved(event) {
  const item = event.target.closest("li");
  const to = {
    ArrowDown: item.nextElementSibling,
    ArrowUp: item.previousElementSibling,
    Home: list.firstElementChild,
    End: list.lastElementChild,
  };
  if (!(event.key in to)) return;
  event.preventDefault();
  const button = to[event.key]?.firstElementChild;
  if (!button) return;
  for (const other of list.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
}

/** One stop for the tab key. */
function keepOneTabStop() {
  const stops = [...list.querySelectorAll('[tabindex="0"]')];
  const stop = stops.find((one) => one === document.activeElement) ?? list.querySelector("button");
  for (const other of stops) if (other !== stop) other.tabIndex = -1;
  if (stop) stop.tabIndex = 0;
}
