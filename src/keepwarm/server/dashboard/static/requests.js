// Requests with their receipts: running ones, which can be cancelled, and recent ones.

import { post } from "./api.js";
import { agentName, byId, details, empty, fill, h, pages, put, say, slice, table } from "./dom.js";
import { ago, count, GAP, percent, plural, seconds, spared } from "./format.js";

const PAGE = 20;
const COLUMNS = [
  { name: "Request" }, { name: "State" }, { name: "Prompt" }, { name: "Answer", number: true },
  { name: "First token", number: true }, { name: "Time", number: true }, { name: "" },
];
const state = { running: [], ended: [], page: 0, titles: new Map() };
let changed = () => {};

export function start(onChange) {
  changed = onChange;
  const renew = () => { state.page = 0; renderRunning(); renderEnded(); };
  byId("request-filter").addEventListener("input", renew);
  byId("request-state").addEventListener("change", renew);
}

export function running(now) {
  state.running = now.running;
  if (!byId("requests").hidden) renderRunning();
}

export function show({ data }) {
  state.ended = data.filter((one) => one.ended !== null);
  state.titles = new Map(data.map((one) => [nameOf(one), one.title]));
  renderRunning();
  renderEnded();
}

// The request as it is now: after a restart a row with the same number may keep its button.
const current = (shown) => state.ended.find(({ number }) => number === shown.number) ?? shown;

// Agents of two keys may have the same name; a running request comes without its title.
const nameOf = ({ key, agent }) => JSON.stringify([key, agent]);
const titleOf = (one) => one.title ?? state.titles.get(nameOf(one));

function renderRunning() {
  const found = state.running.filter(matches);
  put("running", found.length ? table("Active requests", COLUMNS, found.map(row))
    : empty(state.running.length ? "No active request matches." : "No active requests."));
}

function renderEnded() {
  const wanted = byId("request-state").value;
  const found = state.ended.filter((one) => matches(one) && (!wanted || wanted.split(" ").includes(one.state)));
  const { rows, page, n } = slice(found, state.page, PAGE);
  put("ended", rows.length ? table("Recent requests", COLUMNS, rows.map(row))
    : state.ended.length ? empty("No recent request matches; clear the filter.")
      : empty("No requests yet. Send one to see its receipt here: ", h("a", { href: "#connect" }, "Connect"), " has the lines to paste."));
  pages("ended-pages", page, n, (to) => { state.page = to; renderEnded(); });
}

function matches(one) {
  const wanted = byId("request-filter").value.trim().toLowerCase();
  return !wanted || [`#${one.number}`, one.agent, titleOf(one), one.request_id, one.key].some((text) => text?.toLowerCase().includes(wanted));
}

function row(one) {
  return [
    agentName({ ...one, title: titleOf(one) }, `#${one.number}`),
    [h("span", { class: `state ${one.state}`, title: one.error || null }, one.state),
      one.ended ? h("span", { class: "quiet" }, ` ${ago(one.ended)}`) : ""],
    receipt(one), count(one.answer_tokens), one.ttft_ms === null ? "–" : seconds(one.ttft_ms / 1000),
    seconds(one.seconds),
    one.ended ? h("button", { type: "button", "aria-label": `Details of #${one.number}`, onclick: () => open(current(one)) }, "Details")
      : h("button", { type: "button", "aria-label": `Cancel #${one.number}`, onclick: () => cancel(one) }, "Cancel"),
  ];
}

async function cancel(one) {
  try {
    const { cancelled } = await post(`/v1/dashboard/requests/${one.number}/cancel`);
    say(cancelled ? `#${one.number} is cancelled; what it computed is kept.` : `#${one.number} had ended.`);
  } catch (error) {
    say(error.message);
  }
  changed();
}

// While a prompt is prefilled the bar shows how far it is; then where its tokens came from.
function receipt(one) {
  if (!one.receipt) return one.error ? h("span", { class: "quiet" }, one.error) : plural(one.prompt_tokens, "token");
  const { reused, recomputed, prompt_tokens: whole, saved_ms: ms, inexact = [] } = one.receipt;
  const warm = Object.values(reused).reduce((n, some) => n + some, 0);
  const isPrefilling = one.state === "prefilling";
  const computed = isPrefilling ? one.prefilled : recomputed;
  const parts = [...Object.entries(reused), ["computed", computed]].filter(([, n]) => n);
  const places = parts.map(([tier, n]) => `${tier}${GAP}${count(n)}`).join(", ");
  const what = isPrefilling
    ? `${count(warm + computed)} of ${count(whole)} prefilled (${percent(warm + computed, whole)})`
    : `${count(warm)} of ${count(whole)} warm (${percent(warm, whole)})`;
  return h("div", { class: "receipt", title: places },
    h("span", { class: "stack", "aria-hidden": "true" }, parts.map(([tier, n]) => fill(tier, n / whole))), h("span", {}, what),
    h("span", { class: "quiet" }, [` ${places}`, ms === 0 || isPrefilling ? "" : `; ${spared(ms)}`,
      ...inexact.map((reason) => `; ${reason}`)].join("")));
}

// What the time to the first token went into, as far as it came.
function phases(one) {
  const parts = Object.entries(one.phases_ms).map(([name, ms]) => `${name.replace("_", " ")} ${seconds(ms / 1000)}`);
  return [one.ttft_ms === null ? "–" : seconds(one.ttft_ms / 1000), ...parts.length ? [parts.join(", ")] : []].join(": ");
}

function open(one) {
  const rate = one.tokens_per_second ? `${count(one.tokens_per_second)} tokens per second` : "–";
  const facts = [["Agent", one.agent ?? "–"], ...(one.title ? [["Title", one.title]] : []), ["State", one.status ? `${one.state} (${one.status})` : one.state], ["Request id", one.request_id || "–"],
    ["First token", phases(one)], ["Decode speed", rate], ...(one.error ? [["Error", one.error]] : [])];
  details(`Request #${one.number}`,
    h("dl", {}, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("h3", {}, "Receipt"), h("pre", {}, one.receipt ? JSON.stringify(one.receipt, null, 2) : "none: it was not looked up"),
    h("h3", {}, "Log line"), h("pre", {}, one.log ?? "No longer kept; see the server log."));
}
