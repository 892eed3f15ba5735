// Totals over all keys: latency, speed, where prompt tokens came from, answers, disk.

import { post } from "./api.js";
import { columns, legend, lines } from "./charts.js";
import { card } from "./connect.js";
import { byId, choice, empty, fill, h, hide, put, say, table, tile } from "./dom.js";
import { bytes, clock, count, percent, plural, saved as timeSaved, seconds, short } from "./format.js";
import { meter } from "./now.js";

const KEY = '-H "Authorization: Bearer $KEEPWARM_API_KEY" ';
const first = (needsKey) => `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' \\
  ${needsKey ? KEY : ""}-d '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}'`;
const HANDBOOK = Array.from({ length: 30 }, (_, n) => `Rule ${n + 1}: read the whole file before you change it, and say what you changed.`).join("\n");
const QUESTIONS = ["What is rule 7?", "Which rule is the last?", "Which rules matter most?"];
export const SINCE = "start"; // of the server, up to a day ago
const HOURS = [{ value: 1, name: "1 h" }, { value: 6, name: "6 h" }, { value: 24, name: "24 h" }, { value: SINCE, name: "Since start" }];
const of = (name) => (point) => point[name];
const SOURCES = [["live", "live caches"], ["memory", "memory"], ["disk", "disk"], ["shared", "other machines"], ["computed", "computed"]]
  .map(([kind, name]) => ({ kind, name, value: of(kind) }));
const LATENCIES = [{ kind: "p50", name: "median", value: of("ttft_p50_ms") }, { kind: "p95", name: "95th percentile", value: of("ttft_p95_ms") }];
const ANSWERS = [{ kind: "finished", name: "finished", value: of("finished") }, { kind: "cancelled", name: "cancelled", value: of("cancelled") },
  { kind: "failed", name: "failed", value: (point) => point.failed + point.refused }];

export function condition(found) {
  const level = found?.level ?? "green";
  const pill = byId("condition");
  hide(pill, level === "green");
  if (pill.className !== `condition ${level}`) pill.className = `condition ${level}`;
  if (level !== "green" && pill.textContent !== found.reasons[0]) pill.textContent = found.reasons[0];
  const whole = found?.reasons.join("\n") ?? "";
  if (pill.title !== whole) pill.title = whole;
  hide(byId("reasons"), level === "green");
  if (byId("reasons").classList.contains("red") !== (level === "red")) byId("reasons").classList.toggle("red");
  put("reasons", (found?.reasons ?? []).map((reason) => h("li", {}, reason)));
}

export const hoursSince = ({ started }) => Math.max(1, Math.min(24, Math.ceil((Date.now() / 1000 - started) / 3600)));

export function show(saved, chosen, choose, needsKey) {
  choice("hours", HOURS, chosen, choose);
  const { hours } = saved;
  const points = saved.points.filter(({ at }) => chosen !== SINCE || at + 60 * hours > saved.started);
  const isNew = saved.hit_rate === null && !points.some(answers);
  put("saved-tiles", isNew ? "" : tiles({ ...saved, points }));
  put("first-request", isNew ? card({ title: "Send a first request", notes: [], then: others() }, first(needsKey)) : "");
  for (const part of document.querySelectorAll("#overview .halves")) hide(part, isNew);
  const per = 60 * hours; // seconds of a point
  const decode = { kind: "decode", name: "decode", value: (point) => point.generated / per };
  const prefill = { kind: "computed", name: "prefill", value: (point) => point.prefilled / per };
  const chart = (place, used, make) => put(place, used ? make() : empty("No requests in this period."));
  chart("latency-chart", points.some((point) => point.ttft_p50_ms !== null), () =>
    [lines(points, LATENCIES, (ms) => seconds(ms / 1000), "Time to first token: median and 95th percentile"), legend(LATENCIES)]);
  chart("decode-chart", points.some(decode.value), () => columns(points, [decode], short, "Tokens decoded per second, by interval"));
  chart("prefill-chart", points.some(prefill.value), () => columns(points, [prefill], short, "Tokens prefilled per second, by interval"));
  const sources = sourcesOf(points);
  chart("hit-chart", points.some(tokens), () =>
    [columns(points, sources, short, `Share of prompt tokens by source, and their number; ${percent(...warm(points))} were not computed`, true),
      legend([...sources, { kind: "volume", name: "total tokens" }])]);
  chart("answer-chart", points.some(answers), () => [columns(points, ANSWERS, short, "Answers by outcome"), legend(ANSWERS)]);
  put("disk", meter(saved.disk));
  put("writes-chart", writesChart(saved.written_by_day));
  put("point-table", pointTable(points));
}

// What else a new server can be sent.
const others = () => ["Or ", h("button", { type: "button", onclick: ({ target }) => demo(target) }, "send demo traffic"),
  ": three agents that share a handbook, which is computed once (see ", h("a", { href: "#forest" }, "Forest"),
  "). ", h("a", { href: "#connect" }, "Connect"), " has the lines that start a coding agent."];

// The first request computes the handbook, all others reuse it.
async function demo(button) {
  button.disabled = true;
  try {
    for (const [n, content] of [...QUESTIONS, ...QUESTIONS].entries()) {
      const messages = [{ role: "system", content: HANDBOOK }, { role: "user", content }];
      await post("/v1/chat/completions", { messages, max_tokens: 16, keepwarm: { agent: `demo-${1 + (n % QUESTIONS.length)}` } });
    }
  } catch (error) {
    say(error.message);
    button.disabled = false;
  }
}

function tiles(saved) {
  const { today, total, points } = saved;
  const [failed, refused] = ["failed", "refused"].map((name) => points.reduce((n, point) => n + point[name], 0));
  const all = points.reduce((n, point) => n + answers(point), 0);
  const written = saved.written_by_day[new Date().toISOString().slice(0, 10)] ?? 0; // days are of UTC
  const rounded = saved.lossy_bytes ? `, ${bytes(saved.lossy_bytes)} of it rounded` : "";
  return [
    tile("Hit rate", rate(saved.hit_rate), `${rate(saved.hit_rate_from_turn_2)} after the first turn`),
    tile("Time to first token", ms(saved.ttft_p50_ms), `median; 95th percentile ${ms(saved.ttft_p95_ms)}`),
    tile("Time saved today", timeSaved(today.saved_s), `in total ${timeSaved(total.saved_s)}`),
    tile("Errors", count(failed + refused), `${count(refused)} refused, of ${plural(all, "request")} in ${plural(saved.hours, "hour")}`),
    tile("On disk", bytes(saved.disk.n_bytes), `${plural(saved.blocks, "block")} and the index${rounded}; ${bytes(written)} written today`),
    tile("Uptime", seconds(Math.max(1, Math.floor(Date.now() / 1000 - saved.started))), `version ${saved.version}`),
  ];
}

const sourcesOf = (points) => SOURCES.filter(({ kind, value }) => kind !== "shared" || points.some(value));
const rate = (share) => share === null ? "–" : percent(share, 1);
const ms = (n) => (n === null ? "–" : seconds(n / 1000));
const tokens = (point) => SOURCES.reduce((n, one) => n + one.value(point), 0);
const answers = (point) => ANSWERS.reduce((n, one) => n + one.value(point), 0);

function warm(points) {
  const all = points.reduce((n, point) => n + tokens(point), 0);
  return [all - points.reduce((n, point) => n + point.computed, 0), all];
}

function pointTable(points) {
  const sources = sourcesOf(points);
  const columns = [{ name: "Time" }, ...[...sources.map(({ name }) => name), "warm", "decoded", "first token", "95th", "failed"]
    .map((name) => ({ name, number: true }))];
  const rows = points.filter((point) => tokens(point) || answers(point)).map((point) =>
    [clock(point.at), ...sources.map((one) => count(one.value(point))), percent(tokens(point) - point.computed, tokens(point)),
      count(point.generated), ms(point.ttft_p50_ms), ms(point.ttft_p95_ms), count(point.failed + point.refused)]);
  return rows.length ? table("By time", columns, rows) : empty("No requests in this period.");
}

function writesChart(days) {
  const entries = Object.entries(days).slice(-7);
  if (!entries.length) return empty("Nothing written yet.");
  const most = Math.max(...entries.map(([, n]) => n), 1);
  return h("ul", { class: "bars" }, entries.map(([day, n]) =>
    h("li", {}, h("span", { class: "quiet" }, day.slice(5)), h("span", { class: "stack" }, fill("disk", n / most)),
      h("span", { class: "number" }, bytes(n)))));
}
