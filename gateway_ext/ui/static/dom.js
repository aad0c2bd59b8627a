// Making and changing elements. Text goes in as text, never as markup.

/** An element; `on...` of its properties are listeners, `text` its text, null ones are left out. */
export function h(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else attribute(node, name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The element of this id; the page has it. */
export const byId = (id) => document.getElementById(id);

/** Set a text only where it differs: an equal text costs no layout. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Change an attribute only where it differs; null, undefined and false take it away. */
export function attribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Set a property of the style, where it differs. */
export function style(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

const keptBy = new WeakMap();

/**
 * Have the parent show these items in this order: a view is made once for each key, and gets
 * its item every time. A view has its element as `node`.
 */
export function keyed(parent, items, { key, make, update }) {
  const before = keptBy.get(parent) ?? new Map();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const after = new Map();
  for (const item of items) after.set(key(item), before.get(key(item)) ?? make(item));
  for (const [id, view] of before) if (!after.has(id)) view.node.remove();
  let at = parent.firstElementChild;
  for (const item of items) {
    const view = after.get(key(item));
    update(view, item);
    if (view.node === at) at = at.nextElementSibling;
    else parent.insertBefore(view.node, at);
  }
  keptBy.set(parent, after);
  // An element that is moved loses the focus.
  if (focused?.isConnected && focused !== document.activeElement)
    focused.focus({ preventScroll: true });
  return after;
}

/** The views that `keyed` has made there, by key. */
export const viewsOf = (parent) => keptBy.get(parent) ?? new Map();

/** Pairs of a name and a value as a description list; empty values are left out. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    ...shown.flatMap(([name, value]) => [
      h("dt", { text: name }),
      value instanceof Node ? h("dd", null, value) : h("dd", { text: value }),
    ]),
  );
}

/** Whether the element is in use (focus or mouse): then nothing in it may move. */
export function inUse(node) {
  return (
    node.matches(":hover") ||
    (node.contains(document.activeElement) && document.activeElement !== node)
  );
}

/** Call it once in the next frame, however often it is asked for. */
export function onceAFrame(action) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      action();
    });
  };
}
