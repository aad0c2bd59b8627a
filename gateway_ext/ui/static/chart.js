// A small chart of lines over time: axes, a readout under the mouse or by arrow keys, no library.

import { attribute, h, onceAFrame, setText } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const NARROW_PX = 230;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const LETTER_PX = 6; // of a label on the axis, whose letters are 10 px high
const STEPS = [1, 2, 2.5, 5, 10];

/**
 * A chart of these lines, [{kind, label}]; `format` writes a value with its unit. `most` is the top
 * of the axis where it is fixed.
 */
export class Chart {
  #lines;
  #format;
  #most;
  #least;
  #history = null;
  #width = 300;
  #at = null;
  #left = 46;
  #paths;

  constructor({ title, lines, format, most = null, least = 1 }) {
    this.#lines = lines;
    this.#format = format;
    this.#most = most;
    this.#least = least;
    this.#paths = lines.map((line, place) => path(`line line-${place} of-${line.kind}`));
    this.area = path("area");
    this.grid = svg("g", { class: "grid" });
    this.cursor = svg("line", { class: "cursor", y1: TOP, visibility: "hidden" });
    this.svg = svg("svg", { "aria-hidden": "true", focusable: "false" });
    this.svg.append(this.grid, this.area, ...this.#paths, this.cursor);
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.node = h(
      "div",
      {
        class: "chart",
        tabindex: "0",
        role: "group",
        "aria-label": `${title} over time. Left and right arrow keys read values.`,
      },
      this.svg,
      this.readout,
    );
    this.#listen();
  }

  draw(history) {
    this.#history = history;
    this.#redraw();
  }

  #listen() {
    const redraw = onceAFrame(() => this.#redraw());
    new ResizeObserver(([entry]) => {
      this.#width = Math.max(120, Math.floor(entry.contentRect.width));
      redraw();
    }).observe(this.node);
    this.svg.addEventListener("pointermove", (event) => this.#read(this.#nearest(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.#read(null));
    this.node.addEventListener("blur", () => this.#read(null));
    this.node.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const last = this.#points - 1;
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      PageUp: -12,
      PageDown: 12,
      Home: -Infinity,
      End: Infinity,
    };
    if (event.key === "Escape" && this.#at !== null) this.#read(null);
    else if (event.key in steps && last >= 0) {
      this.#read(
        Math.min(
          last,
          Math.max(
            this.#first,
            (this.#at ?? last + (steps[event.key] < 0 ? 1 : 0)) + steps[event.key],
          ),
        ),
      );
    } else return;
    event.preventDefault();
  }

  get #isNarrow() {
    return this.#width < NARROW_PX;
  }

  get #height() {
    return this.#isNarrow ? 92 : 132;
  }

  get #points() {
    return this.#history?.points ?? 0;
  }

  /** Series are shorter than the axis at first: they end at the right. */
  #value(kind, place) {
    const series = this.#history.series[kind] ?? [];
    return series[place - (this.#points - series.length)] ?? null;
  }

  get #first() {
    const longest = Math.max(
      0,
      ...this.#lines.map((line) => (this.#history.series[line.kind] ?? []).length),
    );
    return this.#points - longest;
  }

  #x(place) {
    const room = this.#width - this.#left - RIGHT;
    return this.#left + (this.#points > 1 ? (room * place) / (this.#points - 1) : room);
  }

  #nearest(x) {
    const room = this.#width - this.#left - RIGHT;
    const place = Math.round(((x - this.#left) / room) * (this.#points - 1));
    return this.#points === 0 ? null : Math.min(this.#points - 1, Math.max(this.#first, place));
  }

  #redraw() {
    if (this.#history === null || this.#points === 0) return;
    attribute(this.svg, "width", this.#width);
    attribute(this.svg, "height", this.#height);
    attribute(this.cursor, "y2", this.#height - BOTTOM);
    attribute(this.svg, "viewBox", `0 0 ${this.#width} ${this.#height}`);
    const top = this.#most ?? this.#top();
    const y = (value) => TOP + (this.#height - TOP - BOTTOM) * (1 - value / top);
    const marks = (this.#isNarrow ? [0, top] : [0, top / 2, top]).map((value) => ({
      at: y(value),
      text: short(this.#format(value)),
    }));
    const longest = Math.max(...marks.map(({ text }) => text.length));
    this.#left = Math.max(this.#isNarrow ? 42 : 46, 10 + LETTER_PX * longest);
    this.#drawGrid(marks);
    this.#lines.forEach((line, place) =>
      attribute(this.#paths[place], "d", this.#line(line.kind, y)),
    );
    if (this.#lines.length === 1) attribute(this.area, "d", this.#filled(this.#lines[0].kind, y));
    this.#read(this.#at);
  }

  /** The end of the axis: a round number above all values. */
  #top() {
    const values = this.#lines.flatMap((line) => this.#history.series[line.kind] ?? []);
    const most = Math.max(this.#least, ...values.filter((value) => value !== null));
    const size = 10 ** Math.floor(Math.log10(most));
    return size * STEPS.find((step) => size * step >= most * 0.999);
  }

  #drawGrid(marks) {
    const axis = marks.flatMap(({ at, text }) => [
      svg("line", { x1: this.#left, x2: this.#width - RIGHT, y1: at, y2: at }),
      label(this.#left - 6, at + 3.5, "end", text),
    ]);
    const spanS = this.#history.step_s * this.#points;
    const ends = [
      [0, "start", spanS],
      [0.5, "middle", spanS / 2],
      [1, "end", 0],
    ];
    const times = ends
      .filter(([at]) => at !== 0.5 || !this.#isNarrow)
      .map(([at, anchor, agoS]) =>
        label(
          this.#x(at * (this.#points - 1)),
          this.#height - 5,
          anchor,
          agoS === 0 ? "now" : past(agoS),
        ),
      );
    this.grid.replaceChildren(...axis, ...times);
  }

  /** A line that is interrupted where values are missing. */
  #line(kind, y) {
    let drawn = "";
    let pen = "M";
    for (let place = this.#first; place < this.#points; place += 1) {
      const value = this.#value(kind, place);
      if (value === null) pen = "M";
      else {
        drawn += `${pen}${this.#x(place).toFixed(1)} ${y(value).toFixed(1)}`;
        // A point by itself is drawn too: the caps of the line are round.
        if (pen === "M") drawn += "h0";
        pen = "L";
      }
    }
    return drawn || null;
  }

  #filled(kind, y) {
    const parts = [];
    let run = [];
    for (let place = this.#first; place <= this.#points; place += 1) {
      const value = place < this.#points ? this.#value(kind, place) : null;
      if (value !== null) run.push(`${this.#x(place).toFixed(1)} ${y(value).toFixed(1)}`);
      else if (run.length) {
        const [first, last] = [run[0], run.at(-1)].map((point) => point.split(" ")[0]);
        parts.push(`M${first} ${y(0)}L${run.join("L")}L${last} ${y(0)}Z`);
        run = [];
      }
    }
    return parts.join("") || null;
  }

  #read(place) {
    this.#at = place;
    attribute(this.cursor, "visibility", place === null ? "hidden" : "visible");
    if (place === null) {
      setText(this.readout, "");
      return;
    }
    for (const end of ["x1", "x2"]) attribute(this.cursor, end, this.#x(place).toFixed(1));
    const agoS = this.#history.step_s * (this.#points - 1 - place);
    const values = this.#lines.map((line) =>
      `${line.label} ${this.#format(this.#value(line.kind, place))}`.trim(),
    );
    setText(this.readout, `${agoS === 0 ? "now" : past(agoS)}: ${values.join(", ")}`);
    this.readout.classList.toggle("at-left", this.#x(place) > this.#width / 2);
  }
}

/** "2.50 s" on an axis is 2.5 s. */
const short = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

const past = (agoS) => (agoS < 120 ? `−${Math.round(agoS)} s` : `−${+(agoS / 60).toFixed(1)} min`);

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const path = (className) => svg("path", { class: className });

function label(x, y, anchor, text) {
  const node = svg("text", { x, y, "text-anchor": anchor });
  node.textContent = text;
  return node;
}
