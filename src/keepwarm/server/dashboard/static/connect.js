// For each client the lines that point it at this server.

import { byId, h, hide, put, say } from "./dom.js";

let chosen = ""; // a model; empty: the default

export function start(onChange) {
  byId("connect-model").addEventListener("change", ({ target }) => { chosen = target.value; onChange(); });
}

// The server may have other models after a restart.
export const reset = () => { chosen = ""; };

export const query = () => (chosen ? `?model=${encodeURIComponent(chosen)}` : "");

export function show({ url, model, models, key, clients }) {
  hide(byId("connect-choice"), models.length < 2);
  put("connect-model", models.map((name) => h("option", { value: name }, name)));
  byId("connect-model").value = model;
  const here = (line) => line.replaceAll(url, location.origin); // a proxy may have changed it
  byId("connect-about").textContent = `Paste your client's lines into a shell. Server ${location.origin}, model ${model}; `
    + (key === null ? "no key is needed." : `they read the key ${key} from KEEPWARM_API_KEY.`);
  put("clients", clients.map((client) => card(client, client.lines.map(here).join("\n"))));
}

export function card({ title, notes, then }, text) {
  const lines = h("pre", { tabindex: "0" }, text);
  return h("div", { class: "card" },
    h("div", { class: "row" }, h("h3", {}, title),
      h("button", { type: "button", "aria-label": `Copy the lines for ${title}`, onclick: () => copy(text, lines) }, "Copy")),
    notes.map((note) => h("p", { class: "note" }, note[0].toUpperCase() + note.slice(1))), lines,
    then ? h("p", { class: "quiet" }, then) : null);
}

async function copy(text, lines) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch { // not allowed here: the browser wants https
    getSelection().selectAllChildren(lines);
    say("Selected; press Ctrl-C or ⌘C to copy.");
  }
}
