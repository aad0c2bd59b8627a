// The dialogs behind a bar: a model on a GPU with its orders, and a GPU with all its models.

import { ask, order, Refused } from "./api.js";
import { attempt, open, twice } from "./dialog.js";
import { facts, h } from "./dom.js";
import { ago, bytes, count, few, NOTHING, seconds, several, share } from "./format.js";
import { focusGpu } from "./gpus.js";
import { colour, knownModels, nameOf, pathOf } from "./models.js";

/** A model on one GPU: pin, evict, prefetch. */
export function openModel(feed, gpuId, model) {
  const look = () => {
    const gpu = feed.state.gpus.get(gpuId);
    return { gpu, resident: gpu?.residents.find((one) => one.model === model) };
  };
  const { resident } = look();
  if (!resident) return;
  const about = h("div");
  // What comes later is below the buttons, and has its place: nothing moves under the mouse.
  const times = h("div", { class: "times" }, timesOf(LATER, LATER));
  const pin = h("button", { type: "button", class: "button" });
  const evict = twice("Evict from here", "Evict: press once more", () => run("evict"));
  const elsewhere = prefetchForm(feed.state, model, (gpu) => run("prefetch", gpu));
  const hint = h("p", { class: "hint" });
  const content = h(
    "div",
    null,
    about,
    h("div", { class: "actions" }, pin, evict),
    hint,
    elsewhere,
    times,
  );
  const refresh = () => drawModel({ ...look(), state: feed.state, about, pin, evict, hint });
  const dialog = open({ title: nameOf(resident), content, className: "narrow", refresh });
  const run = async (verb, gpu = gpuId) => {
    const ordered = () => order(`${pathOf(model)}/${verb}`, { body: gpu ? { gpu } : {} });
    const text = `Ordered: ${verb} ${nameOf(resident)}${gpu ? ` on ${gpu}` : ""}`;
    const isDone = await attempt(dialog, ordered, text);
    if (isDone && verb === "evict") focusGpu(gpuId);
  };
  pin.addEventListener("click", () => run(look().resident?.pinned ? "unpin" : "pin"));
  refresh();
  void drawTimes(times, model);
}

const LATER = "…";

const timesOf = (load, run) =>
  facts([
    ["Load", load],
    ["Run", run],
  ]);

/** The times that the scheduler places by, as they are now. */
async function drawTimes(node, model) {
  let found;
  try {
    found = await ask(pathOf(model));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    node.replaceChildren(h("p", { class: "hint", text: error.message }));
    return;
  }
  const loads = Object.entries(found.load_s).map(([tier, s]) => `${seconds(s)} from ${tier}`);
  const runs = Object.entries(found.run_s).map(([key, s]) => `${seconds(s)} for ${key}`);
  const configured = found.configured.map(
    (one) =>
      `${seconds(one.run_s)} for ${one.batch} on ${several(one.vcpus, "vCPU")}, ` +
      `${several(one.vgpus, "part")} of ${one.gpu_type}`,
  );
  node.replaceChildren(
    timesOf(loads.length ? listed(loads) : NOTHING, runs.length ? listed(runs) : NOTHING),
    ...(configured.length ? listing("Runs by configuration", configured, "") : []),
  );
}

function drawModel({ gpu, resident, state, about, pin, evict, hint }) {
  if (!resident) {
    about.replaceChildren(h("p", { text: "It has left this GPU." }));
    pin.disabled = evict.disabled = true;
    return;
  }
  const on = knownModels(state).get(resident.model).on;
  about.replaceChildren(
    facts([
      ["Model", h("code", { text: resident.model })],
      ["On", gpu.id],
      ["Memory", `${bytes(resident.bytes)}, ${share(resident.bytes / gpu.total_bytes)} of the GPU`],
      ["Hosted by", hosting(resident)],
      ["Now", stateOf(resident)],
      ["Last used", ago(resident.last_used_s, state.now)],
      ["Uses", count(resident.uses)],
      ["Copies", on.length > 1 ? `${on.length}: ${listed(on)}` : "only this one"],
    ]),
  );
  if (!pin.disabled) pin.textContent = resident.pinned ? "Unpin" : "Pin here";
  hint.textContent = resident.pinned
    ? "Pinned: it stays until it is unpinned."
    : "Pinned, a model stays, whatever else needs room.";
}

const stateOf = (resident) =>
  [
    resident.loading ? "loading" : resident.busy ? "in use" : "idle",
    resident.pinned ? "pinned" : "",
  ]
    .filter(Boolean)
    .join(", ");

const listed = (names) =>
  names.length > 6
    ? `${names.slice(0, 6).join(", ")} and ${names.length - 6} more`
    : names.join(", ");

/** The targets of a prefetch: GPUs without the model, the one with the most free memory first. */
function prefetchForm(state, model, action) {
  const lacking = [...state.gpus.values()]
    .filter((gpu) => gpu.state !== "silent" && !gpu.residents.some((one) => one.model === model))
    .sort((a, b) => b.free_bytes - a.free_bytes);
  const select = h(
    "select",
    { id: "prefetch-gpu" },
    h("option", { value: "", text: "wherever it fits best" }),
    ...lacking.map((gpu) =>
      h("option", { value: gpu.id, text: `${gpu.id}, ${bytes(gpu.free_bytes)} free` }),
    ),
  );
  const go = h("button", { type: "submit", class: "button", text: "Prefetch" });
  go.disabled = lacking.length === 0;
  const form = h(
    "form",
    { class: "inline" },
    h("label", { for: "prefetch-gpu", text: "Bring a copy to" }),
    select,
    go,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    action(select.value);
  });
  return form;
}

/** A GPU: its leases, its waiting requests, and its models. */
export function openGpu(feed, id) {
  const gpu = feed.state.gpus.get(id);
  if (!gpu) return;
  const live = h("div");
  const form = loadForm(feed.state, gpu, (model) => run(model));
  const dialog = open({ title: id, content: h("div", null, live, form), refresh: () => draw() });
  const run = (model) =>
    attempt(
      dialog,
      () => order(`${pathOf(model)}/prefetch`, { body: { gpu: id } }),
      `Ordered: prefetch onto ${id}`,
    );
  const draw = () => {
    const now = feed.state.gpus.get(id);
    if (now) live.replaceChildren(...gpuBody(now, feed.state));
    else live.replaceChildren(h("p", { text: "It has left the cluster." }));
  };
  draw();
}

function gpuBody(gpu, state) {
  return [
    facts([
      ["Kind", gpu.kind],
      ["Node", gpu.node],
      ["State", gpu.state],
      [
        "Memory",
        `${bytes(gpu.used_bytes)} used, ${bytes(gpu.free_bytes)} free of ${bytes(gpu.total_bytes)}`,
      ],
      ["In other hands", gpu.withheld_bytes ? bytes(gpu.withheld_bytes) : null],
      ["Leased of the last minute", gpu.utilisation === null ? null : share(gpu.utilisation)],
    ]),
    ...listing(
      "Has the GPU",
      gpu.leases.map((one) => holder(one, state.now)),
      "None.",
    ),
    ...listing("Waiting", waiters(gpu), "None."),
    h("h3", { text: `${several(gpu.residents.length, "model")}, longest unused first` }),
    residentsTable(gpu, state.now),
    ...(gpu.contexts?.length ? listing("Empty processes", emptied(gpu, state.now), "") : []),
  ];
}

const by = (one) => `${one.function}, ${one.request}`;

function waiters(gpu) {
  const more = (gpu.queue_length ?? 0) - gpu.queue.length;
  const named = gpu.queue.map(by);
  return more > 0 ? [...named, `and ${count(more)} more`] : named;
}

function holder(lease, now) {
  const since = seconds(Math.max(0, now - lease.since_s));
  return `${by(lease)}, for ${since}, expected to end in ${ending(lease, now)}${given(lease)}`;
}

/** The slots and the configuration of a lease that is not one request on one slot. */
function given({ slots = 1, batch = null, vcpus }) {
  if (batch === null) return slots > 1 ? `, on ${several(slots, "slot")}` : "";
  return `, a batch of ${batch} on ${several(vcpus, "vCPU")} and ${several(slots, "slot")}`;
}

const ending = (lease, now) =>
  lease.expected_end_s === null ? "a while" : seconds(Math.max(0, lease.expected_end_s - now));

function listing(title, lines, nothing) {
  const list = h("ul", { class: "plain" }, ...lines.map((text) => h("li", { text })));
  return [h("h3", { text: title }), lines.length ? list : h("p", { class: "hint", text: nothing })];
}

/** What models left: a process with its context, which the next model of the tenant takes. */
const emptied = (gpu, now) =>
  gpu.contexts.map((one) => `${one.model}, ${bytes(one.bytes)}${leaving(one, now)}`);

const leaving = (one, now) =>
  typeof one.leaves_s === "number" ? `, leaves in ${seconds(Math.max(0, one.leaves_s - now))}` : "";

function residentsTable(gpu, now) {
  if (gpu.residents.length === 0) return h("p", { class: "hint", text: "Its memory is empty." });
  const head = ["Model", "Memory", "Runtime", "Last used", "Uses"].map((text) =>
    h("th", { scope: "col", text }),
  );
  const rows = gpu.residents.map((one) => {
    const swatch = h("span", { class: "swatch model" });
    colour(swatch, one.model);
    const marks = ["busy", "loading", "pinned"].filter((mark) => one[mark]).join(", ");
    return h(
      "tr",
      null,
      h("td", null, swatch, `${nameOf(one)}${marks ? ` (${marks})` : ""}${leaving(one, now)}`),
      h("td", { class: "number", text: bytes(one.bytes) }),
      h("td", { text: hosting(one) ?? NOTHING }),
      ...[ago(one.last_used_s, now), few(one.uses)].map((text) =>
        h("td", { class: "number", text }),
      ),
    );
  });
  const table = h(
    "table",
    { class: "small" },
    h("thead", null, h("tr", null, ...head)),
    h("tbody", null, ...rows),
  );
  return h("div", { class: "wide" }, table);
}

/** Its runtime: `process`, or `stream of 3, 25 % of the GPU`; null while that is unknown. */
function hosting({ runtime, process_models, gpu_share }) {
  if (!runtime) return null;
  const text = runtime === "stream" ? `${runtime} of ${count(process_models)}` : runtime;
  return gpu_share < 1 ? `${text}, ${few(100 * gpu_share)} % of the GPU` : text;
}

/** Choose from every known model that is not on the GPU. */
function loadForm(state, gpu, action) {
  const here = new Set(gpu.residents.map((one) => one.model));
  const others = [...knownModels(state).values()].filter((one) => !here.has(one.model));
  others.sort((a, b) => nameOf(a).localeCompare(nameOf(b)));
  if (others.length === 0) return null;
  const select = h(
    "select",
    { id: "load-model" },
    ...others.map((one) =>
      h("option", {
        value: one.model,
        text: `${nameOf(one)}${one.bytes ? `, ${bytes(one.bytes)}` : ""}`,
      }),
    ),
  );
  const form = h(
    "form",
    { class: "inline" },
    h("label", { for: "load-model", text: "Prefetch onto this GPU" }),
    select,
    h("button", { type: "submit", class: "button", text: "Prefetch" }),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    action(select.value);
  });
  return form;
}
