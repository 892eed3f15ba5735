// Activity: requests with their receipts, speed, memory.

import { byId, h, put, svg, table, tile } from "./dom.js";
import { ago, bytes, count, percent, seconds, short, sum } from "./format.js";

const MEMORY = { live: "Live caches", memory: "Blocks in memory", batch: "Running requests", buffers: "MLX buffers" };
const STATES = { reading: "prefilling", answering: "decoding" }; // other states are shown as they are
const WINDOW = 6; // snapshots that speed is measured over
const SPEEDS = 120; // points drawn
const ENDED = 6;
const REQUESTS = [
  { name: "Request" }, { name: "State" }, { name: "Prompt" }, { name: "Answer", number: true },
  { name: "First token", number: true }, { name: "Time", number: true },
];

const snapshots = [];
const speeds = [];

export function show(now) {
  byId("model").textContent = now.model;
  keep(snapshots, now, WINDOW);
  const answers = speed("generated_tokens");
  const prompts = speed("prefilled_tokens");
  keep(speeds, { answers, prompts }, SPEEDS);
  const others = sum(now.others);
  const answering = now.running.filter((one) => one.state !== "waiting").length;
  const note = others ? `and ${others} of other keys` : "";
  put("now-tiles",
    tile("Running", count(answering), note),
    tile("Queued", count(now.running.length - answering)),
    tile("Decode", words(answers), "tokens per second"),
    tile("Prefill", words(prompts), "tokens per second"));
  put("running", now.running.length ? requests("Active requests", now.running, now)
    : h("p", { class: "quiet" }, "No active requests."));
  put("ended", now.ended.length ? requests("Recent requests", now.ended.slice(0, ENDED), now)
    : h("p", { class: "quiet" }, "No requests yet. Send one to see its receipt here."));
  put("memory", (now.memory ?? []).map(meter));
  put("speeds", spark("answers", "Decode", "live"), spark("prompts", "Prefill", "computed"));
}

function keep(list, value, most) {
  list.push(value);
  if (list.length > most) list.shift();
}

function speed(counter) {
  const first = snapshots[0];
  const last = snapshots[snapshots.length - 1];
  if (first[counter] === null || last[counter] === null) return null; // hidden from this key
  const passed = last.time - first.time;
  const more = last[counter] - first[counter];
  return passed > 0 && more >= 0 ? more / passed : null;
}

const words = (rate) => (rate === null ? "–" : short(rate));

function spark(name, title, kind) {
  const [width, height] = [300, 46];
  const values = speeds.map((each) => each[name] ?? 0);
  const most = Math.max(...values, 1);
  const step = width / (SPEEDS - 1);
  const at = (value, index) => [width - (values.length - 1 - index) * step, height - 1 - (value / most) * (height - 4)];
  const line = values.map((value, index) => at(value, index).map((n) => n.toFixed(1)).join(",")).join(" ");
  const text = `${title}: at most ${short(most)} tokens per second in the last two minutes`;
  return h("div", { class: "spark" },
    h("div", { class: "row" }, h("span", {}, title), h("span", { class: "quiet" }, `peak ${short(most)}`)),
    svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": text },
      svg("line", { class: "grid", x1: 0, x2: width, y1: height - 1, y2: height - 1 }),
      svg("polyline", { class: `speed ${kind}`, points: line })));
}

function requests(caption, list, now) {
  return table(caption, REQUESTS, list.map((one) => [
    [h("span", { class: "quiet" }, `#${one.number} `), h("strong", {}, one.agent ?? ""), one.key ? h("span", { class: "quiet" }, ` key ${one.key}`) : "",
      one.request_id ? h("span", { class: "quiet" }, ` ${one.request_id}`) : ""],
    [h("span", { class: `state ${one.state}`, title: one.error || null }, STATES[one.state] ?? one.state),
      one.ended ? h("span", { class: "quiet" }, ` ${ago(one.ended, now.time)}`) : ""],
    receipt(one),
    count(one.answer_tokens),
    one.ttft_ms === null ? "–" : seconds(one.ttft_ms / 1000),
    seconds(one.seconds),
  ]));
}

export function receipt(one) {
  if (!one.receipt) return `${count(one.prompt_tokens)} tokens`;
  const { reused, recomputed, prompt_tokens: whole, saved_ms: saved, inexact = [] } = one.receipt;
  const parts = [...Object.entries(reused), ["computed", recomputed]].filter(([, n]) => n);
  const warm = whole - recomputed;
  const details = parts.map(([tier, n]) => `${tier} ${count(n)}`).join(", ");
  return h("div", { class: "receipt", title: details },
    stack(parts, whole),
    h("span", {}, `${count(warm)} of ${count(whole)} warm (${percent(warm, whole)})`),
    h("span", { class: "quiet" }, [` ${details}`, saved ? `; saved ${seconds(saved / 1000)}` : "",
      ...inexact.map((reason) => `; ${reason}`)].join("")));
}

function stack(parts, whole) {
  const bars = parts.map(([tier, n]) => {
    const bar = h("span", { class: `fill ${tier}` });
    bar.style.width = `${(100 * n) / whole}%`;
    return bar;
  });
  return h("span", { class: "stack", "aria-hidden": "true" }, bars);
}

function meter({ budget, n_bytes: used, max_bytes: limit }) {
  const share = limit ? Math.min(1, used / limit) : 0;
  const bar = h("span", { class: `fill ${budget}` });
  bar.style.width = `${100 * share}%`;
  const name = MEMORY[budget] ?? budget;
  return h("div", { class: "meter" },
    h("div", { class: "row" }, h("span", {}, name),
      h("span", { class: "quiet" }, limit ? `${bytes(used)} of ${bytes(limit)}` : bytes(used))),
    h("div", { class: "stack", role: "meter", "aria-label": name, "aria-valuemin": 0,
      "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share) }, bar));
}
