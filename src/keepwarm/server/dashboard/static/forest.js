// The forest of blocks: a drawing that can be panned, zoomed and searched, and a table.

import { byId, h, put, say, table } from "./dom.js";
import { ago, bytes, count } from "./format.js";
import { arrange, matches, neighbour } from "./trees.js";

const LABELS = 240; // space at the right for names
const PADDING = 16;
const ROW = 24; // maximum pixels between rows
const HEIGHTS = [220, 640]; // of the drawing, minimum and maximum
const PAGE = 100; // rows of the table
const AGES = [[300, "last 5 min"], [3600, "last hour"], [86400, "last day"], [Infinity, "older"]];
const COLUMNS = [
  { name: "Run" }, { name: "Agents" }, { name: "Blocks", number: true }, { name: "Tokens", number: true },
  { name: "Size", number: true }, { name: "Tier" }, { name: "Last used" }, { name: "Oldest block" },
];

const state = {
  data: { runs: [], agents: [], blocks: 0, omitted_blocks: 0, other_blocks: 0 },
  tree: arrange([]),
  found: null,
  selected: null,
  view: { x: 0, y: 0, sx: 1, sy: ROW },
  fitted: true,
  page: 0,
};
const canvas = byId("trees");
const pen = canvas.getContext("2d");

export function show(data) {
  const id = state.data.runs[state.selected]?.id;
  state.data = data;
  state.tree = arrange(data.runs);
  const at = data.runs.findIndex((run) => run.id === id);
  state.selected = at < 0 ? null : at;
  search();
  if (state.fitted) fit();
  describe();
  render();
}

export function start() {
  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("wheel", onWheel, { passive: false });
  canvas.addEventListener("pointerdown", onDrag);
  byId("zoom-in").addEventListener("click", () => zoom(1.5));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 1.5));
  byId("zoom-fit").addEventListener("click", () => { fit(); render(); });
  byId("colour").addEventListener("change", render);
  byId("find").addEventListener("input", () => { state.page = 0; search(); render(); });
  byId("find").addEventListener("keydown", (event) => event.key === "Enter" && jump());
  byId("as-picture").addEventListener("click", () => asTable(false));
  byId("as-table").addEventListener("click", () => asTable(true));
  new ResizeObserver(() => { if (state.fitted) fit(); render(); }).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
}

function asTable(yes) {
  byId("forest-picture").hidden = yes;
  byId("forest-table").hidden = !yes;
  byId("as-table").ariaPressed = String(yes);
  byId("as-picture").ariaPressed = String(!yes);
  render();
}

function describe() {
  const { blocks, omitted_blocks: omitted, other_blocks: others, agents, runs } = state.data;
  const shared = runs.filter((run) => run.agents.length > 1).reduce((n, run) => n + run.blocks, 0);
  const words = [`${count(blocks)} blocks in ${count(runs.length)} runs`, `${count(agents.length)} agents`,
    `${count(shared)} blocks shared`];
  if (runs.length) words.push(`least recently used ${ago(Math.min(...runs.map((run) => run.oldest)))}`);
  if (omitted) words.push(`${count(omitted)} older blocks not shown`);
  if (others) words.push(`${count(others)} blocks of other keys`);
  byId("forest-sum").textContent = `${words.join("; ")}.`;
}

// Search and selection

function search() {
  const { runs, agents } = state.data;
  state.found = matches(runs, agents, byId("find").value);
  byId("found").textContent = state.found ? `${count(state.found.size)} runs` : "";
}

function jump() {
  const found = [...(state.found ?? [])];
  if (!found.length) return say("No agent or run matches.");
  select(found.find((index) => index > (state.selected ?? -1)) ?? found[0]);
}

function select(index) {
  state.selected = index;
  const { run, row } = state.tree.placed[index];
  byId("selected").textContent = words(run);
  reveal(run, row);
  render();
}

function words(run) {
  const { agents } = state.data;
  const names = run.agents.map((index) => agents[index].id);
  const ends = run.ends.map((index) => agents[index].id);
  const last = run.first_block + run.blocks - 1;
  return [
    `Run ${run.id}: ${run.blocks > 1 ? `blocks ${run.first_block} to ${last}` : `block ${last}`}`,
    `${count(run.tokens)} tokens, ${bytes(run.bytes)}, ${tiersOf(run)}`,
    names.length ? `used by ${listed(names)}` : "no agent",
    ends.length ? `${listed(ends)} ${ends.length > 1 ? "end" : "ends"} here` : "",
    `last used ${ago(run.used)}`,
    run.blocks > 1 ? `its oldest block ${ago(run.oldest)}` : "",
  ].filter(Boolean).join("; ") + ".";
}

function listed(names) {
  return names.length > 6 ? `${names.slice(0, 5).join(", ")} and ${names.length - 5} more` : names.join(", ");
}

function tiersOf(run) {
  const tiers = [run.memory && "in memory", run.disk && "on disk", run.pinned && "pinned"];
  return tiers.filter(Boolean).join(", ");
}

function reveal(run, row) {
  const { view } = state;
  const [width, height] = size();
  const [left, right] = [run.first_block * view.sx + view.x, (run.first_block + run.blocks) * view.sx + view.x];
  const y = row * view.sy + view.y;
  if (right < PADDING || left > width - LABELS) view.x += width / 3 - left;
  if (y < PADDING || y > height - PADDING) view.y += height / 2 - y;
}

// Panning and zooming

const size = () => [canvas.clientWidth, canvas.clientHeight];

function fit() {
  const { tree, view } = state;
  const [least, most] = HEIGHTS;
  canvas.style.height = `${Math.min(most, Math.max(least, tree.rows * 16 + 2 * PADDING))}px`;
  const [width, height] = size();
  view.sx = Math.min(40, (width - LABELS - 2 * PADDING) / tree.width);
  view.sy = Math.min(ROW, (height - 2 * PADDING) / Math.max(tree.rows, 1));
  view.x = PADDING;
  view.y = PADDING + view.sy / 2;
  state.fitted = true;
}

function zoom(factor, [x, y] = size().map((length) => length / 2)) {
  const { view } = state;
  const tall = Math.min(ROW, view.sy * factor) / view.sy;
  view.x = x - (x - view.x) * factor;
  view.y = y - (y - view.y) * tall;
  view.sx *= factor;
  view.sy *= tall;
  state.fitted = false;
  render();
}

function move(x, y) {
  state.view.x += x;
  state.view.y += y;
  state.fitted = false;
  render();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "+" || event.key === "=") zoom(1.5);
  else if (event.key === "-") zoom(1 / 1.5);
  else if (event.key === "0") { fit(); render(); }
  else if (event.key.startsWith("Arrow") && state.tree.placed.length) {
    select(state.selected === null ? 0 : neighbour(state.tree.placed, state.selected, event.key));
  } else return;
  event.preventDefault();
}

function onWheel(event) {
  if (!event.ctrlKey && !event.metaKey) return; // plain scrolling scrolls the page
  event.preventDefault();
  zoom(Math.exp(-event.deltaY / 300), [event.offsetX, event.offsetY]);
}

function onDrag(start) {
  let moved = 0;
  const onMove = (event) => {
    moved += Math.abs(event.movementX) + Math.abs(event.movementY);
    move(event.movementX, event.movementY);
  };
  const onEnd = () => {
    canvas.removeEventListener("pointermove", onMove);
    if (moved < 4) pick(start.offsetX, start.offsetY);
  };
  canvas.setPointerCapture(start.pointerId);
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerup", onEnd, { once: true });
  canvas.addEventListener("pointercancel", onEnd, { once: true });
}

function pick(x, y) {
  const { view, tree } = state;
  const row = Math.round((y - view.y) / view.sy);
  const block = (x - view.x) / view.sx;
  const hit = tree.placed.find((one) => one.row === row && block >= one.run.first_block && block < one.run.first_block + one.run.blocks);
  if (hit) select(hit.index);
}

// Drawing

function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

const ageOf = (run, now) => AGES.findIndex(([limit]) => now - run.used < limit);

function kind(run, now) {
  if (byId("colour").value === "age") return `age-${ageOf(run, now)}`;
  return run.memory && run.disk ? "both" : run.memory ? "memory" : "disk";
}

function render() {
  if (!byId("forest-table").hidden) return renderTable();
  const [width, height] = size();
  if (!width) return;
  const scale = devicePixelRatio;
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  canvas.dataset.scale = state.view.sx.toFixed(2); // pixels per block
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const colour = colours();
  const now = Date.now() / 1000;
  const rows = state.tree.placed.filter(({ row }) => visible(row, height));
  for (const one of rows) connect(one, colour);
  for (const one of rows) bar(one, colour, now);
  labels(rows, colour);
  legend();
}

function visible(row, height) {
  const y = row * state.view.sy + state.view.y;
  return y > -ROW && y < height + ROW;
}

function connect({ run, row, parent }, colour) {
  const above = state.tree.placed[parent];
  if (!above || above.row === row) return;
  const { view } = state;
  const x = run.first_block * view.sx + view.x;
  const top = above.row * view.sy + view.y;
  const y = row * view.sy + view.y;
  pen.strokeStyle = colour("line");
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x - 3, top);
  pen.lineTo(x - 3, y - 4);
  pen.quadraticCurveTo(x - 3, y, x + 1, y);
  pen.stroke();
}

function bar({ run, row, index }, colour, now) {
  const { view, found, selected } = state;
  const thick = Math.max(1, Math.min(12, view.sy * 0.6));
  const x = run.first_block * view.sx + view.x;
  const y = row * view.sy + view.y - thick / 2;
  const long = Math.max(1.5, run.blocks * view.sx - (view.sx > 4 ? 1.5 : 0));
  pen.globalAlpha = found && !found.has(index) ? 0.2 : 1;
  pen.fillStyle = colour(kind(run, now));
  pen.beginPath();
  pen.roundRect(x, y, long, thick, Math.min(3, thick / 2));
  pen.fill();
  if (view.sx > 6) divide(run, x, y, thick, colour);
  if (run.pinned) outline(x, y, long, thick, colour("pinned"), 1.5);
  pen.globalAlpha = 1;
  if (index === selected) outline(x - 2, y - 2, long + 4, thick + 4, colour("focus"), 2);
}

function divide(run, x, y, thick, colour) {
  pen.fillStyle = colour("card");
  for (let block = 1; block < run.blocks; block += 1) pen.fillRect(x + block * state.view.sx - 0.5, y, 1, thick);
}

function outline(x, y, width, height, colour, line) {
  pen.strokeStyle = colour;
  pen.lineWidth = line;
  pen.beginPath();
  pen.roundRect(x, y, width, height, 3);
  pen.stroke();
}

// Names of the agents that end in a run; at the end of other runs, when they were last used.
function labels(rows, colour) {
  const taken = [];
  const isEnd = ({ row, children }) => !children.some((child) => state.tree.placed[child].row === row);
  const named = rows.filter(({ run }) => run.ends.length);
  const nameless = state.view.sy < 11 ? [] : rows.filter((one) => isEnd(one) && !one.run.ends.length);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (const one of [...named, ...nameless]) label(one, colour, taken);
}

function label({ run, row, index }, colour, taken) {
  const { view, found } = state;
  const names = run.ends.map((index) => state.data.agents[index].id);
  const text = names.length ? listed(names) : ago(run.used);
  const x = (run.first_block + run.blocks) * view.sx + view.x + 6;
  const y = row * view.sy + view.y + 0.5;
  const end = x + pen.measureText(text).width;
  if (taken.some((other) => Math.abs(other.y - y) < 11 && x < other.end && end > other.x)) return;
  taken.push({ x, y, end });
  pen.globalAlpha = found && !found.has(index) ? 0.3 : 1;
  pen.fillStyle = colour(names.length ? "text" : "quiet");
  pen.fillText(text, x, y);
  pen.globalAlpha = 1;
}

function legend() {
  const entries = byId("colour").value === "age"
    ? AGES.map(([, name], index) => [`age-${index}`, name])
    : [["both", "in memory and on disk"], ["memory", "in memory"], ["disk", "on disk"]];
  const items = entries.map(([name, text]) => h("li", {}, h("span", { class: `key fill ${name}` }), text));
  put("forest-legend", ...items, h("li", {}, h("span", { class: "key ring" }), "pinned"));
}

// Table

function renderTable() {
  const { placed } = state.tree;
  const meant = placed.filter(({ index }) => !state.found || state.found.has(index));
  const pages = Math.max(1, Math.ceil(meant.length / PAGE));
  state.page = Math.min(state.page, pages - 1);
  const shown = meant.slice(state.page * PAGE, (state.page + 1) * PAGE);
  const turn = (step) => () => { state.page += step; renderTable(); };
  put("forest-table",
    table("Runs of blocks", COLUMNS, shown.map(({ run, parent }) => cells(run, parent))),
    h("div", { class: "row" },
      h("button", { type: "button", disabled: state.page === 0, onclick: turn(-1) }, "Previous"),
      h("span", { class: "quiet" }, `Page ${state.page + 1} of ${pages}`),
      h("button", { type: "button", disabled: state.page === pages - 1, onclick: turn(1) }, "Next")));
}

function cells(run, parent) {
  const after = parent === null ? "" : ` after ${state.data.runs[parent].id.slice(0, 8)}`;
  const names = run.agents.map((index) => state.data.agents[index].id);
  return [
    [h("code", {}, run.id.slice(0, 8)), h("span", { class: "quiet" }, after)],
    names.length ? listed(names) : h("span", { class: "quiet" }, "none"),
    run.blocks > 1 ? `${run.first_block} to ${run.first_block + run.blocks - 1}` : `${run.first_block}`,
    count(run.tokens), bytes(run.bytes), tiersOf(run), ago(run.used), ago(run.oldest),
  ];
}
