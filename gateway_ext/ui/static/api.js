// Orders to the gateway: what a person asks for, and in words why it was refused.

/** It was not done; the message says why not. */
export class Refused extends Error {}

/** Have something done; a Refused is thrown where it was not. */
export async function order(path, { method = "POST", body } = {}) {
  const headers = { "X-Requested-With": "gpufaas" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  await answered(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
}

/** What is there, as JSON. */
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
  const said = (await answer.text()).trim();
  throw new Refused(said || `The gateway answered ${answer.status} ${answer.statusText}`);
}
