// Requests to the server. The key is stored in this tab only.

const KEY = "keepwarm-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {}
export class Failed extends Error {}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch {
    throw new Failed("The server is not responding.");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => null);
  const message = problem?.error?.message ?? `The server returned status ${answer.status}.`;
  throw answer.status === 401 ? new Refused(message) : new Failed(message);
}

export const get = async (path) => (await ask(path)).json();

export async function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

export const remove = async (path) => (await ask(path, { method: "DELETE" })).json();

export const file = async (path) => (await ask(path)).blob();
