// Orders to the gateway, and the reason when one is refused.

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

async function answered(path, how) {
  let answer;
  try {
    answer = await fetch(path, how);
  } catch {
    throw new Refused("The gateway cannot be reached. Is it running?");
  }
  if (answer.ok) return answer;
  const text = (await answer.text()).trim();
  throw new Refused(text || `The gateway answered ${answer.status} ${answer.statusText}`);
}
