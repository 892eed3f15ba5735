// The forest of blocks: a drawing that can be moved, zoomed, folded and searched, and a table.

import { byId, h, hide, pages, put, say, slice, table } from "./dom.js";
import { draw, drawMap, LEGENDS, ROW } from "./forest_draw.js";
import { ago, bytes, count, cut, isShort, middle, modelName, plural } from "./format.js";
import { arrange, BLOCK, lit, matches, neighbour, steady } from "./trees.js";

const PADDING = 16;
const HEIGHTS = [220, 600]; // of the drawing, minimum and maximum
const FEW_ROWS = 60; // with more, runs of no agent are left out at first
const LABEL = 60; // characters
const PAGE = 100; // rows of the table
const COLUMNS = [
  { name: "Run" }, { name: "Agents" }, { name: "Blocks", number: true }, { name: "Tokens", number: true },
  { name: "Size", number: true }, { name: "Tier" }, { name: "Last used" }, { name: "Oldest block" },
];

const state = {
  data: null,
  tree: arrange([]),
  folded: new Set(), // ids of runs
  several: false, // models
  chosen: false, // whether the reader has decided about runs of no agent
  found: null,
  selected: null,
  running: [], // requests
  reached: new Map(), // tokens of prompts that are drawn as computed, by number of request
  ranks: new Map(), // rows stay in this order
  view: { x: 0, y: 0, sx: 1, sy: ROW },
  fitted: true,
  page: 0,
};
const NEAR = 8; // tokens: what is drawn follows what is true until it is so near
const still = matchMedia("(prefers-reduced-motion: reduce)");
const canvas = byId("trees");
const map = byId("minimap");

export function show(data) {
  const id = state.data?.runs[state.selected]?.id;
  const runs = steady(data.runs, state.ranks);
  state.data = { ...data, runs };
  state.ranks = new Map(runs.map((run, index) => [run.id, index]));
  state.reached = new Map(data.requests.map(({ number }) => [number, state.reached.get(number) ?? 0]));
  showModels();
  if (!state.chosen) byId("unused").checked = arrange(data.runs).rows <= FEW_ROWS || !data.agents.length;
  layOut();
  const at = state.tree.shown.find((one) => one.run.id === id);
  state.selected = at?.index ?? null;
  search();
  resume();
}

// Requests as they are now. While a prompt is computed, its bars grow.
export function running(requests) {
  state.running = requests;
  if (state.data?.requests.length && !byId("forest").hidden) follow();
}

export const isGrowing = () => state.running.some(({ state: at }) => at === "waiting" || at === "prefilling");

// Whether requests have come or gone that the drawing does not know.
export function isBehind() {
  const drawn = new Set(state.data?.requests.map(({ number }) => number));
  return drawn.size !== state.running.length || state.running.some(({ number }) => !drawn.has(number));
}

function follow() {
  let near = true;
  for (const { number, processed } of state.running) {
    const at = state.reached.get(number) ?? 0;
    const isNear = still.matches || Math.abs(processed - at) <= NEAR;
    state.reached.set(number, isNear ? processed : at + (processed - at) / 3);
    near &&= isNear;
  }
  render();
  cancelAnimationFrame(follow.frame);
  if (!near) follow.frame = requestAnimationFrame(follow);
}

// Called when the view is opened: a hidden canvas has no size.
export function resume() {
  if (!state.data || !canvas.clientWidth) return;
  if (state.fitted) fit();
  describe();
  render();
}

function layOut() {
  const withUnused = byId("unused").checked;
  const isLeftOut = (run) => (!withUnused && run.agents.length === 0) || isOther(run);
  state.tree = arrange(state.data.runs, (run) => state.folded.has(run.id), isLeftOut);
}

function isOther(run) {
  const model = byId("forest-model").value;
  return model && !run.agents.some((agent) => state.data.agents[agent].model === model);
}

export function start() {
  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("wheel", onWheel, { passive: false });
  canvas.addEventListener("pointerdown", onDrag);
  canvas.addEventListener("pointermove", hover);
  canvas.addEventListener("pointerleave", () => { byId("forest-tip").hidden = true; });
  canvas.addEventListener("dblclick", (event) => { const hit = at(event.offsetX, event.offsetY); if (hit) fold(hit.index); });
  map.addEventListener("pointerdown", onMap);
  byId("zoom-in").addEventListener("click", () => zoom(1.5));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 1.5));
  byId("zoom-fit").addEventListener("click", () => { fit(); render(); });
  byId("colour").addEventListener("change", render);
  byId("forest-model").addEventListener("change", renew);
  byId("unused").addEventListener("change", () => { state.chosen = true; renew(); });
  byId("find").addEventListener("input", () => { state.page = 0; search(); render(); });
  byId("find").addEventListener("keydown", (event) => event.key === "Enter" && jump());
  byId("as-picture").addEventListener("click", () => asTable(false));
  byId("as-table").addEventListener("click", () => asTable(true));
  new ResizeObserver(resume).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
}

function renew() {
  const id = state.data.runs[state.selected]?.id;
  layOut();
  state.selected = state.tree.shown.find((one) => one.run.id === id)?.index ?? null;
  if (state.fitted) fit();
  clamp();
  describe();
  render();
}

function asTable(yes) {
  byId("forest-picture").hidden = yes;
  byId("forest-table").hidden = !yes;
  byId("forest-pages").hidden = true;
  byId("as-table").ariaPressed = String(yes);
  byId("as-picture").ariaPressed = String(!yes);
  resume();
  render();
}

function describe() {
  const { blocks, omitted_blocks: omitted, other_blocks: others, agents, runs } = state.data;
  const shared = runs.filter((run) => run.agents.length > 1).reduce((n, run) => n + run.blocks, 0);
  const left = state.tree.placed.length - state.tree.shown.length;
  const words = [`${plural(blocks, "block")} in ${plural(runs.length, "run")}`, plural(agents.length, "agent"),
    `${plural(shared, "block")} shared by several`];
  if (runs.length) words.push(`least recently used ${ago(Math.min(...runs.map((run) => run.oldest)))}`);
  if (left) words.push(`${plural(left, "run")} folded`);
  if (omitted) words.push(`${plural(omitted, "older block")} not shown`);
  if (others) words.push(`${plural(others, "block")} of other keys`);
  const text = blocks || others ? `${words.join("; ")}.` : "No blocks yet: answer a prompt of 256 tokens or more, and its blocks are drawn here.";
  if (byId("forest-sum").textContent !== text) byId("forest-sum").textContent = text;
}

// Search and selection

function search() {
  const { runs, agents } = state.data;
  state.found = matches(runs, agents, byId("find").value);
  byId("found").textContent = state.found ? plural(state.found.size, "run") : "";
}

function jump() {
  const found = [...(state.found ?? [])];
  if (!found.length) return say("No agent or run matches.");
  const next = found[(found.indexOf(state.selected) + 1) % found.length];
  if (state.tree.placed[next].hidden) unfold(next);
  select(next);
}

function unfold(index) {
  for (let one = state.tree.placed[index]; one; one = state.tree.placed[one.parent]) state.folded.delete(one.run.id);
  if (isOther(state.data.runs[index])) byId("forest-model").value = "";
  if (state.data.runs[index].agents.length === 0) byId("unused").checked = state.chosen = true;
  renew();
}

function fold(index) {
  const { run, children } = state.tree.placed[index];
  if (state.folded.has(run.id)) state.folded.delete(run.id);
  else if (children.length) state.folded.add(run.id);
  renew();
}

function select(index) {
  state.selected = index;
  const { run, row } = state.tree.placed[index];
  byId("selected").textContent = words(run);
  reveal(run, row);
  render();
}

function words(run) {
  const ends = names(run.ends);
  const last = run.first_block + run.blocks - 1;
  return [
    `Run ${run.id}: ${run.blocks > 1 ? `blocks ${run.first_block} to ${last}` : `block ${last}`}`,
    `${plural(run.tokens, "token")}, ${bytes(run.bytes)}, ${tiersOf(run)}`,
    run.agents.length ? `used by ${listed(names(run.agents))}` : "no agent",
    ends.length ? `${listed(ends)} ${ends.length > 1 ? "end" : "ends"} here` : "",
    `last used ${ago(run.used)}`,
    run.blocks > 1 ? `its oldest block ${ago(run.oldest)}` : "",
  ].filter(Boolean).join("; ") + ".";
}

const names = (indexes, most = Infinity) => indexes.map((index) => {
  const { id, title, key, model } = state.data.agents[index];
  const name = isShort(id) || !title ? middle(id, 32) : `${cut(title, most)} (${middle(id)})`;
  const more = [key && `key ${key}`, state.several && modelName(model)].filter(Boolean);
  return more.length ? `${name} (${more.join(", ")})` : name;
});

function showModels() {
  const models = [...new Set(state.data.agents.map(({ model }) => model))].sort();
  const [choice, chosen] = [byId("forest-model"), byId("forest-model").value];
  state.several = models.length > 1;
  hide(choice.parentElement, !state.several);
  put(choice, h("option", { value: "" }, "any"), models.map((model) => h("option", { value: model }, modelName(model))));
  choice.value = state.several && models.includes(chosen) ? chosen : "";
}

function listed(all) {
  return all.length > 6 ? `${all.slice(0, 5).join(", ")} and ${all.length - 5} more` : all.join(", ");
}

// In one line, so that how many there are is not what is cut.
const brief = (all) => (all.join(", ").length <= LABEL ? all.join(", ") : `${all[0]}${all.length > 1 ? ` and ${all.length - 1} more` : ""}`);

function tiersOf(run) {
  const tiers = [run.memory && "in memory", run.disk && "on disk", run.pinned && "pinned"].filter(Boolean);
  return tiers.join(", ") || "not computed yet";
}

function reveal(run, row) {
  const { view } = state;
  const [width, height] = size();
  const [left, right] = [run.first_block * view.sx + view.x, (run.first_block + run.blocks) * view.sx + view.x];
  const y = row * view.sy + view.y;
  if (right < PADDING || left > width - labels()) view.x += width / 3 - left;
  if (y < PADDING || y > height - PADDING) view.y += height / 2 - y;
  clamp();
}

// Moving and zooming

const size = () => [canvas.clientWidth, canvas.clientHeight];
const labels = () => Math.min(240, Math.max(84, 0.28 * canvas.clientWidth)); // space at the right for names

function fit() {
  const { tree, view } = state;
  const [least, most] = HEIGHTS;
  const wanted = `${Math.min(most, Math.max(least, tree.rows * ROW + 2 * PADDING))}px`;
  if (canvas.style.height !== wanted) canvas.style.height = wanted;
  map.hidden = tree.rows * ROW + 2 * PADDING <= most;
  const [width] = size();
  view.sx = Math.min(40, (width - labels() - 2 * PADDING) / tree.width);
  view.x = PADDING;
  view.y = PADDING + ROW / 2;
  state.fitted = true;
}

// Rows stay within the drawing.
function clamp() {
  const { view, tree } = state;
  const [, height] = size();
  const top = PADDING + ROW / 2;
  const least = Math.min(top, height - PADDING - ROW / 2 - (tree.rows - 1) * ROW);
  view.y = Math.max(least, Math.min(top, view.y));
}

function zoom(factor, x = size()[0] / 2) {
  const { view } = state;
  view.x = x - (x - view.x) * factor;
  view.sx *= factor;
  state.fitted = false;
  render();
}

function move(x, y) {
  const before = state.view.y;
  state.view.x += x;
  state.view.y += y;
  clamp();
  if (x) state.fitted = false;
  render();
  return state.view.y !== before;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !state.tree.shown.length) return;
  if (event.key === "+" || event.key === "=") zoom(1.5);
  else if (event.key === "-") zoom(1 / 1.5);
  else if (event.key === "0") { fit(); render(); }
  else if (event.key === "Enter" || event.key === " ") { if (state.selected !== null) fold(state.selected); }
  else if (event.key.startsWith("Arrow")) {
    select(state.selected === null ? state.tree.shown[0].index : neighbour(state.tree.placed, state.selected, event.key));
  } else return;
  event.preventDefault();
}

function onWheel(event) {
  const zooms = event.ctrlKey || event.metaKey;
  if (zooms) zoom(Math.exp(-event.deltaY / 300), event.offsetX);
  if (zooms || move(0, -event.deltaY)) event.preventDefault(); // at the edge the page scrolls
}

function onDrag(start) {
  let moved = 0;
  const over = new AbortController();
  const until = { signal: over.signal };
  const onMove = (event) => {
    moved += Math.abs(event.movementX) + Math.abs(event.movementY);
    move(event.movementX, event.movementY);
  };
  const onEnd = () => {
    over.abort();
    const hit = moved < 4 && at(start.offsetX, start.offsetY);
    if (hit) select(hit.index);
  };
  canvas.setPointerCapture(start.pointerId);
  canvas.addEventListener("pointermove", onMove, until);
  canvas.addEventListener("pointerup", onEnd, until);
  canvas.addEventListener("pointercancel", onEnd, until);
}

function onMap(start) {
  const go = (event) => {
    const [, height] = size();
    state.view.y = height / 2 - (event.offsetY / map.clientHeight) * state.tree.rows * ROW;
    clamp();
    render();
  };
  const over = new AbortController();
  const until = { signal: over.signal };
  map.setPointerCapture(start.pointerId);
  map.addEventListener("pointermove", go, until);
  map.addEventListener("pointerup", () => over.abort(), until);
  map.addEventListener("pointercancel", () => over.abort(), until);
  go(start);
}

const blockAt = (x) => Math.floor((x - state.view.x) / state.view.sx);

function at(x, y) {
  const row = Math.round((y - state.view.y) / state.view.sy);
  const block = blockAt(x);
  return state.tree.shown.find((one) => one.row === row && block >= one.run.first_block && block < one.run.first_block + one.run.blocks);
}

// Says what is under the pointer.
function hover(event) {
  const [tip, hit] = [byId("forest-tip"), at(event.offsetX, event.offsetY)];
  tip.hidden = !hit;
  if (!hit) return;
  const [{ run, inside }, block] = [hit, blockAt(event.offsetX)];
  const who = run.agents.length ? `used by ${listed(names(run.agents))}` : "used by no agent";
  put(tip, h("strong", {}, `Block ${block}`), ` of ${run.first_block} to ${run.first_block + run.blocks - 1}, tokens from ${count(block * BLOCK)} on`,
    h("div", {}, who), h("div", {}, `${tiersOf(run)}; last used ${ago(run.used)}`),
    inside ? h("div", {}, `${plural(inside, "run")} folded behind it; double-click to unfold`) : "");
  tip.style.left = `${Math.max(0, Math.min(event.offsetX + 14, size()[0] - tip.offsetWidth))}px`;
  tip.style.top = `${event.offsetY + 16}px`;
}

// Drawing

function render() {
  if (!state.data) return;
  if (!byId("forest-table").hidden) return renderTable();
  const [width] = size();
  if (!width) return;
  canvas.dataset.scale = state.view.sx.toFixed(2); // pixels per block
  canvas.dataset.rows = state.tree.rows;
  const colour = byId("colour").value;
  const reached = state.data.requests.map(({ number, agent }) => [agent, state.reached.get(number) ?? 0]);
  const glows = lit(state.data.runs, reached);
  canvas.dataset.lit = [...glows.values()].reduce((n, blocks) => n + Math.floor(blocks), 0);
  const nameOf = (run) => brief(names(run.ends.length ? run.ends : run.agents, LABEL / 2));
  canvas.dataset.names = draw(canvas, { ...state, colour, nameOf, glows, labels: labels() });
  if (!map.hidden) drawMap(map, canvas, { ...state, colour });
  const items = LEGENDS[colour].map(([name, text]) => h("li", {}, h("span", { class: `key fill ${name}` }), text));
  put("forest-legend", ...items, h("li", {}, h("span", { class: "key ring" }), "pinned"),
    h("li", {}, h("span", { class: "key fill lit" }), "in a running request"), h("li", {}, h("span", { class: "key planned" }), "to be computed"));
}

function renderTable() {
  const meant = state.tree.placed.filter(({ index }) => !state.found || state.found.has(index));
  const { rows, page, n } = slice(meant, state.page, PAGE);
  put("forest-table", table("Runs of blocks", COLUMNS, rows.map(({ run, parent }) => cells(run, parent))));
  pages("forest-pages", page, n, (to) => { state.page = to; renderTable(); });
}

function cells(run, parent) {
  const after = parent === null ? "" : ` after ${state.data.runs[parent].id.slice(0, 8)}`;
  return [
    [h("code", {}, run.id.slice(0, 8)), h("span", { class: "quiet" }, after)],
    run.agents.length ? listed(names(run.agents)) : h("span", { class: "quiet" }, "none"),
    run.blocks > 1 ? `${run.first_block} to ${run.first_block + run.blocks - 1}` : `${run.first_block}`,
    count(run.tokens), bytes(run.bytes), tiersOf(run), ago(run.used), ago(run.oldest),
  ];
}
