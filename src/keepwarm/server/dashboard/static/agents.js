// The list of agents and its actions.

import { file, post, remove } from "./api.js";
import { byId, h, put, say, table } from "./dom.js";
import { ago, bytes, count } from "./format.js";

const COLUMNS = [
  { name: "Agent" }, { name: "Created" }, { name: "Last used" }, { name: "Tokens", number: true },
  { name: "Turns", number: true }, { name: "Size", number: true }, { name: "Actions" },
];
let changed = () => {};
let shown = "";

export function start(onChange) {
  changed = onChange;
}

export function show({ data }) {
  const now = JSON.stringify([data, Math.floor(Date.now() / 30000)]); // so that ages are updated
  if (now === shown) return;
  shown = now;
  const focused = document.activeElement?.dataset?.action;
  put("agent-list", data.length ? table("All agents", COLUMNS, data.map(row))
    : h("p", { class: "quiet" }, "No agents yet. Name one with the header ", h("code", {}, "X-Keepwarm-Agent"), "."));
  if (focused) document.querySelector(`[data-action="${CSS.escape(focused)}"]`)?.focus();
}

function row(agent) {
  const name = [h("strong", {}, agent.id), agent.pinned ? h("span", { class: "badge" }, "pinned") : "",
    agent.forked_from ? h("div", { class: "quiet" }, `fork of ${agent.forked_from}`) : ""];
  return [name, ago(agent.created), ago(agent.used), count(agent.n_tokens), count(agent.turns.length),
    bytes(agent.n_bytes), h("div", { class: "actions" }, actions(agent))];
}

function actions(agent) {
  const pin = agent.pinned ? ["Unpin", () => post(path(agent, "unpin"))] : ["Pin", () => post(path(agent, "pin"))];
  const all = [pin, ["Fork", () => fork(agent)], ["Rewind", () => rewind(agent)],
    ["Export", () => download(agent)], ["Delete", () => forget(agent), "danger"]];
  return all.map(([name, act, kind]) =>
    h("button", { type: "button", class: kind, "aria-label": `${name} ${agent.id}`,
      "data-action": `${name === "Unpin" ? "Pin" : name} ${agent.id}`, onclick: () => run(act) }, name));
}

const path = (agent, verb) => `/v1/agents/${encodeURIComponent(agent.id)}${verb ? `/${verb}` : ""}`;

async function run(act) {
  try {
    await act();
  } catch (error) {
    say(error.message);
  }
  changed();
}

async function fork(agent) {
  const id = await ask({ title: `Fork ${agent.id}`, ok: "Fork", label: "Name of the new agent",
    value: `${agent.id}-2`, text: "The new agent has the same history. No block is copied." });
  if (id) await post(path(agent, "fork"), { id });
}

async function rewind(agent) {
  const turns = agent.turns.length;
  const turn = await ask({ title: `Rewind ${agent.id}`, ok: "Rewind", label: `Turns to keep, 0 to ${turns}`,
    value: String(Math.max(0, turns - 1)), text: "Later turns are dropped; their blocks stay until they are evicted." });
  if (turn) await post(path(agent, "rewind"), { turn: Number(turn) });
}

async function forget(agent) {
  const yes = await ask({ title: `Delete ${agent.id}?`, ok: "Delete", danger: true,
    text: `This deletes its ${count(agent.n_tokens)} tokens (${bytes(agent.n_bytes)}) from disk, except blocks that other agents use. It cannot be undone.` });
  if (yes) {
    const { removed_blocks: n } = await remove(path(agent));
    say(`${agent.id} deleted, with ${count(n)} blocks.`);
  }
}

async function download(agent) {
  say(`Preparing the export of ${agent.id}.`);
  const url = URL.createObjectURL(await file(path(agent, "export")));
  h("a", { href: url, download: `${agent.id}.tar` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

// Show a dialog. Returns the text entered, "yes" if it has no text field, or null if cancelled.
function ask({ title, text, ok, label = null, value = "", danger = false }) {
  const dialog = byId("ask-dialog");
  const input = byId("ask-input");
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-ok").textContent = ok;
  byId("ask-ok").className = danger ? "danger" : "primary";
  byId("ask-label").hidden = label === null;
  byId("ask-label").firstElementChild.textContent = label ?? "";
  input.value = value;
  dialog.returnValue = "";
  dialog.showModal();
  if (label !== null) input.select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const answer = label === null ? "yes" : input.value.trim();
      resolve(dialog.returnValue === "ok" ? answer : null);
    }, { once: true });
  });
}
