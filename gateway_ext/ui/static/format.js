// Numbers for display, each with its unit; null is a dash.

export const NOTHING = "–";
const plain = new Intl.NumberFormat("en");
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const BIG = [
  [1e9, "G"],
  [1e6, "M"],
  [1e4, "k"],
];

export const count = (value) => (isNothing(value) ? NOTHING : plain.format(value));

/** A count in little room: 12.3k. */
export function shortCount(value) {
  if (isNothing(value)) return NOTHING;
  const [size, letter] = BIG.find(([least]) => value >= least) ?? [1, ""];
  if (size === 1) return plain.format(Math.round(value));
  const by = letter === "k" ? 1e3 : size;
  return `${one.format(value / by)}${letter}`;
}

export function bytes(value) {
  if (isNothing(value)) return NOTHING;
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : one.format(size)} ${UNITS[unit]}`;
}

/** A duration: 12 ms, 1.24 s, 3 min 20 s, 2 h 5 min. */
export function seconds(value) {
  if (isNothing(value)) return NOTHING;
  if (value < 0) return `−${seconds(-value)}`;
  if (value === 0) return "0 s";
  if (value < 0.001) return "<1 ms";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

/** How long ago; whole units, so that it does not flicker. */
export function ago(then, now) {
  if (isNothing(then)) return NOTHING;
  const passed = Math.max(0, now - then);
  if (passed < 1) return "now";
  if (passed < 100) return `${Math.floor(passed)} s ago`;
  if (passed < 6000) return `${Math.floor(passed / 60)} min ago`;
  return passed < 2 * 86400
    ? `${Math.floor(passed / 3600)} h ago`
    : `${Math.floor(passed / 86400)} d ago`;
}

export function rate(value) {
  return isNothing(value) ? NOTHING : `${few(value)}/s`;
}

export function share(value) {
  if (isNothing(value)) return NOTHING;
  return value > 0.9995 || value === 0
    ? `${Math.round(value * 100)} %`
    : `${(value * 100).toFixed(1)} %`;
}

/** GPU seconds: a cost, so always in seconds. */
export function gpuSeconds(value) {
  if (isNothing(value)) return NOTHING;
  return value >= 1000 ? `${plain.format(Math.round(value))} s` : `${few(value)} s`;
}

/** GPU memory over time: "12 GiB s", "3.2 GiB h". */
export function gibSeconds(value) {
  if (isNothing(value)) return NOTHING;
  return value >= 3600 ? `${few(value / 3600)} GiB h` : `${few(value)} GiB s`;
}

/** Three figures at most. */
export function few(value) {
  if (isNothing(value)) return NOTHING;
  if (value >= 100) return plain.format(Math.round(value));
  if (value >= 10) return value.toFixed(1);
  if (value > 0 && value < 0.01) return "<0.01";
  return value === 0 ? "0" : value.toFixed(2);
}

/** "1 GPU", "3 GPUs". */
export const several = (number, what) =>
  `${plain.format(number)} ${what}${number === 1 ? "" : "s"}`;

/** How often: never, once, 3 times. */
export const times = (number) => ["never", "once"][number] ?? `${plain.format(number)} times`;

const isNothing = (value) => value === null || value === undefined || Number.isNaN(value);
