// Orders to the gateway, and the reason when one is refused.

/**
 * The URL of a path of the page's, without the name and the password that the page's own URL may
 * have: browsers fetch no URL that has them, but send what they learned from it.
 */
export function address(path) {
  const url = new URL(path, document.baseURI);
  return url.origin + url.pathname + url.search;
}

/** The order was refused; the message is the reason. */
export class Refused extends Error {}

/** Send an order; throws Refused where it was refused. */
export async function order(path, { method = "POST", body } = {}) {
  const headers = { "X-Requested-With": "gpufaas" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  await answered(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
}

/** Fetch JSON. */
export async function ask(path) {
  const answer = await answered(path, { cache: "no-store" });
  return answer.json();
}

/** Fetch lines of JSON. */
export async function askLines(path) {
  const answer = await answered(path, { cache: "no-store" });
  const lines = (await answer.text()).split("\n").filter(Boolean);
  return lines.map((line) => JSON.parse(line));
}

async function answered(path, how) {
  let answer;
  try {
    answer = await fetch(address(path), how);
  } catch {
    throw new Refused("The gateway cannot be reached. Is it running?");
  }
  if (answer.ok) return answer;
  const text = (await answer.text()).trim();
  throw new Refused(text || `The gateway answered ${answer.status} ${answer.statusText}`);
}
