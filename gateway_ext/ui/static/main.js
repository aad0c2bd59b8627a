// The whole page: which sections are drawn when which part of the state changed.

import { drawAlerts, drawLive, drawScheduler } from "./alerts.js";
import { openGpu, openModel } from "./cards.js";
import { drawDecisions, startDecisions } from "./decisions.js";
import { refreshDialogs } from "./dialog.js";
import { byId, onceAFrame } from "./dom.js";
import { Feed } from "./feed.js";
import { drawFunctions, startFunctions } from "./functions.js";
import { drawGpus, startGpus } from "./gpus.js";
import { drawLetters, startLetters } from "./letters.js";
import { drawFigures, drawHistory, startOverview } from "./overview.js";
import { drawOwners, startOwners } from "./owners.js";
import { drawPolicy, startPolicy } from "./policy.js";
import { drawQueue, startQueue } from "./queue.js";
import { drawWorkflows, startWorkflows } from "./workflows.js";

// The views of each section of the state; views with ages are drawn every time.
const PARTS = [
  [["scheduler"], (state) => drawScheduler(state.scheduler)],
  [["alerts"], (state) => drawAlerts(state.alerts)],
  [["policy"], (state) => drawPolicy(state.policy)],
  [["totals", "queue"], drawFigures],
  [["history"], drawHistory],
  [["gpus"], (state) => drawGpus(state.gpus.values())],
  [["queue"], (state) => drawQueue(state.queue)],
  [["functions"], (state) => drawFunctions(state.functions)],
  [["owners"], (state) => drawOwners(state.owners)],
  [["workflows"], (state) => drawWorkflows(state.workflows)],
  [["decisions", "now"], (state) => drawDecisions(state.decisions, state.now)],
  [["dead_letters", "now"], (state) => drawLetters(state.dead_letters, state.now)],
  [["now"], refreshDialogs],
];

const changed = new Set();
const draw = onceAFrame(() => {
  const sections = new Set(changed);
  changed.clear();
  for (const [of, show] of PARTS) if (of.some((section) => sections.has(section))) show(feed.state);
  byId("main").dataset.filled = "yes";
  if (performance.getEntriesByName("filled").length === 0) performance.mark("filled");
});

const feed = new Feed({
  onChange: (state, sections) => {
    for (const section of sections) changed.add(section);
    draw();
  },
  onLive: drawLive,
});

startOverview();
startGpus({
  openModel: (gpu, model) => openModel(feed, gpu, model),
  openGpu: (gpu) => openGpu(feed, gpu),
});
startQueue();
startOwners();
startFunctions(feed);
startDecisions(feed);
startLetters();
startWorkflows();
startPolicy(feed);
byId("pause").addEventListener("click", (event) => {
  const button = event.currentTarget;
  const isPaused = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(isPaused));
  button.textContent = isPaused ? "Resume" : "Pause";
  feed.pause(isPaused);
});
feed.start();
