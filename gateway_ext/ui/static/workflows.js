// Workflows: each as a graph of its stages, with every stage's share of the time.

import { attribute, byId, h, keyed, setText } from "./dom.js";
import { count, seconds, several } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const BOX = { width: 168, height: 58 };
const GAP = { across: 44, down: 14 };
const MOST_LETTERS = 22;

const list = h("ul", { class: "workflows" });

/** Initialise the list. */
export function startWorkflows() {
  byId("workflows-list").append(list);
}

/** Show these workflows; without any, the section is hidden. */
export function drawWorkflows(workflows) {
  byId("workflows").hidden = workflows.length === 0;
  setText(byId("workflows-summary"), workflows.length ? several(workflows.length, "workflow") : "");
  keyed(list, workflows, { key: (one) => one.id, make, update });
}

function make(one) {
  const said = h("span", { class: "hint" });
  const why = h("p", { class: "workflow-why" });
  const graph = h("div", { class: "workflow-graph", tabindex: "0", role: "group" });
  attribute(graph, "aria-label", `Stages of ${one.name}`);
  const head = h("p", { class: "workflow-head" }, h("strong", { text: one.name }), said);
  return { node: h("li", { class: "workflow" }, head, graph, why), said, why, graph, one: null };
}

function update(view, one) {
  if (view.one === one) return;
  view.one = one;
  setText(view.said, summary(one));
  setText(view.why, one.why);
  view.why.hidden = !one.why;
  view.graph.replaceChildren(drawing(one));
}

function summary(one) {
  const slo = one.slo_s === null ? "" : `, SLO ${seconds(one.slo_s)}, ${count(one.missed)} missed`;
  const running = one.running ? `, ${count(one.running)} under way` : "";
  const runs = one.runs ? `${several(one.runs, "run")}, median ${seconds(one.median_s)}` : "no runs";
  return `${runs}${running}${slo}`;
}

// -- the graph ------------------------------------------------------------------------------------

function drawing(one) {
  const places = placed(one.stages);
  const columns = Math.max(...one.stages.map((stage) => stage.level)) + 1;
  const rows = Math.max(...[...places.values()].map((place) => place.row)) + 1;
  const width = columns * (BOX.width + GAP.across) - GAP.across;
  const height = rows * (BOX.height + GAP.down) - GAP.down;
  const lines = one.stages.flatMap((stage) =>
    stage.after.map((before) => line(places.get(before), places.get(stage.name))),
  );
  const boxes = one.stages.map((stage) => box(stage, places.get(stage.name)));
  const shape = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" };
  const made = svg("svg", { ...shape, "aria-label": words(one) }, ...lines, ...boxes);
  return made;
}

/** The places of the stages: a column for each level, in it one below the other. */
function placed(stages) {
  const used = new Map();
  const places = new Map();
  for (const { name, level } of stages) {
    const row = used.get(level) ?? 0;
    used.set(level, row + 1);
    const [x, y] = [level * (BOX.width + GAP.across), row * (BOX.height + GAP.down)];
    places.set(name, { x, y, row });
  }
  return places;
}

function line(from, to) {
  const [x1, y1] = [from.x + BOX.width, from.y + BOX.height / 2];
  const [x2, y2] = [to.x, to.y + BOX.height / 2];
  const middle = (x1 + x2) / 2;
  const d = `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return svg("path", { class: "workflow-line", d });
}

function box(stage, { x, y }) {
  const part = (stage.share ?? 0) * (BOX.width - 20);
  const figures = stage.share === null ? "" : `${percent(stage.share)}, ${seconds(stage.mean_s)}`;
  const track = { x: 10, y: BOX.height - 12, height: 5, rx: 2 };
  return svg(
    "g",
    { transform: `translate(${x} ${y})` },
    text("title", {}, `${stage.name}: ${stage.function}`),
    svg("rect", { class: "workflow-box", width: BOX.width, height: BOX.height, rx: 6 }),
    text("text", { class: "workflow-name", x: 10, y: 18 }, short(stage.name)),
    text("text", { class: "workflow-figures", x: 10, y: 36 }, figures || short(stage.function)),
    svg("rect", { class: "workflow-track", width: BOX.width - 20, ...track }),
    svg("rect", { class: "workflow-share", width: part, ...track }),
  );
}

const words = (one) =>
  one.stages
    .map(({ name, after, share }) => {
      const waits = after.length ? ` after ${after.join(" and ")}` : "";
      return `${name}${waits}${share === null ? "" : `, ${percent(share)} of the time`}`;
    })
    .join("; ");

const percent = (share) => `${Math.round(100 * share)} %`;
const short = (name) =>
  name.length > MOST_LETTERS ? `${name.slice(0, MOST_LETTERS - 1)}…` : name;

function text(tag, properties, content) {
  const node = svg(tag, properties);
  node.textContent = content;
  return node;
}

function svg(tag, properties, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) attribute(node, name, value);
  node.append(...children);
  return node;
}
