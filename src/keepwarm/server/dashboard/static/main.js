// Polls the server while the page is visible, and asks for a key where one is needed.

import * as agents from "./agents.js";
import { Failed, get, key, Refused } from "./api.js";
import { byId } from "./dom.js";
import * as forest from "./forest.js";
import * as health from "./health.js";
import * as misses from "./misses.js";
import * as now from "./now.js";
import * as saved from "./saved.js";

const SECOND = 1000;
const PAUSE = 30 * SECOND; // after the key dialog was cancelled
let hours = 1;
let sums = false; // whether this key may see totals over all keys
let refused = false;

const tasks = [
  { every: 1, path: () => "/v1/dashboard/now", show: showNow },
  { every: 5, sums: true, path: () => `/v1/dashboard/saved?hours=${hours}`, show: (data) => saved.show(data, choose) },
  { every: 5, path: () => "/v1/dashboard/misses", show: misses.show },
  { every: 3, path: () => "/v1/agents", show: agents.show },
  { every: 5, path: () => "/v1/dashboard/forest", show: forest.show },
  { every: 30, sums: true, path: () => "/v1/dashboard/what-if", show: health.whatIf },
].map((task) => ({ ...task, due: 0, running: false }));

function showNow(data) {
  now.show(data);
  health.allow(data.viewer.admin);
  sums = data.viewer.sums;
  for (const part of document.querySelectorAll("[data-sums]")) part.hidden = part.dataset.sums !== String(sums);
}

function choose(value) {
  hours = value;
  refresh();
}

function refresh() {
  for (const task of tasks) task.due = 0;
  tick();
}

function tick() {
  if (document.hidden || byId("key-dialog").open) return;
  for (const task of tasks) {
    if (!task.running && Date.now() >= task.due && (sums || !task.sums)) run(task);
  }
}

async function run(task) {
  task.running = true;
  task.due = Date.now() + task.every * SECOND;
  try {
    const asked = key.get();
    const data = await get(task.path());
    if (key.get() === asked) task.show(data);
    else task.due = 0; // the key was changed meanwhile
    refused = false;
    if (task === tasks[0]) status("Live", "live");
  } catch (error) {
    refused = error instanceof Refused;
    if (refused) askKey(key.get() ? error.message : "");
    else status(error.message, "wrong");
    if (!refused && !(error instanceof Failed)) console.error(error); // a bug in this page
  } finally {
    task.running = false;
  }
}

function status(text, kind) {
  const element = byId("status");
  if (element.textContent !== text) element.textContent = text;
  element.className = `status ${kind}`;
}

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
    sums = false;
    refresh();
  } else if (refused) {
    for (const task of tasks) task.due = Date.now() + PAUSE;
  }
}

function onHidden() {
  if (document.hidden) status("Paused", "paused");
  else refresh();
}

byId("use-key").addEventListener("click", () => askKey(""));
byId("key-dialog").addEventListener("close", onKeyGiven);
document.addEventListener("visibilitychange", onHidden);
agents.start(refresh);
forest.start();
health.start();
setInterval(tick, SECOND / 4);
tick();
