// What runs at this moment: tiles, and memory by budget.

import { byId, fill, h, put, tile } from "./dom.js";
import { bytes, count, plural, short, sum } from "./format.js";

const MEMORY = { live: "Live caches", memory: "Blocks in memory", batch: "Running requests", buffers: "MLX buffers", disk: "Blocks on disk", weights: "Weights of all loaded models" };
const WINDOW_S = 6; // that speed is measured over

const snapshots = [];

export function show(now) {
  showModels(now.models);
  while (snapshots.length && now.time - snapshots[0].time > 2 * WINDOW_S) snapshots.shift(); // the tab slept
  snapshots.push(now);
  while (snapshots.length > 2 && now.time - snapshots[1].time > WINDOW_S) snapshots.shift();
  const others = sum(now.others);
  const waiting = now.running.filter((one) => one.state === "waiting").length;
  put("now-tiles",
    tile("Running", count(now.running.length - waiting), others ? `and ${others} of other keys` : `${waiting} queued`),
    tile("Decode", words(speed("generated_tokens")), `tokens/s now${fromDrafts()}`),
    tile("Prefill", words(speed("prefilled_tokens")), "tokens/s now"));
  put("memory", (now.memory ?? []).map(meter));
}

// The default, and how many more; their names are in its title.
function showModels(models) {
  const names = models.map(({ name, loaded }) => (loaded ? name : `${name} (not loaded)`));
  const element = byId("model");
  const text = names.length > 1 ? `${names[0]} and ${plural(names.length - 1, "more model")}` : names[0];
  const title = names.join("\n");
  if (element.textContent !== text) element.textContent = text;
  if (element.title !== title) element.title = title;
}

function speed(counter) {
  const [first, last] = [snapshots[0], snapshots.at(-1)];
  if (first[counter] === null || last[counter] === null) return null; // hidden from this key
  const passed = last.time - first.time;
  const more = last[counter] - first[counter];
  return passed > 0 && more >= 0 ? more / passed : null;
}

// Tokens that steps gave beside their own, where there are any.
function fromDrafts() {
  const share = speed("accepted_tokens") / speed("generated_tokens");
  return share > 0 ? `, ${Math.round(100 * share)} % from drafts` : "";
}

const words = (rate) => (rate === null ? "–" : short(rate));

export function meter({ budget, n_bytes: used, max_bytes: limit }) {
  const share = limit ? Math.min(1, used / limit) : 0;
  const name = MEMORY[budget] ?? budget;
  return h("div", { class: "meter" },
    h("div", { class: "row" }, h("span", {}, name),
      h("span", { class: "quiet" }, limit ? `${bytes(used)} of ${bytes(limit)}` : bytes(used))),
    h("div", { class: "stack", role: "meter", "aria-label": name, "aria-valuemin": 0,
      "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share) }, fill(budget, share)));
}
