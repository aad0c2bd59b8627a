// The explanation of a decision: the candidates with their estimates, and the measured times.

import { Refused, ask } from "./api.js";
import { note, open } from "./dialog.js";
import { facts, h } from "./dom.js";
import { ago, count, gibSeconds, seconds, several, times } from "./format.js";
import { shortModel } from "./models.js";

const MOST_CANDIDATES = 12;
const PARTS = [
  ["wait_s", "wait"],
  ["load_s", "load"],
  ["run_s", "run"],
];

/** Fetch an explanation and open it. */
export async function openExplanation(request) {
  let explained;
  try {
    explained = await ask(`decisions/${request.split("/").map(encodeURIComponent).join("/")}`);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    note(error.message, "problem");
    return;
  }
  const label = (model) => explained.labels?.[model] ?? shortModel(model);
  const content = h(
    "div",
    { class: "explanation" },
    about(explained, label),
    ...explained.decisions.map((one, at) => decision(one, at, explained, label)),
  );
  open({ title: title(explained), content, className: "wide" });
}

function title(explained) {
  const name = explained.function.replace(/^openfaas-fn\//, "");
  const last = explained.decisions.at(-1);
  if (!last) return `Why ${name} waits`;
  return `Why ${name} ${last.what === "queued" ? "waits for" : "went to"} ${last.slot}`;
}

function about(explained, label) {
  return facts([
    ["Request", h("code", { text: explained.request })],
    ["Models", explained.models.map(label).join(", ")],
    ["Arrived", ago(0, explained.arrived_ago_s)],
    ["First lease", explained.waited_s === null ? "none so far" : `after ${seconds(explained.waited_s)}`],
    ["Outcome", `${explained.outcome ?? "not ended"}${explained.reason ? `: ${explained.reason}` : ""}`],
    ["Used", explained.used ? used(explained.used) : null],
    ["In all", explained.total_s === null ? null : seconds(explained.total_s)],
  ]);
}

function used({ gpu_s, gpu_byte_s, cost }) {
  const priced = cost === null ? "" : `, cost ${cost.toFixed(6)}`;
  return `${seconds(gpu_s)} of a GPU, ${gibSeconds(gpu_byte_s / 2 ** 30)}${priced}`;
}

function decision(one, at, explained, label) {
  const number = explained.decisions.length > 1 ? `${at + 1}. ` : "";
  const slots = [one.slot, ...(one.more_slots ?? [])].join(", ");
  const what = one.what === "queued" ? `Queued for ${slots}` : `Placed on ${slots}`;
  return h(
    "section",
    { class: "step" },
    h("h3", { text: `${number}${what}, ${seconds(one.after_s)} after it arrived` }),
    h(
      "p",
      null,
      "Rule: ",
      h("strong", { text: one.rule }),
      one.hit === null
        ? ""
        : one.hit
          ? ". A hit: nothing had to be loaded."
          : one.held_elsewhere
            ? ". A false miss: another GPU had the models."
            : ". A miss: no GPU had all the models.",
    ),
    ...(one.configuration ? [h("p", { text: configured(one.configuration) })] : []),
    ...(one.why
      ? why(one.why, label)
      : [
          h("p", {
            class: "hint",
            text: "The candidates were not kept: the cluster is too large, or it was placed again.",
          }),
        ]),
    ...(one.came ? came(one, label) : []),
  );
}

function configured({ batch, vcpus, vgpus }) {
  return `Configured for a batch of ${batch}, on ${several(vcpus, "vCPU")} and ${several(vgpus, "slot")}.`;
}

function why(explained, label) {
  const ahead = explained.queue_length
    ? `${several(explained.queue_length, "request")} waited, ${count(explained.ahead)} of them ahead of it`
    : "No other request waited";
  const passed = explained.visits === 0 ? "never passed over" : `passed over ${times(explained.visits)}`;
  const text = `${explained.policy}: it had waited ${seconds(explained.waited_s)} and was ${passed}. ${ahead}.`;
  const victims = explained.victims.length
    ? h("p", { text: `Evicted for it: ${explained.victims.map(label).join(", ")}.` })
    : null;
  const sorted = explained.candidates
    .map(finished)
    .sort((a, b) => a.finish_s - b.finish_s || (a.slot === explained.chosen ? -1 : 1));
  return [
    h("p", { text }),
    victims,
    candidates(sorted, explained.chosen),
    weighed(sorted, explained.chosen),
  ].filter(Boolean);
}

/** What each term of the policy's sum gains at the slots that it weighed; null if it has no sum. */
function weighed(sorted, chosen) {
  const slots = sorted.filter((one) => one.terms);
  const names = [...new Set(slots.flatMap((one) => Object.keys(one.terms)))];
  if (names.length === 0) return null;
  const head = ["Weighed", ...names, "Gain"].map((text, at) =>
    h("th", { scope: "col", class: at === 0 ? "" : "number", text }),
  );
  const rows = slots.map((one) => {
    const gains = names.map((name) => one.terms[name] ?? 0);
    const all = gains.reduce((sum, gain) => sum + gain, 0);
    return h(
      "tr",
      { class: one.slot === chosen ? "chosen" : "" },
      h("th", { scope: "row", text: one.slot }),
      ...[...gains, all].map((gain) => h("td", { class: "number", text: signed(gain) })),
    );
  });
  return h(
    "table",
    { class: "small weighed" },
    h("caption", null, "Seconds gained at the slots that the policy weighed"),
    h("thead", null, h("tr", null, ...head)),
    h("tbody", null, ...rows),
  );
}

const signed = (gain) => `${gain < 0 ? "−" : "+"}${Math.abs(gain).toFixed(2)}`;

/** A load beside runs: the compute may be free while the copy engine is busy, and during the load. */
function finished(one) {
  let { wait_s } = one;
  if (one.beside && !one.cached) {
    wait_s = Math.max(one.copy_wait_s ?? 0, wait_s - one.load_s);
  }
  return { ...one, wait_s, finish_s: wait_s + one.load_s + one.run_s };
}

function candidates(sorted, chosen) {
  const longest = Math.max(0.001, ...sorted.map((one) => one.finish_s));
  const body = h("tbody");
  const draw = (most) =>
    body.replaceChildren(
      ...firsts(sorted, chosen, most).map((one) => candidate(one, chosen, longest)),
    );
  draw(MOST_CANDIDATES);
  const head = ["Candidate", "State", "Models", "Estimated finish", ""].map((text, at) =>
    h("th", { scope: "col", class: at === 4 ? "number" : "", text }),
  );
  const table = h(
    "table",
    { class: "small candidates" },
    h("caption", null, "Candidates, the soonest first ", legend()),
    h("thead", null, h("tr", null, ...head)),
    body,
  );
  if (sorted.length <= MOST_CANDIDATES) return table;
  const more = h("button", {
    type: "button",
    class: "button quiet",
    text: `Show all ${count(sorted.length)}`,
  });
  more.addEventListener("click", () => {
    draw(sorted.length);
    body.querySelector("tr").focus();
    more.remove();
  });
  return h("div", null, table, more);
}

/** The first few candidates, and the chosen one wherever it is. */
function firsts(sorted, chosen, most) {
  const shown = sorted.slice(0, most);
  const pick = sorted.find((one) => one.slot === chosen);
  return pick && !shown.includes(pick) ? [...shown, pick] : shown;
}

const legend = () =>
  h(
    "span",
    { class: "key-parts" },
    ...PARTS.map(([, name]) => h("span", { class: `key part-${name}`, text: name })),
  );

function candidate(one, chosen, longest) {
  const isChosen = one.slot === chosen;
  const bar = h("span", { class: "estimate" });
  for (const [field, name] of PARTS) {
    const part = h("span", { class: `part part-${name}`, title: `${name} ${seconds(one[field])}` });
    part.style.width = `${(100 * one[field]) / longest}%`;
    bar.append(part);
  }
  const text = PARTS.map(([field, name]) => `${name} ${seconds(one[field])}`).join(", ");
  return h(
    "tr",
    { class: isChosen ? "chosen" : "", tabindex: "-1" },
    h(
      "th",
      { scope: "row" },
      isChosen ? h("span", { class: "tick", text: "✓ " }) : null,
      one.slot,
      isChosen ? h("span", { class: "sr", text: " chosen" }) : null,
    ),
    h("td", { text: one.idle ? "idle" : "busy" }),
    h("td", { text: one.cached ? "resident" : "to load" }),
    h("td", { class: "estimate-cell" }, bar, h("span", { class: "sr", text })),
    h("td", { class: "number", text: seconds(one.finish_s) }),
  );
}

/** Estimates beside measured times. */
function came(one, label) {
  const { came: real, estimate } = one;
  const sources = Object.entries(real.loaded_from)
    .map(([model, tier]) => `${label(model)} from ${tier}`)
    .join(", ");
  const rows = [
    ["Load", estimate?.load_s, real.load_s, sources],
    [
      "Run",
      estimate?.run_s,
      real.runs ? real.run_s : null,
      real.runs ? several(real.runs, "call") : "no call so far",
    ],
  ].map(([name, expected, measured, remark]) =>
    h(
      "tr",
      null,
      h("th", { scope: "row", text: name }),
      ...[expected, measured].map((value) => h("td", { class: "number", text: seconds(value) })),
      h("td", { text: remark }),
    ),
  );
  const head = ["What came of it", "Expected", "Measured", ""].map((text) =>
    h("th", { scope: "col", text }),
  );
  const held =
    real.held_s === null
      ? "The lease is in force."
      : `The slot was free again after ${seconds(real.held_s)}.`;
  const failed = Object.entries(real.failed_loads).map(([model, reason]) =>
    h("p", { class: "problem", text: `${label(model)} could not be loaded: ${reason}` }),
  );
  return [
    h(
      "table",
      { class: "small came" },
      h("thead", null, h("tr", null, ...head)),
      h("tbody", null, ...rows),
    ),
    h("p", { class: "hint", text: `Lease ${real.lease}. ${held}` }),
    ...failed,
  ];
}
