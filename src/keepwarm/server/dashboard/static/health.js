// Faults, verifying records, and the settings in force.

import { stream } from "./api.js";
import { byId, empty, h, hide, put, table } from "./dom.js";
import { bytes, count, percent } from "./format.js";

const HEALTH = {
  quarantined: "damaged records quarantined",
  bad_shared: "damaged records in shared tiers",
  read_errors: "records that could not be read",
  dropped_saves: "saves dropped",
  failed_saves: "saves failed",
  failed_restores: "restores failed",
  evicted: "evictions",
  audits: "audits",
  drifts: "audits that differed",
};
const HARMLESS = new Set(["evicted", "audits"]);
const SETTINGS = [{ name: "Setting" }, { name: "Value" }, { name: "Default" }];

let admin = false;
let verifying = false;
let known = []; // settings

export function start() {
  byId("verify").addEventListener("click", verify);
  byId("changed-only").addEventListener("change", renderSettings);
}

// Only the admin key may verify; for other keys the page says so.
export function allow(isAdmin) {
  admin = isAdmin;
  const disabled = !admin || verifying;
  if (byId("verify").disabled !== disabled) byId("verify").disabled = disabled;
  hide(byId("verify-why"), admin);
}

async function verify() {
  verifying = true;
  allow(admin);
  tell("Checking every record…");
  try {
    for await (const event of stream("/v1/cache/verify", { stream: true })) tell(words(event));
  } catch (error) {
    tell(error.message);
  }
  verifying = false;
  allow(admin);
}

function tell(text) {
  byId("verified").textContent = text;
}

function words({ object, error, records, n_bytes: size, total_bytes: total, bad }) {
  if (error) return error.message;
  if (total === 0) return "Checking every record…"; // it has just begun
  if (object === "cache.verify.progress") return `Checked ${bytes(size)} of ${bytes(total)} (${percent(size, total)}).`;
  if (bad.length) {
    const names = bad.map((one) => one.record.slice(0, 10)).join(", ");
    return `${count(bad.length)} of ${count(records)} records are damaged; each counts as a miss and is quarantined when it is read: ${names}.`;
  }
  return records === 1 ? `The one record (${bytes(size)}) is intact.` : `All ${count(records)} records (${bytes(size)}) are intact.`;
}

export function counts({ health }) {
  put("health-list", Object.entries(HEALTH).flatMap(([key, name]) =>
    [h("dt", {}, name), h("dd", { class: health[key] && !HARMLESS.has(key) ? "wrong" : null }, count(health[key]))]));
}

export function settings({ data }) {
  known = data;
  renderSettings();
}

const readable = ({ name }, value) => (value && name.endsWith("_bytes") ? bytes(Number(value)) : value || "–");

function renderSettings() {
  const found = known.filter((one) => one.changed || !byId("changed-only").checked);
  put("settings", found.length ? table("Active settings", SETTINGS, found.map((one) =>
    [h("code", {}, one.name), h(one.changed ? "strong" : "span", {}, readable(one, one.value)), readable(one, one.default)]))
    : empty("Every setting has its default."));
}
