// The page's copy of the cluster's state: the gateway's state and every change since.

const KEYS = { gpus: "id", functions: "id", decisions: "request" };

/** The received state; sections whose items have ids are maps, the others are kept as received. */
export class State {
  now = 0;
  scheduler = null;
  policy = null;
  policies = [];
  gpus = new Map();
  queue = { length: 0, local: 0, head: [], by_function: [] };
  totals = {};
  history = { step_s: 1, points: 0, series: {} };
  functions = new Map();
  decisions = new Map();
  dead_letters = { count: 0, items: [] };
  alerts = [];
  workflows = [];
  owners = { count: 0, rows: [] };

  /** Replace the whole state. */
  replace(received) {
    for (const [section, value] of Object.entries(received)) {
      const key = KEYS[section];
      this[section] = key
        ? inOrder(section, new Map(value.map((item) => [item[key], item])))
        : value;
    }
    return new Set(Object.keys(received));
  }

  /** Apply changes; returns the changed sections. */
  change(received) {
    for (const [section, value] of Object.entries(received)) {
      if (section === "history") this.#append(value.added);
      else if (KEYS[section]) this.#merge(section, value);
      else this[section] = value;
    }
    return new Set(Object.keys(received));
  }

  #merge(section, { replaced = [], removed = [] }) {
    const items = this[section];
    for (const id of removed) items.delete(id);
    let isNew = false;
    for (const item of replaced) {
      const id = item[KEYS[section]];
      isNew ||= !items.has(id) || section === "decisions";
      items.set(id, item);
    }
    if (isNew) this[section] = inOrder(section, items);
  }

  #append(added) {
    const { points, series } = this.history;
    for (const [kind, values] of Object.entries(added)) {
      const all = [...(series[kind] ?? []), ...values];
      series[kind] = all.slice(Math.max(0, all.length - points));
    }
  }
}

const natural = new Intl.Collator("en", { numeric: true }).compare;

function inOrder(section, items) {
  const compare =
    section === "decisions" ? (a, b) => b[1].number - a[1].number : (a, b) => natural(a[0], b[0]);
  return new Map([...items].sort(compare));
}
