// Requests to the server. The key is stored in this tab only.

const KEY = "keepwarm-key";
const PATIENCE = 15_000; // ms that data is waited for: a server may hang
const GONE = "The server is not responding.";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {}
export class Failed extends Error {}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (/[^ -ÿ]/.test(key.get())) throw new Refused("The key has characters that no key has.");
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failed(GONE);
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => null);
  const message = problem?.error?.message ?? problem?.error ?? `The server returned status ${answer.status}.`;
  throw answer.status === 401 ? new Refused(message) : new Failed(message);
}

export async function get(path) {
  const answer = await ask(path, { signal: AbortSignal.timeout(PATIENCE) });
  return answer.json().catch(() => { throw new Failed(GONE); });
}

export async function post(path, body = {}, method = "POST") {
  const headers = { "Content-Type": "application/json" };
  return (await ask(path, { method, headers, body: JSON.stringify(body) })).json();
}

// The last line of an answer that comes in lines of JSON.
export async function last(path, body) {
  const headers = { "Content-Type": "application/json" };
  const answer = await ask(path, { method: "POST", headers, body: JSON.stringify(body) });
  return JSON.parse((await answer.text()).trim().split("\n").at(-1));
}

export const patch = (path, body) => post(path, body, "PATCH");

// The lines of an event stream as they come.
export async function* stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const answer = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines.filter((line) => line.startsWith("data: ") && line !== "data: [DONE]").map((line) => JSON.parse(line.slice(6)));
  }
}

export const remove = async (path) => (await ask(path, { method: "DELETE" })).json();

// A file; `arrived` is called with the number of bytes so far.
export async function file(path, arrived) {
  const answer = await ask(path);
  let n = 0;
  const counter = new TransformStream({ transform(chunk, out) {
    n += chunk.length;
    arrived(n);
    out.enqueue(chunk);
  } });
  return new Response(answer.body.pipeThrough(counter)).blob();
}
