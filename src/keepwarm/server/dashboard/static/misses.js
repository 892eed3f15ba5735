// Requests that recomputed known tokens, and where each diverged from an earlier prompt.

import { diff } from "./diff.js";
import { agentName, empty, h, put } from "./dom.js";
import { ago, count, plural, seconds } from "./format.js";

const FEW = 8;
const BEFORE = 24; // tokens shown before the difference
let shown = "";

export function show({ data }) {
  const now = JSON.stringify(data.map(({ number, when, text }) => [number, when, Boolean(text)]));
  if (now === shown && data.length) return renew(data); // keep what the reader has opened
  shown = now;
  put("missed", data.length ? list(data) : empty("No misses: only new tokens were computed."));
}

function renew(data) {
  document.querySelectorAll("#missed .agent").forEach((name, index) => name.replaceWith(nameOf(data[index])));
}

const nameOf = (miss) => agentName(miss, `#${miss.number}`, ago(miss.when));

function list(data) {
  const few = h("ul", { class: "misses" }, data.slice(0, FEW).map(item));
  const rest = data.slice(FEW);
  const more = h("button", { type: "button", onclick: () => more.replaceWith(h("ul", { class: "misses" }, rest.map(item))) },
    `Show ${count(rest.length)} more`);
  return rest.length ? [few, more] : [few];
}

// What changed is moved or, where rules know its lines, scrubbed; what was evicted is kept.
function cure({ reason, stored }) {
  if (reason === "changed") {
    return ["Put what changes with every request at the end of the prompt. Lines that known clients add, and the date, are removed by ",
      h("code", {}, 'scrub = "all"'), " in config.toml (docs/prompts.md)."];
  }
  const pin = stored ? [", or ", h("code", {}, `keepwarm cache set ${stored} --pin`)] : [];
  return ["To keep it, raise ", h("code", {}, "disk_bytes"), " in config.toml", ...pin, "."];
}

function item(miss) {
  const why = miss.reason === "changed"
    ? `The prompt changed at token ${count(miss.position)} of ${count(miss.prompt_tokens)}.`
    : `Tokens from ${count(miss.position)} on were known but no longer stored.`;
  const details = h("details", {}, h("summary", {}, "Show the difference"), h("div", { class: "difference" }));
  details.addEventListener("toggle", () => details.open && put(details.lastElementChild, texts(miss)));
  return h("li", {},
    h("div", { class: "row" },
      nameOf(miss),
      h("span", { class: "cost" }, `${plural(miss.wasted, "token")} recomputed, ${seconds(miss.seconds)}`)),
    h("p", {}, why, h("span", { class: "quiet" }, ` ${plural(miss.restored, "token")} ${miss.restored === 1 ? "was" : "were"} warm.`)),
    h("p", { class: "quiet" }, cure(miss)), miss.text ? details : null);
}

function texts({ text: { before, earlier, now }, reason, position }) {
  const opening = h("span", { class: "quiet" }, position > BEFORE ? "…" : "", before);
  if (reason !== "changed") return h("pre", {}, opening, h("mark", {}, now), "…");
  const parts = whole(diff(earlier, now)).map(({ kind, text }) => (kind === "same" ? text : h(kind, {}, text)));
  return [
    h("pre", {}, opening, parts, "…"),
    h("p", { class: "quiet" }, h("del", {}, "before"), " ", h("ins", {}, "now"),
      " – only the text before the first change could be reused."),
  ];
}

// Both texts are cut off, at different words: that is not a change. If less than a third is the
// same, show both texts whole instead of a word-by-word diff.
function whole(parts) {
  const of = (kind) => parts.filter((part) => part.kind === kind || part.kind === "same");
  const text = (some) => some.map((part) => part.text).join("");
  const same = parts.filter(({ kind }) => kind === "same");
  const [known, all] = [same, of("ins")].map((some) => text(some).replace(/\s/g, "").length);
  if (known < all / 3) {
    return [{ kind: "del", text: text(of("del")) }, { kind: "same", text: "\n" }, { kind: "ins", text: text(of("ins")) }];
  }
  const last = parts.findLastIndex(({ kind }) => kind === "same");
  return parts.findIndex(({ kind }) => kind !== "same") < last ? parts.slice(0, last + 1) : parts;
}
