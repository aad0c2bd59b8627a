// Alerts for the operator, and whether the shown state is up to date.

import { byId, h, keyed, setText } from "./dom.js";

const LIVE = { connecting: "connecting", live: "live", lost: "not live", paused: "paused" };

const MOST = 3;
const list = h("div", { class: "alerts-list" });
const more = h("button", { type: "button", class: "button quiet", onclick: showAll });
let all = false;
let shown = [];

/** The alerts, the worst first; all of them when asked for. */
export function drawAlerts(alerts) {
  shown = alerts;
  const section = byId("alerts");
  section.hidden = alerts.length === 0;
  if (!section.firstElementChild) section.append(list, more);
  const rest = alerts.length - MOST;
  more.hidden = rest <= 0 || all;
  setText(more, `and ${rest} more`);
  keyed(list, all ? alerts : alerts.slice(0, MOST), {
    key: (one) => `${one.code} ${one.about}`,
    make,
    update,
  });
}

function showAll() {
  all = true;
  drawAlerts(shown);
  byId("alerts").focus();
}

function make() {
  const text = h("strong");
  const remedy = h("span");
  const level = h("span", { class: "level" });
  return { node: h("p", { class: "alert" }, level, text, " ", remedy), level, text, remedy };
}

function update(view, alert) {
  view.node.classList.toggle("critical", alert.level === "critical");
  setText(view.level, alert.level);
  setText(view.text, sentence(alert.text));
  setText(view.remedy, sentence(alert.what_to_do ?? ""));
}

/** With a capital, unless it begins with a name such as node-1/cuda:0, and with a full stop. */
function sentence(text) {
  const begun = /^[a-z]+( |$)/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return begun && !/[.!?]$/.test(begun) ? `${begun}.` : begun;
}

/** Show whether the page receives changes; old state is marked. */
export function drawLive(live, why) {
  byId("live").dataset.live = live;
  setText(byId("live-text"), LIVE[live]);
  drawStale(live, why);
}

/** The leader's troubles: the scheduler's figures are old though the gateway answers. */
export function drawScheduler(scheduler) {
  const main = byId("main");
  main.dataset.scheduler = scheduler.ok ? "ok" : "lost";
  const note = byId("stale");
  if (!scheduler.ok) {
    note.hidden = false;
    setText(note, `The state of the GPUs is old. ${sentence(scheduler.why || "no scheduler leads")}`);
  } else if (byId("live").dataset.live === "live") {
    note.hidden = true;
  }
  const leads = scheduler.leader
    ? `led by ${scheduler.leader}, term ${scheduler.term}`
    : "no leader";
  setText(byId("foot"), `Scheduler ${scheduler.url ?? ""}, ${leads}; datastore ${scheduler.etcd}`);
}

function drawStale(live, why) {
  byId("main").dataset.live = live;
  const note = byId("stale");
  if (live === "live") {
    note.hidden = byId("main").dataset.scheduler !== "lost";
  } else if (live === "paused") {
    note.hidden = false;
    setText(note, "Paused: nothing moves until you resume.");
  } else {
    note.hidden = !why;
    setText(note, why ?? "");
  }
}
