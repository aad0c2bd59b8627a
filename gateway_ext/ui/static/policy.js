// The policy in force, and the form that switches it.

import { order } from "./api.js";
import { attempt, open, twice } from "./dialog.js";
import { byId, h, setText } from "./dom.js";

const button = byId("policy");
let feed = null;

/** Initialise the button. */
export function startPolicy(source) {
  feed = source;
  button.addEventListener("click", openForm);
}

/** Show the policy in force. */
export function drawPolicy(policy) {
  if (!policy?.name) return;
  button.disabled = false;
  setText(button, `Policy ${policy.name}`);
  button.title = inWords(policy);
}

function inWords({ name, parameters }) {
  const text = Object.entries(parameters)
    .map(([key, value]) => `${key} ${value}`)
    .join(", ");
  return text ? `${name}, ${text}` : name;
}

function openForm() {
  const { policies, policy } = feed.state;
  const fields = h("div", { class: "parameters" });
  const meaning = h("p", { class: "hint" });
  const rule = h("details", { class: "rule" }, h("summary", { text: "Its rule" }), h("p"));
  const select = h(
    "select",
    { id: "policy-name", autofocus: true },
    ...policies.map((one) =>
      h("option", {
        value: one.name,
        text: one.name === policy.name ? `${one.name} (in force)` : one.name,
      }),
    ),
  );
  select.value = policy.name;
  const chosen = () => policies.find((one) => one.name === select.value);
  const draw = () => drawChoice(chosen(), { fields, meaning, rule });
  select.addEventListener("change", draw);
  const submit = twice("Decide by it", "Press once more: from now on", () => send());
  const content = h(
    "form",
    { class: "form", novalidate: true },
    h("p", {
      class: "hint",
      text: `In force: ${inWords(policy)}. Who waits keeps its place; no request is lost.`,
    }),
    h("label", { for: "policy-name", text: "Policy" }),
    select,
    meaning,
    rule,
    fields,
    h("div", { class: "actions" }, submit),
  );
  submit.classList.remove("danger");
  submit.classList.add("primary");
  const dialog = open({ title: "Who gets which GPU", content, className: "narrow" });
  const send = () => {
    const wrong = fields.querySelector("input:invalid");
    if (wrong) {
      wrong.reportValidity();
      return;
    }
    const wanted = { name: select.value, parameters: values(fields) };
    attempt(
      dialog,
      () => order("policy", { body: wanted }),
      `Policy ${inWords(wanted)} decides from now on`,
    );
  };
  content.addEventListener("submit", (event) => {
    event.preventDefault();
    submit.focus();
    submit.click();
  });
  draw();
}

function drawChoice(policy, { fields, meaning, rule }) {
  setText(meaning, policy.meaning);
  rule.hidden = !policy.rule;
  setText(rule.lastElementChild, policy.rule ?? "");
  fields.replaceChildren(...policy.parameters.map(parameter));
  if (policy.parameters.length === 0)
    fields.append(h("p", { class: "hint", text: "It has no parameters." }));
}

function parameter(one) {
  const id = `parameter-${one.name}`;
  const input = h("input", {
    id,
    name: one.name,
    type: "number",
    step: one.type === "int" ? "1" : "any",
    required: true,
    value: one.value,
    "aria-describedby": `${id}-hint`,
  });
  const text = [one.meaning, `default ${one.default}`].filter(Boolean).join("; ");
  return h(
    "div",
    { class: "field" },
    h("label", { for: id, text: one.name }),
    input,
    h("span", { class: "hint", id: `${id}-hint`, text }),
  );
}

const values = (fields) =>
  Object.fromEntries(
    [...fields.querySelectorAll("input")].map((input) => [input.name, input.valueAsNumber]),
  );
