// Every GPU as a bar, its blocks the models in its memory, drawn to scale.

import { attribute, byId, h, keyed, onceAFrame, setText, style, viewsOf } from "./dom.js";
import { bytes, several } from "./format.js";
import { colour, nameOf } from "./models.js";

const LABEL_PX = 30;
const LETTER_PX = 6.4;
const ROOMY = 16;
const MEDIUM = 60;
const STATES = { idle: "idle", busy: "busy", draining: "draining", silent: "silent" };

const list = byId("gpus-list");
const find = byId("gpus-find");
let cards = { openModel: () => {}, openGpu: () => {} };
let drawn = [];
let barPx = 300;

/** Initialise the list; `openModel(gpu id, model)` and `openGpu(gpu id)` are called when one is chosen. */
export function startGpus(opens) {
  cards = opens;
  list.addEventListener("click", chosen);
  list.addEventListener("keydown", moved);
  list.addEventListener("focusin", (event) => arrivedAt(event.target));
  list.addEventListener("focusout", () => trace(null));
  list.addEventListener("pointerover", (event) =>
    trace(event.target.closest(".block")?.dataset.model),
  );
  list.addEventListener("pointerleave", () => trace(null));
  find.addEventListener(
    "input",
    onceAFrame(() => drawGpus(drawn)),
  );
  new ResizeObserver(onceAFrame(measured)).observe(list);
}

/** Show these GPUs; those that did not change are left alone. */
export function drawGpus(gpus) {
  drawn = [...gpus];
  const wanted = find.value.trim().toLowerCase();
  list.dataset.density =
    drawn.length <= ROOMY ? "roomy" : drawn.length <= MEDIUM ? "medium" : "dense";
  const shown = wanted ? drawn.filter((gpu) => matches(gpu, wanted)) : drawn;
  keyed(list, shown, {
    key: (gpu) => gpu.id,
    make,
    update: (view, gpu) => update(view, gpu, wanted),
  });
  byId("gpus-empty").hidden = drawn.length > 0;
  byId("gpus-legend").hidden = drawn.length === 0;
  find.hidden = drawn.length === 0;
  setText(byId("gpus-summary"), summary(shown));
  keepOneTabStop();
}

function summary(gpus) {
  if (drawn.length === 0) return "";
  if (gpus.length < drawn.length) return `${gpus.length} of ${several(drawn.length, "GPU")}`;
  const busy = gpus.filter((gpu) => gpu.state === "busy").length;
  const free = gpus.reduce((sum, gpu) => sum + gpu.free_bytes, 0);
  const total = gpus.reduce((sum, gpu) => sum + gpu.total_bytes, 0);
  return `${busy} of ${gpus.length} busy, ${bytes(free)} of ${bytes(total)} free`;
}

const matches = (gpu, wanted) =>
  gpu.id.toLowerCase().includes(wanted) || gpu.residents.some((one) => isFound(one, wanted));

const isFound = (resident, wanted) =>
  resident.model.toLowerCase().includes(wanted) ||
  (resident.label ?? "").toLowerCase().includes(wanted);

// -- one GPU --------------------------------------------------------------------------------------

function make(gpu) {
  const slash = gpu.id.lastIndexOf("/");
  const name = h(
    "button",
    { type: "button", class: "gpu-name", tabindex: "-1", "aria-haspopup": "dialog" },
    h("span", { class: "dot" }),
    h("span", { class: "gpu-node", text: gpu.id.slice(0, slash + 1) }),
    h("span", { text: gpu.id.slice(slash + 1) }),
  );
  const facts = h("span", { class: "gpu-facts", "aria-hidden": "true" });
  const waits = h("span", { class: "waits", "aria-hidden": "true" });
  const blocks = h("span", { class: "blocks" });
  const withheld = h("span", { class: "withheld" });
  const free = h("span", { class: "free" });
  const bar = h("div", { class: "bar" }, blocks, withheld, free);
  const node = h("div", { class: "gpu" }, h("div", { class: "gpu-head" }, name, waits, facts), bar);
  node.dataset.gpu = gpu.id;
  return { node, name, facts, waits, blocks, withheld, free, gpu: null, wanted: "", barPx: 0 };
}

function update(view, gpu, wanted) {
  if (view.gpu === gpu && view.wanted === wanted && view.barPx === barPx) return;
  Object.assign(view, { gpu, wanted, barPx });
  attribute(view.node, "data-state", STATES[gpu.state] ?? "idle");
  attribute(view.name, "aria-label", inWords(gpu));
  setText(view.facts, `${bytes(gpu.free_bytes)} free`);
  drawWaits(view.waits, gpu);
  drawBlocks(view, gpu, wanted);
  const part = (value) => `${((100 * value) / gpu.total_bytes).toFixed(2)}%`;
  const left = gpu.contexts ?? [];
  const leftBytes = left.reduce((sum, one) => sum + one.bytes, 0);
  style(view.withheld, "width", part(gpu.withheld_bytes + leftBytes));
  const others = [
    gpu.withheld_bytes ? `${bytes(gpu.withheld_bytes)} in other hands` : "",
    left.length ? `${bytes(leftBytes)} in ${left.length === 1 ? "an empty process" : `${left.length} empty processes`}` : "",
  ];
  attribute(view.withheld, "title", others.filter(Boolean).join(", ") || null);
  const residents = gpu.residents.reduce((sum, one) => sum + one.bytes, 0);
  style(view.blocks, "width", part(Math.min(residents, gpu.total_bytes)));
  attribute(view.free, "title", `${bytes(gpu.free_bytes)} free of ${bytes(gpu.total_bytes)}`);
}

function drawBlocks({ blocks, name }, gpu, wanted) {
  const hadFocus = blocks.contains(document.activeElement);
  keyed(blocks, gpu.residents, {
    key: (one) => one.model,
    make: makeBlock,
    update: (block, one) => updateBlock(block, one, gpu, wanted),
  });
  if (hadFocus && !blocks.contains(document.activeElement)) name.focus({ preventScroll: true });
}

function inWords(gpu) {
  const waiting = waitingFor(gpu) ? `, ${waitingFor(gpu)} waiting here` : "";
  const free = `${bytes(gpu.free_bytes)} free of ${bytes(gpu.total_bytes)}`;
  return `GPU ${gpu.id}, ${gpu.state}${waiting}, ${several(gpu.residents.length, "model")}, ${free}`;
}

/** Of a long queue only the first requests are named. */
const waitingFor = (gpu) => gpu.queue_length ?? gpu.queue.length;

/** Its own queue: a mark for each that waits, and a number where they are many. */
function drawWaits(node, gpu) {
  const waiting = waitingFor(gpu);
  attribute(
    node,
    "title",
    waiting
      ? `${waiting} waiting for this GPU: ${gpu.queue.map((one) => one.function).join(", ")}`
      : null,
  );
  setText(node, waiting === 0 ? "" : waiting > 4 ? `▮▮▮▮ ${waiting}` : "▮".repeat(waiting));
}

function makeBlock(resident) {
  const label = h("span", { class: "block-label" });
  const node = h(
    "button",
    { type: "button", class: "block", tabindex: "-1", "aria-haspopup": "dialog" },
    label,
  );
  node.dataset.model = resident.model;
  colour(node, resident.model);
  return { node, label };
}

function updateBlock(block, resident, gpu, wanted) {
  const { node, label } = block;
  const name = nameOf(resident);
  style(node, "flex-grow", String(resident.bytes));
  node.classList.toggle("busy", Boolean(resident.busy));
  node.classList.toggle("loading", Boolean(resident.loading));
  node.classList.toggle("pinned", Boolean(resident.pinned));
  node.classList.toggle("found", wanted !== "" && isFound(resident, wanted));
  const roomPx = (barPx * resident.bytes) / gpu.total_bytes - 8;
  setText(label, roomPx < LABEL_PX - 8 ? "" : fitted(name, roomPx));
  const marks = ["busy", "loading", "pinned"].filter((mark) => resident[mark]);
  const text = [name, bytes(resident.bytes), ...marks].join(", ");
  attribute(node, "aria-label", `${text}, on ${gpu.id}`);
  attribute(node, "title", `${text}\n${resident.model}`);
}

/** The part of a name that fits; never a single letter. */
function fitted(name, roomPx) {
  const letters = Math.floor(roomPx / LETTER_PX);
  if (name.length <= letters) return name;
  return letters >= 4 ? `${name.slice(0, letters - 1)}…` : "";
}

function measured() {
  const bar = list.querySelector(".bar");
  if (!bar || Math.abs(bar.clientWidth - barPx) < 2) return;
  barPx = bar.clientWidth;
  drawGpus(drawn);
}

/** Mark the other GPUs that hold the model under the mouse or focus. */
function trace(model) {
  if ((model ?? "") === (list.dataset.traced ?? "")) return;
  for (const node of list.querySelectorAll(".same")) node.classList.remove("same");
  list.dataset.traced = model ?? "";
  if (!model) return;
  const same = list.querySelectorAll(`.block[data-model="${CSS.escape(model)}"]`);
  for (const node of same) node.classList.add("same");
}

// -- mouse and keys -------------------------------------------------------------------------------

function chosen(event) {
  const button = event.target.closest("button");
  if (!button) return;
  const gpu = button.closest(".gpu").dataset.gpu;
  if (button.dataset.model) cards.openModel(gpu, button.dataset.model);
  else cards.openGpu(gpu);
}

function moved(event) {
  const from = event.target.closest("button");
  if (!from || event.altKey || event.ctrlKey || event.metaKey) return;
  const to = neighbour(from, event.key);
  if (to === undefined) return;
  event.preventDefault();
  to?.focus();
}

/** The target of a key: null for none, undefined where the key has no meaning here. */
function neighbour(from, key) {
  const gpu = from.closest(".gpu");
  const inside = [...gpu.querySelectorAll("button")];
  const at = inside.indexOf(from);
  switch (key) {
    case "ArrowRight":
      return inside[at + 1] ?? gpu.nextElementSibling?.querySelector("button") ?? null;
    case "ArrowLeft":
      return (
        inside[at - 1] ??
        [...(gpu.previousElementSibling?.querySelectorAll("button") ?? [])].at(-1) ??
        null
      );
    case "Home":
      return inside[0];
    case "End":
      return inside.at(-1);
    case "ArrowDown":
      return below(gpu, columns(), at);
    case "ArrowUp":
      return below(gpu, -columns(), at);
    default:
      return undefined;
  }
}

function below(gpu, step, at) {
  const all = [...list.children];
  const inside = all[all.indexOf(gpu) + step]?.querySelectorAll("button");
  return inside ? inside[Math.min(at, inside.length - 1)] : null;
}

const columns = () => getComputedStyle(list).gridTemplateColumns.split(" ").length;

/** The whole list is one stop for the tab key: where one was last, else the first GPU. */
function keepOneTabStop() {
  const first = list.querySelector("button");
  if (first && !list.querySelector('button[tabindex="0"]')) first.tabIndex = 0;
}

function arrivedAt(node) {
  const button = node.closest("button");
  if (!button) return;
  for (const other of list.querySelectorAll('button[tabindex="0"]')) other.tabIndex = -1;
  button.tabIndex = 0;
  trace(button.dataset.model);
}

/** Move the focus to a GPU, for example when the focused model was evicted. */
export function focusGpu(id) {
  viewsOf(list).get(id)?.name.focus();
}
