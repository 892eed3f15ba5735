// A small chat: the next message of an agent, or the first of a new one.

import { stream } from "./api.js";
import { byId, h, put, say } from "./dom.js";
import { count, percent, spared } from "./format.js";

const MAX_TOKENS = 2048; // of thoughts and answer
let known = new Map(); // models of agents, by id; "" if it has another name now
let controller = null;
let changed = () => {};

export function start(onChange) {
  changed = onChange;
  byId("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    const chooses = event.isComposing || event.keyCode === 229; // a word of an input method; Safari has only the code
    if (event.key !== "Enter" || event.shiftKey || chooses) return;
    event.preventDefault();
    send();
  });
  byId("chat-stop").addEventListener("click", () => controller?.abort());
  byId("chat-agent").addEventListener("change", clear);
}

export function offer(agents) {
  known = new Map(agents.map(({ id, model, is_served }) => [id, is_served ? model : ""]));
  put("chat-agents", agents.map((agent) => h("option", { value: agent.id })));
}

// Opens the chat with this agent.
export function open(id) {
  byId("chat-agent").value = id;
  clear();
  byId("chat-text").focus();
}

function clear() {
  byId("chat-said").replaceChildren();
  byId("chat-receipt").textContent = "";
}

async function send() {
  const [agent, text] = [byId("chat-agent").value.trim(), byId("chat-text").value.trim()];
  if (!text || controller) return;
  if (!agent) return say("Choose an agent, or type a new name.");
  byId("chat-text").value = "";
  line("you", h("span", { class: "text" }, text));
  const answer = { thought: h("span", { class: "thought quiet" }), text: h("span", { class: "text" }) };
  line(agent, answer.thought, answer.text);
  busy(new AbortController());
  try {
    await read(agent, text, answer);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
  busy(null);
  changed();
}

// A known agent gets only the new message; the server has the rest.
async function read(agent, text, answer) {
  const path = known.has(agent) ? `/v1/agents/${encodeURIComponent(agent)}/chat/completions` : "/v1/chat/completions";
  let model = known.get(agent) || undefined; // else the default
  const body = { model, messages: [{ role: "user", content: text }], max_tokens: MAX_TOKENS, stream: true, keepwarm: { agent } };
  for await (const event of stream(path, body, controller.signal)) {
    if (event.error) throw new Error(event.error.message);
    model = event.model ?? model;
    const delta = event.choices?.[0]?.delta;
    answer.thought.append(delta?.reasoning ?? "");
    answer.text.append(delta?.content ?? "");
    if (event.keepwarm) receipt(event.keepwarm);
  }
  known.set(agent, model);
}

function receipt({ prompt_tokens: whole, recomputed, saved_ms: ms }) {
  const warm = whole - recomputed;
  byId("chat-receipt").textContent = `${count(warm)} of ${count(whole)} prompt tokens warm (${percent(warm, whole)})`
    + (ms === 0 ? "." : `; ${spared(ms)}.`);
}

function busy(value) {
  controller = value;
  byId("chat-send").disabled = value !== null;
  byId("chat-stop").disabled = value === null;
}

function line(who, ...said) {
  byId("chat-said").append(h("p", {}, h("strong", {}, who), " ", ...said));
}
