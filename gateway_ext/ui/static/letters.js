// Dead letters: calls that failed for good, to be replayed or deleted.

import { Refused, order } from "./api.js";
import { note, twice } from "./dialog.js";
import { byId, h, keyed, setText } from "./dom.js";
import { ago, count, several } from "./format.js";

const list = h("ul", { class: "letters" });

/** Initialise the table. */
export function startLetters() {
  byId("letters-list").append(list);
}

/** Show them, in the order they came in. */
export function drawLetters(letters, now) {
  byId("letters-empty").hidden = letters.count > 0 || Boolean(letters.why);
  setText(byId("letters-summary"), summary(letters));
  keyed(list, letters.items, {
    key: (one) => one.id,
    make,
    update: (view, one) => update(view, one, now),
  });
}

function summary({ count: all, why, items }) {
  if (why) return `The queue cannot be read: ${why}`;
  if (all > items.length) return `the first ${count(items.length)} of ${count(all)}`;
  return all === 0 ? "" : several(all, "call");
}

function make(one) {
  const when = h("span", { class: "hint" });
  const why = h("span", { class: "letter-why" });
  const name = h("strong", { text: one.function });
  const replay = h("button", {
    type: "button",
    class: "button",
    text: "Replay",
    "aria-label": `Replay the call of ${one.function}`,
  });
  const discard = twice("Delete", "Delete: press once more", () =>
    act(
      node,
      discard,
      () => order(`dead-letters/${one.id}`, { method: "DELETE" }),
      `Deleted: the call of ${one.function}`,
    ),
  );
  replay.addEventListener("click", () =>
    act(
      node,
      replay,
      () => order(`dead-letters/${one.id}/replay`),
      `Ordered: one more try of ${one.function}`,
    ),
  );
  const node = h(
    "li",
    { class: "letter" },
    h("div", { class: "letter-text" }, h("p", null, name, " ", when), why),
    h("div", { class: "actions" }, replay, discard),
  );
  node.dataset.letter = one.id;
  return { node, when, why };
}

function update(view, one, now) {
  setText(
    view.when,
    `${several(one.tries, "time")} tried, ${ago(one.at, now)}${one.call ? `, call ${one.call}` : ""}`,
  );
  setText(view.why, one.why);
}

/** Run the order; the focus moves to the next letter when this one is gone. */
async function act(node, button, action, done) {
  const next = node.nextElementSibling ?? node.previousElementSibling;
  button.disabled = true;
  try {
    await action();
    note(done);
    (next?.querySelector("button") ?? byId("letters")).focus({ preventScroll: true });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    note(error.message, "problem");
  } finally {
    button.disabled = false;
  }
}
