// Names and colours of models: the same on every GPU and every day.

const HUES = 360;
const SHADES = 3;

/** A model's label, else the distinctive end of its name. */
export function nameOf(resident) {
  return resident.label || shortModel(resident.model);
}

/** A model's name without the namespace, shortened. */
export function shortModel(model) {
  const name = model.slice(model.lastIndexOf("/") + 1);
  return name.length > 14 ? `${name.slice(0, 12)}…` : name;
}

/** Give an element the colour of a model; the style sheet makes light and dark ones of it. */
export function colour(node, model) {
  const number = hash(model);
  node.style.setProperty("--hue", String(number % HUES));
  node.style.setProperty("--shade", String((Math.floor(number / HUES) % SHADES) - 1));
  node.style.setProperty("--tint", String((Math.floor(number / HUES / SHADES) % SHADES) - 1));
}

/** The path below which orders about this model go: a slash in its name stays one. */
export const pathOf = (model) => `models/${model.split("/").map(encodeURIComponent).join("/")}`;

/** Every known model, with its name and its GPUs. */
export function knownModels(state) {
  const found = new Map();
  for (const gpu of state.gpus.values()) {
    for (const resident of gpu.residents) {
      const known = found.get(resident.model) ?? { ...resident, on: [] };
      known.on.push(gpu.id);
      found.set(resident.model, known);
    }
  }
  for (const called of state.functions.values()) {
    for (const model of called.models ?? []) {
      if (!found.has(model)) found.set(model, { model, label: called.name, bytes: null, on: [] });
    }
  }
  return found;
}

/** FNV-1a, mixed once more: names that differ in one letter get colours that differ. */
function hash(text) {
  let value = 0x811c9dc5;
  for (let at = 0; at < text.length; at += 1) {
    value = Math.imul(value ^ text.charCodeAt(at), 0x01000193);
  }
  value = Math.imul(value ^ (value >>> 15), 0x2c1b3c6d);
  return (value ^ (value >>> 13)) >>> 0;
}
