// Shows one view at a time, by the hash of the address, and keeps it up to date.
//
// `now` is asked for every second while requests run, else every three or five; where bars grow, five times a second. It carries a revision: what a
// view shows is asked for again only if that has changed. Nothing is asked for while hidden.

import * as agents from "./agents.js";
import { Failed, get, key, Refused } from "./api.js";
import * as chat from "./chat.js";
import * as connect from "./connect.js";
import { byId, closeButtons, hide } from "./dom.js";
import * as forest from "./forest.js";
import * as health from "./health.js";
import * as misses from "./misses.js";
import * as models from "./models.js";
import * as now from "./now.js";
import * as overview from "./overview.js";
import * as requests from "./requests.js";

const SECOND = 1000;
const GROWING = SECOND / 5;
const BUSY = SECOND;
const IDLE = 3 * SECOND; // an idle page costs its browser a third of a per cent of a core
const LONG_IDLE = 5 * SECOND; // after `MANY` answers without a change
const MANY = 20;
const MODEST = 4; // times as long as an answer took, until it is asked for again
const PAUSE = 30 * SECOND; // after the key dialog was cancelled
const AGES = 30 * SECOND; // after which "5 min ago" is written anew
const OLD_NAMES = { now: "overview", saved: "overview" };

let hours = 1;
let chose = false; // else a server that is younger than an hour is shown from its start
let sums = false; // whether this key may see totals over all keys
let needsKey = false; // whether requests need one
let refused = false;
let busy = false;
let revision = "";
let timer = 0;
let beating = false;
let unchanged = 0; // answers in a row
let refreshes = 0;

// `least`: seconds between two requests; `most`: seconds after which it is asked for in any case
const first = source({ path: () => "/v1/dashboard/now", show: showNow });
const saved = source({ least: 5, most: 60, sums: true, path: () => `/v1/dashboard/saved?hours=${hours === overview.SINCE ? `${overview.hoursSince(saved.data)}&since_start=true` : hours}`, show: showSaved });
const VIEWS = {
  overview: [saved],
  requests: [source({ least: 1, path: () => "/v1/dashboard/requests", show: requests.show })],
  forest: [source({ least: 1, urgent: forest.isBehind, path: () => "/v1/dashboard/forest", show: forest.show })],
  misses: [source({ least: 3, path: () => "/v1/dashboard/misses", show: misses.show })],
  agents: [source({ least: 3, path: () => "/v1/dashboard/agents", show: showAgents })],
  models: [source({ least: 1, most: 2, path: () => "/v1/dashboard/models", show: models.show })],
  health: [saved,
    source({ least: 3, sums: true, path: () => "/v1/dashboard/settings", show: health.settings })],
  connect: [source({ least: 3, path: () => `/v1/dashboard/connect${connect.query()}`, show: connect.show, failed: connect.reset })],
};
let view = "";

function source(options) {
  return { least: 0, most: Infinity, urgent: () => false, failed: () => {}, took: 0, revision: null, data: null, text: "", asked: -Infinity, shown: 0, ...options };
}

function showNow(data) {
  now.show(data);
  requests.running(data);
  forest.running(data.running);
  health.allow(data.viewer.admin);
  models.allow(data.viewer);
  overview.condition(data.condition);
  sums = data.viewer.sums;
  needsKey = data.viewer.key_needed;
  hide(byId("use-key"), !data.viewer.keys);
  busy = data.running.length > 0 || Object.keys(data.others).length > 0;
  for (const part of document.querySelectorAll("[data-sums]")) hide(part, part.dataset.sums !== String(sums));
}

function showSaved(data) {
  if (!chose && hours !== overview.SINCE && overview.hoursSince(data) === 1) {
    hours = overview.SINCE;
    saved.revision = null; // asked for again: this answer has latencies of before
  }
  overview.show(data, hours, choose, needsKey);
  health.counts(data);
}

function showAgents(data) {
  agents.show(data);
  chat.offer(data.data.filter((agent) => agent.key === null));
}

function choose(value) {
  [hours, chose] = [value, true];
  saved.text = ""; // the same figures are drawn otherwise
  refresh();
}

// Views

function named(hash) {
  const name = hash.slice(1).split("/")[0];
  return VIEWS[name] ? name : OLD_NAMES[name] ?? "overview";
}

function open(focus) {
  view = named(location.hash);
  for (const name of Object.keys(VIEWS)) byId(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "overview" ? "Keepwarm" : `${byId(`${view}-title`).textContent} – Keepwarm`;
  if (focus) {
    byId(view).focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  if (view === "forest") forest.resume();
  beat();
}

// Data

function refresh() {
  refreshes += 1;
  for (const each of [first, ...Object.values(VIEWS).flat()]) each.asked = -Infinity;
  for (const each of Object.values(VIEWS).flat()) each.revision = null;
  beat();
}

async function beat() {
  clearTimeout(timer);
  if (document.hidden || byId("key-dialog").open || beating) return;
  beating = true;
  let isUp = false;
  try {
    isUp = await load(first);
    if (isUp && !document.hidden) await Promise.all(VIEWS[view].filter(isDue).map(load));
    for (const each of VIEWS[view]) if (each.data !== null && isOld(each)) draw(each);
  } finally { // a view that cannot be drawn stops no other
    beating = false;
    timer = setTimeout(beat, refused ? PAUSE : view === "forest" && forest.isGrowing() ? GROWING : busy || (view === "models" && models.isBusy()) ? BUSY : unchanged < MANY ? IDLE : LONG_IDLE);
  }
  if (isUp && VIEWS[view].some((each) => each.revision === null && (sums || !each.sums))) setTimeout(beat, 0);
}

function isDue(each) {
  if (each.sums && !sums) return false;
  const age = (performance.now() - each.asked) / SECOND;
  const least = MODEST * each.took;
  if (each.urgent() && age >= least) return true;
  return each.revision === null || age >= Math.max(least, each.most) || (each.revision !== revision && age >= Math.max(least, each.least));
}

async function load(each) {
  each.asked = performance.now();
  each.revision = revision;
  try {
    const asked = refreshes;
    const data = await get(each.path());
    each.took = (performance.now() - each.asked) / SECOND;
    if (refreshes === asked) render(each, data); // else it is older than the change, or another key's
    refused = false;
    if (each === first) {
      unchanged = revision === data.revision ? unchanged + 1 : 0;
      revision = data.revision;
      if (!document.hidden) status("Live", "live");
    }
    return true;
  } catch (error) {
    refused = error instanceof Refused;
    if (refused) askKey(key.get() ? "The server does not accept this key." : "");
    else status(error.message, "wrong");
    if (!refused) each.failed();
    if (!refused && !(error instanceof Failed)) console.error(error); // a bug in this page
    each.revision = ""; // so that it is asked for again
    return false;
  }
}

// What has not changed is not drawn again, except that ages are written anew.
function render(each, data) {
  const text = JSON.stringify(data);
  if (text === each.text && each !== first) return; // speeds change without new data
  each.text = text;
  each.data = data;
  draw(each);
}

const isOld = (each) => performance.now() - each.shown > AGES;

function draw(each) {
  each.shown = performance.now();
  each.show(each.data);
}

function status(text, kind) {
  const element = byId("status");
  if (element.textContent !== text) element.textContent = text;
  if (element.className !== `status ${kind}`) element.className = `status ${kind}`;
}

// The key

function askKey(wrong) {
  const dialog = byId("key-dialog");
  if (refused) status("API key required", "wrong");
  if (dialog.open) return;
  byId("key-wrong").textContent = wrong;
  byId("key-input").value = "";
  dialog.returnValue = "";
  dialog.showModal();
}

function onKeyGiven() {
  if (byId("key-dialog").returnValue === "ok") {
    key.set(byId("key-input").value.trim());
    sums = refused = false;
    refresh();
  } else if (refused) timer = setTimeout(beat, PAUSE);
  else beat();
}

function onHidden() {
  if (document.hidden) {
    clearTimeout(timer);
    status("Paused", "paused");
  } else refresh();
}

byId("use-key").addEventListener("click", () => askKey(""));
byId("key-dialog").addEventListener("close", onKeyGiven);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId(view).focus();
});
document.addEventListener("visibilitychange", onHidden);
addEventListener("hashchange", () => open(true));
closeButtons();
agents.start(refresh);
chat.start(refresh);
connect.start(refresh);
forest.start();
health.start();
models.start(refresh);
requests.start(refresh);
open(false);
