// The list of agents and its actions.

import { file, patch, post, remove } from "./api.js";
import * as chat from "./chat.js";
import { agentName, byId, details, empty, h, pages, put, say, slice, table } from "./dom.js";
import { ago, bytes, count, middle, modelName, plural } from "./format.js";

const PAGE = 25;
const COLUMNS = [
  { name: "Agent" }, { name: "Model" }, { name: "Last used" }, { name: "Tokens", number: true },
  { name: "Turns", number: true }, { name: "Branches", number: true }, { name: "Size", number: true }, { name: "Actions" },
];
const BRANCHES = [
  { name: "Branch" }, { name: "Model" }, { name: "Tokens", number: true }, { name: "Turns", number: true }, { name: "Last used" },
];
const state = { agents: [], page: 0 };
let changed = () => {};

export function start(onChange) {
  changed = onChange;
  const renew = () => { state.page = 0; render(); };
  byId("agent-filter").addEventListener("input", renew);
  byId("agent-sort").addEventListener("change", renew);
  byId("ask-dialog").addEventListener("keydown", (event) => {
    if (event.repeat && event.key === "Enter") event.preventDefault(); // the Enter that opened it, held down
  });
}

export function show({ data }) {
  state.agents = data;
  render();
}

function render() {
  const found = sorted(state.agents.filter(matches));
  const { rows, page, n } = slice(found, state.page, PAGE);
  const focused = document.activeElement?.dataset?.action;
  put("agent-list", rows.length ? table("All agents", COLUMNS, rows.map(row))
    : state.agents.length ? empty("No agent matches; clear the filter.")
      : empty("No agents yet. Name one with the header ", h("code", {}, "X-Keepwarm-Agent"), ", or try one below."));
  pages("agent-pages", page, n, (to) => { state.page = to; render(); });
  if (focused) document.querySelector(`[data-action="${CSS.escape(focused)}"]`)?.focus();
}

// The agent as it is now: a row keeps its buttons while what they show stays the same.
const current = (shown) => state.agents.find(({ id, key }) => id === shown.id && key === shown.key) ?? shown;

function matches(agent) {
  const wanted = byId("agent-filter").value.trim().toLowerCase();
  return !wanted || [agent.id, agent.title, agent.model, agent.key].some((text) => text?.toLowerCase().includes(wanted));
}

function sorted(agents) {
  const by = byId("agent-sort").value;
  return agents.toSorted(by === "id" ? (a, b) => a.id.localeCompare(b.id) : (a, b) => b[by] - a[by]);
}

function row(agent) {
  const badges = [agent.pinned && "pinned", agent.ephemeral && "ephemeral", agent.imported && "imported"].filter(Boolean);
  const name = [agentName({ ...agent, agent: agent.id }),
    ...badges.map((badge) => h("span", { class: "badge" }, badge)),
    h("div", { class: "quiet" }, [`created ${ago(agent.created)}`, agent.forked_from ? `fork of ${middle(agent.forked_from)}` : ""].filter(Boolean).join(", "))];
  const branches = h("button", { type: "button", class: "link", "aria-label": `${plural(agent.branches.length, "branch", "branches")} of ${agent.id}`,
    onclick: () => showBranches(current(agent)) }, count(agent.branches.length));
  return [name, h("span", { class: "model", title: agent.model }, modelName(agent.model)), ago(agent.used), count(agent.n_tokens), count(agent.turns.length), branches, bytes(agent.n_bytes),
    agent.key ? h("span", { class: "quiet" }, "with its own key") : h("div", { class: "actions" }, actions(agent))];
}

function showBranches(agent) {
  const rows = agent.branches.toSorted((a, b) => a.number - b.number).map((branch) => [
    [`${branch.number}`, branch.number === agent.branch ? h("span", { class: "badge" }, "head") : "",
      branch.main ? h("span", { class: "badge" }, "main") : "", branch.pinned ? h("span", { class: "badge" }, "pinned") : ""],
    modelName(branch.model), count(branch.n_tokens), count(branch.turns.length), ago(branch.used)]);
  details(`Branches of ${agent.id}`, table(`Branches of ${agent.id}`, BRANCHES, rows));
}

function actions(agent) {
  const pin = agent.pinned ? ["Unpin", () => patch(path(agent), { pinned: false })] : ["Pin", () => patch(path(agent), { pinned: true })];
  const all = [["Chat", () => chat.open(agent.id)], pin, ["Fork", () => fork(agent)], ["Rewind", () => rewind(current(agent))],
    ["Export", () => download(current(agent))], ["Delete", () => forget(current(agent)), "danger"]];
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
    value: turns > 1 ? String(turns - 1) : "", danger: true, text: "Later turns are dropped; their blocks stay until they are evicted." });
  if (turn) await post(path(agent, "rewind"), { turn: Number(turn) });
}

async function forget(agent) {
  const yes = await ask({ title: `Delete ${agent.id}?`, ok: "Delete", danger: true,
    text: `This deletes its ${plural(agent.n_tokens, "token")} (${bytes(agent.n_bytes)}) from disk, except blocks that other agents use. It cannot be undone.` });
  if (yes) {
    const { removed_blocks: n } = await remove(path(agent));
    say(`${agent.id} deleted, with ${plural(n, "block")}.`);
  }
}

async function download(agent) {
  say(`Preparing the export of ${agent.id}.`);
  let next = 0;
  const bundle = await file(path(agent, "export"), (n) => {
    if (Date.now() < next) return;
    next = Date.now() + 1000;
    say(`Exporting ${agent.id}: ${bytes(n)} of up to about ${bytes(agent.n_bytes)}.`); // other branches stay here
  });
  const url = URL.createObjectURL(bundle);
  h("a", { href: url, download: `${agent.id}.tar` }).click();
  say(`${agent.id} exported, ${bytes(bundle.size)}.`);
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
  else byId("ask-ok").focus(); // Enter confirms
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const answer = label === null ? "yes" : input.value.trim();
      resolve(dialog.returnValue === "ok" ? answer : null);
    }, { once: true });
  });
}
