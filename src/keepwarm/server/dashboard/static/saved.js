// Savings: hit rate by tier over time, totals, disk writes, health counts.

import { choice, h, put, svg, table, tile } from "./dom.js";
import { bytes, clock, count, percent, seconds, short, sum } from "./format.js";

const SOURCES = [["live", "live caches"], ["memory", "memory"], ["disk", "disk"], ["computed", "computed"]];
const HEALTH = {
  quarantined: "damaged records quarantined",
  read_errors: "records that could not be read",
  dropped_saves: "saves dropped",
  failed_saves: "saves failed",
  failed_restores: "restores failed",
  evicted: "evictions",
  audits: "audits",
  drifts: "audits that differed",
};
const HOURS = [{ value: 1, name: "1 h" }, { value: 6, name: "6 h" }, { value: 24, name: "24 h" }];
const WIDTH = 640;
const HEIGHT = 180;
const LEFT = 42;
const FOOT = 22;

export function show(saved, choose) {
  choice("hours", HOURS, saved.hours, choose);
  const { today, total, disk } = saved;
  const reused = sum(today.reused);
  const ever = sum(total.reused);
  put("saved-tiles",
    tile("Hit rate", rate(saved.hit_rate), `from turn 2 ${rate(saved.hit_rate_from_turn_2)}`),
    tile("Hit rate today", percent(reused, reused + today.computed),
      `${short(reused)} of ${short(reused + today.computed)} prompt tokens`),
    tile("Time saved today", seconds(today.saved_s), `${short(reused)} tokens not recomputed`),
    tile("Time saved in total", seconds(total.saved_s), `${short(ever)} tokens not recomputed`),
    tile("On disk", bytes(disk.n_bytes),
      `${count(saved.blocks)} blocks${disk.max_bytes ? `; budget ${bytes(disk.max_bytes)}` : ""}`),
    tile("Written today", bytes(Object.entries(saved.written_by_day).at(-1)?.[1] ?? 0), "days in UTC"));
  put("hit-chart", hitChart(saved.points));
  put("hit-legend", legend());
  put("hit-table", pointTable(saved.points));
  put("writes-chart", writesChart(saved.written_by_day));
  put("health-list", Object.entries(HEALTH).flatMap(([key, name]) => [h("dt", {}, name), h("dd", {}, count(saved.health[key]))]));
}

const rate = (share) => share === null ? "–" : percent(share, 1);

function hitChart(points) {
  const step = (WIDTH - LEFT) / points.length;
  const columns = points.map((point, index) => column(point, LEFT + index * step, step - 1));
  const lines = [0, 50, 100].map((share) => {
    const y = level(share / 100);
    return [svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y, y2: y }),
      svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, `${share} %`)];
  });
  const every = points.length / 6;
  const times = points.filter((_, index) => index % every === 0).map((point, index) =>
    svg("text", { x: LEFT + index * every * step, y: HEIGHT - 5 }, clock(point.at)));
  const label = `Share of prompt tokens by source; ${percent(...totals(points))} were not computed.`;
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    ...lines.flat(), ...columns.flat(), ...times);
}

const level = (share) => 6 + (HEIGHT - FOOT - 6) * (1 - share);

function totals(points) {
  const all = points.reduce((n, point) => n + tokens(point), 0);
  const computed = points.reduce((n, point) => n + point.computed, 0);
  return [all - computed, all];
}

const tokens = (point) => SOURCES.reduce((n, [source]) => n + point[source], 0);

function column(point, x, width) {
  const whole = tokens(point);
  if (!whole) return [];
  const title = `${clock(point.at)}: ${SOURCES.map(([source, name]) => `${name} ${count(point[source])}`).join(", ")}`;
  let below = 0;
  return SOURCES.filter(([source]) => point[source]).map(([source]) => {
    const top = below + point[source] / whole;
    const bar = svg("rect", { class: `fill ${source}`, x, width, y: level(top), height: level(below) - level(top) },
      svg("title", {}, title));
    below = top;
    return bar;
  });
}

function legend() {
  return SOURCES.map(([source, name]) => h("li", {}, h("span", { class: `key fill ${source}` }), name));
}

function pointTable(points) {
  const columns = [{ name: "Time" }, ...SOURCES.map(([, name]) => ({ name, number: true })), { name: "warm", number: true }];
  const rows = points.filter(tokens).map((point) =>
    [clock(point.at), ...SOURCES.map(([source]) => count(point[source])),
      percent(tokens(point) - point.computed, tokens(point))]);
  return rows.length ? table("Prompt tokens by source", columns, rows)
    : h("p", { class: "quiet" }, "No requests in this period.");
}

function writesChart(days) {
  const entries = Object.entries(days);
  if (!entries.length) return h("p", { class: "quiet" }, "Nothing written yet.");
  const most = Math.max(...entries.map(([, n]) => n), 1);
  return h("ul", { class: "bars" }, entries.map(([day, n]) => {
    const bar = h("span", { class: "fill disk" });
    bar.style.width = `${(100 * n) / most}%`;
    return h("li", {}, h("span", { class: "quiet" }, day.slice(5)), h("span", { class: "stack" }, bar),
      h("span", { class: "number" }, bytes(n)));
  }));
}
