// Requests that computed again what was known, each with the place where it parted.

import { get } from "./api.js";
import { diff } from "./diff.js";
import { h, put, say } from "./dom.js";
import { ago, count, seconds } from "./format.js";

const FEW = 8;
const BEFORE = 24; // tokens that are shown before the place
const places = new Map(); // texts that were asked for, by number
let shown = "";

export function show({ data }) {
  const now = JSON.stringify(data.map((miss) => miss.number));
  if (now === shown && data.length) return; // nothing new; whoever reads is not disturbed
  shown = now;
  put("missed", data.length ? list(data) : h("p", { class: "quiet" }, "None: every prompt cost only what was new in it."));
}

function list(data) {
  const few = h("ul", { class: "misses" }, data.slice(0, FEW).map(item));
  const rest = data.slice(FEW);
  const more = h("button", { type: "button", onclick: () => more.replaceWith(h("ul", { class: "misses" }, rest.map(item))) },
    `Show ${count(rest.length)} more`);
  return rest.length ? [few, more] : [few];
}

function item(miss) {
  const why = miss.reason === "changed"
    ? `The prompt changed at token ${count(miss.position)} of ${count(miss.prompt_tokens)}.`
    : `From token ${count(miss.position)} on it was known and no longer kept.`;
  const details = h("details", {}, h("summary", {}, "Show the place"), h("div", { class: "place" }));
  details.addEventListener("toggle", () => details.open && open(miss, details.lastElementChild));
  return h("li", {},
    h("div", { class: "row" },
      h("span", {}, `#${miss.number} `, h("strong", {}, miss.agent ?? ""),
        miss.key ? h("span", { class: "quiet" }, ` key ${miss.key}`) : "",
        h("span", { class: "quiet" }, ` ${ago(miss.when)}`)),
      h("span", { class: "cost" }, `${count(miss.again)} tokens again, ${seconds(miss.seconds)}`)),
    h("p", {}, why, h("span", { class: "quiet" }, ` ${count(miss.restored)} tokens were warm.`)),
    miss.text ? details : null);
}

async function open(miss, place) {
  try {
    if (!places.has(miss.number)) places.set(miss.number, await get(`/v1/dashboard/misses/${miss.number}`));
    put(place, texts(places.get(miss.number), miss));
  } catch (error) {
    say(error.message);
  }
}

function texts({ before, earlier, now }, { reason, position }) {
  const opening = h("span", { class: "quiet" }, position > BEFORE ? "…" : "", before);
  if (reason !== "changed") return h("pre", {}, opening, h("mark", {}, now), "…");
  const parts = whole(diff(earlier, now)).map(({ kind, text }) => (kind === "same" ? text : h(kind, {}, text)));
  return [
    h("pre", {}, opening, parts, "…"),
    h("p", { class: "quiet" }, h("del", {}, "before"), " ", h("ins", {}, "now"),
      " — what stands before the first change could be used, nothing after it."),
  ];
}

// Both texts are cut off somewhere, and not at the same word: that is no change. Where hardly a
// word is the same, the words in between would only confuse.
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
