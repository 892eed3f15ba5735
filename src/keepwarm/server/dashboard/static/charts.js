// Charts over time as SVG: lines, and stacked columns.

import { h, svg } from "./dom.js";
import { clock } from "./format.js";

const NARROW = matchMedia("(max-width: 640px)");
const MEDIUM = matchMedia("(min-width: 801px) and (max-width: 1150px)"); // two charts in a row
const [WIDE, HALF, SLIM] = [560, 420, 340]; // in the same pixels as the text
const HEIGHT = 170;
const LEFT = 72; // as much as "16 min 40 s" takes
const TOP = 8;
const FOOT = 22;
const STEEP = 30; // times the median

// `series`: [{ name, kind, value: (point) => number or null }]; `words` writes a value.
export function lines(points, series, words, label) {
  const { share, marks } = axis(points.flatMap((point) => series.map((one) => one.value(point) ?? 0)));
  const drawn = series.flatMap((one) => runs(points, one).map((part) =>
    part.length > 1 ? svg("polyline", { class: `line ${one.kind}`, points: part.map(([index, value]) => `${middle(index, points)},${level(share(value))}`).join(" ") })
      : svg("circle", { class: `dot ${one.kind}`, cx: middle(part[0][0], points), cy: level(share(part[0][1])), r: 2.5 })));
  const ticks = marks.flatMap((value) => mark(level(share(value)), value ? words(value) : "0"));
  return chart([...ticks, ...drawn, ...times(points), ...hovers(points, series, words)], label);
}

// From 0; by powers of ten where one value would flatten the others.
function axis(values) {
  const known = values.filter((value) => value > 0).sort((a, b) => a - b);
  if (!known.length || known.at(-1) < STEEP * known[Math.floor(known.length / 2)]) {
    const most = ceiling(values);
    return { share: (value) => value / most, marks: [0, most / 2, most] };
  }
  const [first, last] = [Math.floor(Math.log10(known[0])), Math.ceil(Math.log10(known.at(-1)))];
  const marks = Array.from({ length: last - first + 1 }, (_, step) => 10 ** (first + step));
  return { share: (value) => Math.max(0, (Math.log10(value) - first) / (last - first)), marks };
}

// Columns stacked to their sum or, with `share`, to the whole height above a strip of the sums.
export function columns(points, series, words, label, share = false) {
  const sums = points.map((point) => series.reduce((n, one) => n + one.value(point), 0));
  const most = ceiling(sums);
  const foot = share ? 0.32 : 0; // share of the height that the strip takes
  const place = (part) => level(foot + part * (1 - foot));
  const bars = points.flatMap((point, index) => sums[index] ? column(point, index, points, series, share ? sums[index] : most, place) : []);
  const strip = share ? sums.map((n, index) => rect(index, points, level(0.18 * (n / most)), level(0), "volume")) : [];
  const marks = share ? [...[0, 0.5, 1].map((part) => mark(place(part), `${100 * part} %`)).flat(), ...mark(level(0.18), words(most), "volume-mark")]
    : grid(most, words);
  return chart([...marks, ...strip, ...bars, ...times(points), ...hovers(points, series, words)], label);
}

export function legend(series) {
  return h("ul", { class: "legend" }, series.map(({ kind, name }) => h("li", {}, h("span", { class: `key fill ${kind}` }), name)));
}

function chart(parts, label) {
  return svg("svg", { class: "chart", viewBox: `0 0 ${wide()} ${HEIGHT}`, role: "img", "aria-label": label }, ...parts);
}

function column(point, index, points, series, whole, place) {
  let below = 0;
  return series.filter((one) => one.value(point)).map((one) => {
    const top = below + one.value(point) / whole;
    const bar = rect(index, points, place(top), place(below), `fill ${one.kind}`);
    below = top;
    return bar;
  });
}

const wide = () => (NARROW.matches ? SLIM : MEDIUM.matches ? HALF : WIDE);
const step = (points) => (wide() - LEFT) / points.length;
const middle = (index, points) => (LEFT + (index + 0.5) * step(points)).toFixed(1);
const level = (share) => Number((TOP + (HEIGHT - FOOT - TOP) * (1 - share)).toFixed(1));

function rect(index, points, top, bottom, kind) {
  return svg("rect", { class: kind, x: (LEFT + index * step(points)).toFixed(1), width: (step(points) - 1).toFixed(1),
    y: top, height: Math.max(0, bottom - top).toFixed(1) });
}

function grid(most, words) {
  return [0, 0.5, 1].flatMap((share) => mark(level(share), share ? words(share * most) : "0"));
}

function mark(y, text, kind = "") {
  return [svg("line", { class: "grid", x1: LEFT, x2: wide(), y1: y, y2: y }),
    svg("text", { class: kind || null, x: LEFT - 6, y: y + 4, "text-anchor": "end" }, text)];
}

function times(points) {
  const every = Math.ceil(points.length / (NARROW.matches ? 3 : 6));
  return points.filter((_, index) => index % every === 0).map((point, index) =>
    svg("text", { x: LEFT + index * every * step(points), y: HEIGHT - 5 }, clock(point.at)));
}

// What a column is, for the pointer.
function hovers(points, series, words) {
  return points.map((point, index) => {
    const said = series.filter((one) => one.value(point)).map((one) => `${one.name} ${words(one.value(point))}`);
    const box = rect(index, points, TOP, HEIGHT - FOOT, "hover");
    box.append(svg("title", {}, `${clock(point.at)}: ${said.join(", ") || "nothing"}`));
    return box;
  });
}

// Values without gaps, as [index, value].
function runs(points, { value }) {
  const found = [[]];
  points.forEach((point, index) => {
    const n = value(point);
    if (n === null) found.push([]);
    else found.at(-1).push([index, n]);
  });
  return found.filter((part) => part.length);
}

// The top of an axis, whose middle is marked too: at 1, 2, 5, 10, 20, … and for counts never at a fraction.
function ceiling(values) {
  const half = nice(Math.max(0, ...values) / 2);
  return 2 * (values.every(Number.isInteger) ? Math.max(1, half) : half);
}

// The next of 1, 2, 5, 10, 20, …
function nice(n) {
  if (n <= 0) return 1;
  const size = 10 ** Math.floor(Math.log10(n));
  return size * [1, 2, 5, 10].find((step) => step * size >= n);
}
