// Numbers, sizes and times as text.

const plain = new Intl.NumberFormat("en");
const few = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
export const GAP = "\u00a0"; // a number stays beside its unit
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const STEPS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export const count = (n) => plain.format(Math.round(n));

export function short(n) {
  if (Math.abs(n) < 10) return few.format(n);
  if (Math.abs(n) < 10000) return count(n);
  return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(n).replace("K", "k");
}

// A model may be a directory, or have an organisation before its name.
export const modelName = (model) => model.split("/").at(-1);

const MOST = 16; // characters of a name that is shown whole
export const isShort = (name) => name.length <= MOST;

// A name of at most so many characters, shortened in the middle: ids often begin alike.
export function middle(name, most = MOST) {
  if (name.length <= most) return name;
  const kept = most - 1;
  return `${name.slice(0, Math.ceil(kept / 2))}…${name.slice(-Math.floor(kept / 2))}`;
}

// A title, cut at its end: words are read from their beginning.
export const cut = (title, most) => (title.length <= most ? title : `${title.slice(0, most - 1).trimEnd()}…`);

export function bytes(n) {
  let size = Math.abs(n);
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const digits = unit && size < 100 ? 1 : 0;
  return `${n < 0 ? "−" : ""}${size.toFixed(digits)}${GAP}${UNITS[unit]}`;
}

export function seconds(s) {
  if (s < 1) return `${Math.round(s * 1000)}${GAP}ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)}${GAP}s`;
  const at = STEPS.findIndex(([size]) => s >= size);
  const [size, name] = STEPS[at];
  const whole = Math.floor(s / size);
  const [next, nextName] = STEPS[Math.min(at + 1, 3)];
  const rest = Math.floor((s - whole * size) / next);
  return rest && at < 3 ? [whole, name, rest, nextName].join(GAP) : `${whole}${GAP}${name}`;
}

// Of prefill time that was saved; the server does not always know it.
export const saved = (s) => (s === null ? "unknown" : seconds(s));
export const spared = (ms) => (ms === null ? "time saved unknown" : `saved${GAP}${seconds(ms / 1000)}`);

export function ago(when, now = Date.now() / 1000) {
  const passed = Math.max(0, now - when);
  if (passed < 5) return "just now";
  const [size, name] = STEPS.find(([step]) => passed >= step);
  return `${Math.floor(passed / size)}${GAP}${name} ago`;
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}${GAP}%` : "–");

export const clock = (when) =>
  new Date(when * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

export const sum = (numbers) => Object.values(numbers).reduce((a, b) => a + b, 0);

// "1 block", "2 blocks"
export const plural = (n, noun, many = `${noun}s`) => `${count(n)} ${n === 1 ? noun : many}`;
