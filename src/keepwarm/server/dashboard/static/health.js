// Verifying records, and the effect of other disk budgets.

import { post } from "./api.js";
import { byId, h, put, table } from "./dom.js";
import { ago, bytes, count, percent, seconds, short } from "./format.js";

const COLUMNS = [
  { name: "Disk budget" }, { name: "Reused", number: true }, { name: "Compared with now", number: true },
  { name: "Time saved", number: true },
];

let admin = false;
let verifying = false;

export function start() {
  byId("verify").addEventListener("click", verify);
}

// Only the admin key may verify; for other keys the page says so.
export function allow(isAdmin) {
  admin = isAdmin;
  byId("verify").disabled = !admin || verifying;
  byId("verify-why").hidden = admin;
}

async function verify() {
  verifying = true;
  allow(admin);
  byId("verified").textContent = "Checking every record…";
  try {
    const { records, n_bytes: size, bad } = await post("/v1/cache/verify");
    byId("verified").textContent = bad.length
      ? `${count(bad.length)} of ${count(records)} records are damaged; each counts as a miss and is quarantined when it is read: ${bad.map((one) => one.record.slice(0, 10)).join(", ")}.`
      : `All ${count(records)} records (${bytes(size)}) are intact.`;
  } catch (error) {
    byId("verified").textContent = error.message;
  }
  verifying = false;
  allow(admin);
}

export function whatIf(found) {
  if (!found.lookups) {
    put("what-if", h("p", { class: "quiet" }, "No lookups of a full 256-token block yet."));
    return;
  }
  const rows = found.outcomes.map((one) => [
    one.max_bytes === null ? "no limit" : `${bytes(one.max_bytes)}${one.max_bytes === found.max_bytes ? " (now)" : ""}`,
    `${short(one.found_tokens)} tokens (${percent(one.found_tokens, found.asked_tokens)})`,
    one.max_bytes === found.max_bytes ? "–" : signed(one.more_tokens, short),
    one.max_bytes === found.max_bytes ? "–" : signed(one.more_seconds, (s) => seconds(s)),
  ]);
  put("what-if", h("p", { class: "quiet" },
    `${count(found.lookups)} lookups since ${ago(found.since)}, replayed with least-recently-used eviction.`),
    table("Outcome by disk budget", COLUMNS, rows));
}

function signed(n, words) {
  return n === 0 ? "the same" : `${n > 0 ? "+" : "−"}${words(Math.abs(n))}`;
}
