// Live data: server-sent events into a State, and the state of the connection.

import { address } from "./api.js";
import { State } from "./state.js";

// The gateway sends a message about once a second, less often where a look is expensive.
const SILENT_MS = 20_000;
const RETRY_MS = [1_000, 2_000, 4_000, 8_000, 15_000];

/**
 * Keeps a State up to date. `onChange(state, sections)` gets the changed sections, `onLive(live, why)`
 * the connection's state: "connecting", "live", "lost" or "paused".
 */
export class Feed {
  #state = new State();
  #source = null;
  #tries = 0;
  #messageMs = 0;
  #filled = false;
  #paused = false;
  #live = "";
  #retry = 0;
  #onChange;
  #onLive;

  constructor({ onChange, onLive }) {
    this.#onChange = onChange;
    this.#onLive = onLive;
    setInterval(() => this.#watch(), 1_000);
    // A hidden page costs the gateway nothing.
    document.addEventListener("visibilitychange", () =>
      document.hidden ? this.#close() : this.#open(),
    );
    addEventListener("online", () => this.#open());
    addEventListener("offline", () => this.#report("lost", "This machine is offline."));
  }

  get state() {
    return this.#state;
  }

  /** Time since the last message. */
  get ageS() {
    return (performance.now() - this.#messageMs) / 1000;
  }

  start() {
    this.#report("connecting");
    this.#open();
  }

  /** Pause, or resume with all changes since then. */
  pause(isSo) {
    this.#paused = isSo;
    if (isSo) {
      this.#close();
      this.#report("paused");
    } else {
      this.start();
    }
  }

  #open() {
    if (this.#paused || document.hidden) return;
    this.#close();
    const source = new EventSource(address("events"));
    this.#source = source;
    source.addEventListener("state", (event) => this.#onMessage(event, true));
    source.addEventListener("change", (event) => this.#onMessage(event, false));
    source.addEventListener("ping", (event) => this.#onMessage(event, false));
    source.addEventListener("error", () => this.#failed(source));
  }

  #close() {
    clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  #onMessage(event, whole) {
    const received = JSON.parse(event.data);
    const changed = whole ? this.#state.replace(received) : this.#state.change(received);
    this.#messageMs = performance.now();
    this.#tries = 0;
    this.#filled ||= whole;
    this.#report("live");
    this.#onChange(this.#state, changed);
  }

  /** The browser tries again by itself, unless it was answered with something else than events. */
  #failed(source) {
    if (source !== this.#source) return;
    const why = "The connection to the gateway is lost. Trying again.";
    this.#report(this.#filled ? "lost" : "connecting", why);
    if (source.readyState === EventSource.CLOSED) this.#askWhy();
  }

  async #askWhy() {
    const waitMs = RETRY_MS[Math.min(this.#tries, RETRY_MS.length - 1)];
    this.#tries += 1;
    this.#retry = setTimeout(() => this.#open(), waitMs);
    try {
      const answer = await fetch(address("state"), { cache: "no-store" });
      if (!answer.ok) this.#report("lost", `The gateway answered: ${(await answer.text()).trim()}`);
    } catch {
      this.#report("lost", "The gateway cannot be reached. Trying again.");
    }
  }

  #watch() {
    if (this.#source === null || this.#live !== "live") return;
    if (performance.now() - this.#messageMs > SILENT_MS) {
      this.#report("lost", "The gateway does not answer. Trying again.");
      this.#open();
    }
  }

  #report(live, why = "") {
    if (live === this.#live && !why) return;
    this.#live = live;
    this.#onLive(live, why);
  }
}
