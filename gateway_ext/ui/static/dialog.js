// Dialogs and short notes. A dialog holds the focus while it is open and gives it back afterwards.

import { Refused } from "./api.js";
import { byId, h } from "./dom.js";

const NOTE_MS = 6_000;
const KEEP = 3;

/**
 * Open a dialog with this title and content. `refresh(state)` is called with every new state
 * while it is open.
 */
export function open({ title, content, className = "", refresh = null }) {
  const back = document.activeElement;
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const close = h("button", { type: "button", class: "close", "aria-label": "Close", text: "×" });
  const heading = h("h2", { id: "dialog-title", text: title, tabindex: "-1" });
  const node = h(
    "dialog",
    { class: `dialog ${className}`, "aria-labelledby": "dialog-title" },
    h("div", { class: "dialog-head" }, heading, close),
    h("div", { class: "dialog-body" }, problem, content),
  );
  const shown = { node, problem, refresh, close: () => node.close() };
  close.addEventListener("click", shown.close);
  node.addEventListener("click", (event) => event.target === node && shown.close());
  node.addEventListener("close", () => closed(shown, back));
  document.body.append(node);
  node.showModal();
  if (!content.querySelector?.("[autofocus]")) heading.focus({ preventScroll: true });
  opened.add(shown);
  return shown;
}

/** Refresh every open dialog with a new state. */
export function refreshDialogs(state) {
  for (const shown of opened) shown.refresh?.(state);
}

/** Run a dialog's order; true if it was done. The dialog then closes, else it shows the reason. */
export async function attempt(dialog, action, done) {
  const buttons = [...dialog.node.querySelectorAll("button:not(.close)")].filter(
    (one) => !one.disabled,
  );
  for (const button of buttons) button.disabled = true;
  dialog.problem.hidden = true;
  try {
    await action();
    dialog.close();
    note(done);
    return true;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    dialog.problem.textContent = error.message;
    dialog.problem.hidden = false;
    for (const button of buttons) button.disabled = false;
    dialog.problem.scrollIntoView({ block: "nearest" });
    return false;
  }
}

/** A button that acts at the second press; the first asks for confirmation. */
export function twice(label, question, action) {
  const button = h("button", { type: "button", class: "button danger", text: label });
  let asked = false;
  const back = () => {
    asked = false;
    button.textContent = label;
    button.classList.remove("asked");
  };
  button.addEventListener("blur", back);
  button.addEventListener("click", () => {
    if (asked) {
      action();
      return;
    }
    asked = true;
    button.textContent = question;
    button.classList.add("asked");
  });
  return button;
}

/** Show a note that disappears by itself. */
export function note(text, kind = "done") {
  const toasts = byId("toasts");
  const node = h("p", { class: `toast ${kind}`, text });
  toasts.append(node);
  while (toasts.children.length > KEEP) toasts.firstElementChild.remove();
  setTimeout(() => node.remove(), NOTE_MS);
}

const opened = new Set();

function closed(shown, back) {
  opened.delete(shown);
  shown.node.remove();
  const lost = document.activeElement === null || document.activeElement === document.body;
  if (lost && back?.isConnected) back.focus({ preventScroll: true });
}
