// Checking every record, and what another budget would have done.

import { post } from "./api.js";
import { byId, h, put, table } from "./dom.js";
import { ago, bytes, count, percent, seconds, short } from "./format.js";

const COLUMNS = [
  { name: "Disk budget" }, { name: "Found", number: true }, { name: "Against now", number: true },
  { name: "Time", number: true },
];

let admin = false;
let reading = false;

export function start() {
  byId("verify").addEventListener("click", verify);
}

// Only the admin key may verify; to others the button says why it does nothing.
export function allow(isAdmin) {
  admin = isAdmin;
  byId("verify").disabled = !admin || reading;
  byId("verify-why").hidden = admin;
}

async function verify() {
  reading = true;
  allow(admin);
  byId("verified").textContent = "Every record is being read…";
  try {
    const { records, n_bytes: size, bad } = await post("/v1/cache/verify");
    byId("verified").textContent = bad.length
      ? `${count(bad.length)} of ${count(records)} records are damaged; each is a miss and is set aside when it is met: ${bad.map((one) => one.record.slice(0, 10)).join(", ")}.`
      : `All ${count(records)} records (${bytes(size)}) are whole.`;
  } catch (error) {
    byId("verified").textContent = error.message;
  }
  reading = false;
  allow(admin);
}

export function whatIf(found) {
  if (!found.looks) {
    put("what-if", h("p", { class: "quiet" }, "Nothing was looked up yet that fills a block of 256 tokens."));
    return;
  }
  const rows = found.outcomes.map((one) => [
    one.max_bytes === null ? "no limit" : `${bytes(one.max_bytes)}${one.max_bytes === found.max_bytes ? " (now)" : ""}`,
    `${short(one.found_tokens)} tokens (${percent(one.found_tokens, found.asked_tokens)})`,
    one.max_bytes === found.max_bytes ? "–" : signed(one.more_tokens, short),
    one.max_bytes === found.max_bytes ? "–" : signed(one.more_seconds, (s) => seconds(s)),
  ]);
  put("what-if", h("p", { class: "quiet" },
    `${count(found.looks)} look-ups since ${ago(found.since)}, played again, the least recently used let go first.`),
    table("Outcome by disk budget", COLUMNS, rows));
}

function signed(n, words) {
  return n === 0 ? "the same" : `${n > 0 ? "+" : "−"}${words(Math.abs(n))}`;
}
