// Draws the forest, and the map of all of it, on canvases.

import { ago } from "./format.js";

export const ROW = 22; // pixels between rows, at any zoom
const THICK = 12;
const FONT = "12px system-ui, sans-serif";
const AGES = [300, 3600, 86400, Infinity];
export const LEGENDS = {
  share: [["share-3", "5 agents or more"], ["share-2", "2 to 4 agents"], ["share-1", "one agent"], ["share-0", "no agent"]],
  tier: [["both", "in memory and on disk"], ["memory", "in memory"], ["disk", "on disk"]],
  age: [["age-0", "last 5 min"], ["age-1", "last hour"], ["age-2", "last day"], ["age-3", "older"]],
};

function kind(run, colour, now) {
  if (colour === "age") return `age-${AGES.findIndex((limit) => now - run.used < limit)}`;
  if (colour === "tier") return run.memory && run.disk ? "both" : run.memory ? "memory" : "disk";
  const n = run.agents.length;
  return `share-${n > 4 ? 3 : n > 1 ? 2 : n}`;
}

// Resolved, in the light or dark scheme, by the canvas's own style.
function colours(canvas) {
  const known = new Map();
  return (name) => {
    if (!known.has(name)) {
      canvas.style.color = `var(--${name})`;
      known.set(name, getComputedStyle(canvas).color);
    }
    return known.get(name);
  };
}

function prepare(canvas) {
  const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio];
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height, tint: colours(canvas), now: Date.now() / 1000 };
}

// Returns the number of agents' names that are written.
export function draw(canvas, forest) {
  const paper = prepare(canvas);
  const { view, tree } = forest;
  const isVisible = (row) => row * view.sy + view.y > -ROW && row * view.sy + view.y < paper.height + ROW;
  const rows = tree.shown.filter((one) => isVisible(one.row) || isVisible(tree.placed[one.parent]?.row ?? one.row));
  for (const one of rows) connect(paper, forest, one);
  for (const one of rows) bar(paper, forest, one);
  return labels(paper, forest, rows.filter((one) => isVisible(one.row)));
}

function connect({ pen, tint }, { view, tree }, { run, row, parent }) {
  const above = tree.placed[parent];
  if (!above || above.row === row) return;
  const x = run.first_block * view.sx + view.x;
  const y = row * view.sy + view.y;
  pen.strokeStyle = tint("line");
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x - 3, above.row * view.sy + view.y);
  pen.lineTo(x - 3, y - 4);
  pen.quadraticCurveTo(x - 3, y, x + 1, y);
  pen.stroke();
}

function bar({ pen, tint, now, width }, { view, found, selected, colour, glows }, { run, row, index }) {
  const x = run.first_block * view.sx + view.x;
  const y = row * view.sy + view.y - THICK / 2;
  const long = Math.max(1.5, run.blocks * view.sx - (view.sx > 4 ? 1.5 : 0));
  if (x > width || x + long < 0) return;
  pen.globalAlpha = found && !found.has(index) ? 0.2 : 1;
  if (run.memory || run.disk) fill(pen, x, y, long, tint(kind(run, colour, now)));
  else outline(pen, x + 0.5, y + 0.5, long - 1, THICK - 1, tint("line"), 1);
  if (glows.get(index)) glow(pen, x, y, Math.min(long, glows.get(index) * view.sx), tint("lit"));
  if (view.sx > 6) divide(pen, view, run, x, y, tint("card"));
  if (run.pinned) outline(pen, x, y, long, THICK, tint("pinned"), 1.5);
  pen.globalAlpha = 1;
  if (index === selected) outline(pen, x - 2, y - 2, long + 4, THICK + 4, tint("focus"), 2);
}

function fill(pen, x, y, long, colour) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.roundRect(x, y, long, THICK, 3);
  pen.fill();
}

function glow(pen, x, y, long, colour) {
  [pen.shadowColor, pen.shadowBlur] = [colour, 12];
  fill(pen, x, y, long, colour);
  pen.shadowBlur = 0;
}

function divide(pen, view, run, x, y, colour) {
  pen.fillStyle = colour;
  for (let block = 1; block < run.blocks; block += 1) pen.fillRect(x + block * view.sx - 0.5, y, 1, THICK);
}

function outline(pen, x, y, width, height, colour, line) {
  pen.strokeStyle = colour;
  pen.lineWidth = line;
  pen.beginPath();
  pen.roundRect(x, y, width, height, 3);
  pen.stroke();
}

// One at the end of each row: the agents that end there, or whose side branch it is and when it was
// last used; and how many runs are folded behind it. Where the end is out of sight, it stands at the
// edge.
function labels({ pen, tint, width }, { view, tree, found, nameOf, labels: room }, rows) {
  pen.font = FONT;
  pen.textBaseline = "middle";
  let named = 0;
  for (const { run, row, index, children, inside } of rows) {
    if (children.some((child) => tree.placed[child].row === row)) continue;
    const name = nameOf(run);
    const end = (run.first_block + run.blocks) * view.sx + view.x + 6;
    const said = [name, run.ends.length ? "" : ago(run.used), inside ? `+${inside}` : ""].filter(Boolean).join("  ");
    const text = shortened(pen, said, Math.max(room, width - end) - 10);
    const long = pen.measureText(text).width;
    const x = Math.max(4, Math.min(end, width - long - 4));
    const y = row * view.sy + view.y + 0.5;
    if (x < end) blank(pen, x, y, long, tint("card"));
    pen.globalAlpha = found && !found.has(index) ? 0.3 : 1;
    pen.fillStyle = tint(run.ends.length ? "text" : "quiet");
    pen.fillText(text, x, y);
    pen.globalAlpha = 1;
    named += run.ends.length;
  }
  return named;
}

function blank(pen, x, y, long, colour) {
  pen.fillStyle = colour;
  pen.fillRect(x - 3, y - ROW / 2 + 2, long + 6, ROW - 4);
}

function shortened(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let n = text.length;
  while (n > 1 && pen.measureText(`${text.slice(0, n)}…`).width > room) n -= 1;
  return `${text.slice(0, n)}…`;
}

// All rows, and a frame around those that the drawing shows.
export function drawMap(map, canvas, { view, tree, colour, found }) {
  const { pen, width, height, tint, now } = prepare(map);
  const [sx, sy] = [width / tree.width, height / tree.rows];
  for (const { run, row, index } of tree.shown) {
    pen.globalAlpha = found && !found.has(index) ? 0.2 : 1;
    pen.fillStyle = tint(kind(run, colour, now));
    pen.fillRect(run.first_block * sx, row * sy, Math.max(1, run.blocks * sx), Math.max(0.7, sy * 0.7));
  }
  pen.globalAlpha = 1;
  const top = (-view.y / view.sy) * sy;
  outline(pen, 1, Math.max(1, top), width - 2, Math.min(height - 2, (canvas.clientHeight / view.sy) * sy), tint("focus"), 2);
}
