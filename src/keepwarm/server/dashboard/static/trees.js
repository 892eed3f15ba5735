// The layout of runs, which come in the order of the tree: along a row by position in the prompt;
// where conversations diverge, later branches get rows below. A run in which an agent ends, ends its
// row, so that there is room for the name.

export const BLOCK = 256; // tokens

// `isFolded(run)`: what follows is not shown. `isLeftOut(run)`: neither is the run itself.
export function arrange(runs, isFolded = () => false, isLeftOut = () => false) {
  const placed = runs.map((run, index) => ({ run, index, row: null, parent: run.parent, children: [], inside: 0, hidden: false }));
  let rows = -1;
  let width = 0;
  for (const one of placed) {
    const above = one.parent === null ? null : placed[one.parent];
    one.hidden = isLeftOut(one.run) || (above !== null && (above.hidden || isFolded(above.run)));
    if (one.hidden) {
      count(placed, one);
      continue;
    }
    const goesOn = above !== null && above.children.length === 0 && !above.run.ends?.length;
    above?.children.push(one.index);
    one.row = goesOn ? above.row : (rows += 1);
    width = Math.max(width, one.run.first_block + one.run.blocks);
  }
  return { placed, shown: placed.filter((one) => !one.hidden), rows: rows + 1, width: Math.max(width, 1) };
}

// The same runs with siblings in the order of `ranks`, by id, so that rows stay where they are while
// the latest use of their blocks changes; new ones come last.
export function steady(runs, ranks) {
  const rank = (index) => ranks.get(runs[index].id) ?? Infinity;
  const below = Map.groupBy(runs.keys(), (index) => runs[index].parent);
  const order = [];
  const add = (parent) => {
    for (const index of (below.get(parent) ?? []).sort((a, b) => rank(a) - rank(b) || a - b)) {
      order.push(index);
      add(index);
    }
  };
  add(null);
  const place = new Map(order.map((index, at) => [index, at]));
  return order.map((index) => ({ ...runs[index], parent: place.get(runs[index].parent) ?? null }));
}

// How many blocks of each run, by index, prompts have reached: `reached` has [agent, tokens] of each.
export function lit(runs, reached) {
  const found = new Map();
  for (const [agent, tokens] of reached) {
    let index = runs.findIndex((run) => run.ends.includes(agent));
    for (; index >= 0 && index !== null; index = runs[index].parent) {
      const { first_block: first, blocks } = runs[index];
      const part = Math.max(0, Math.min(blocks, tokens / BLOCK - first));
      found.set(index, Math.max(part, found.get(index) ?? 0));
    }
  }
  return found;
}

// Adds a hidden run to the last one above it that is shown.
function count(placed, one) {
  let above = one;
  while (above?.hidden) above = above.parent === null ? null : placed[above.parent];
  if (above) above.inside += 1;
}

// The run that an arrow key selects.
export function neighbour(placed, index, key) {
  const here = placed[index];
  if (key === "ArrowLeft") return here.parent ?? index;
  if (key === "ArrowRight") return here.children[0] ?? index;
  const row = here.row + (key === "ArrowDown" ? 1 : -1);
  const middle = here.run.first_block + here.run.blocks / 2;
  const distance = (one) => Math.abs(one.run.first_block + one.run.blocks / 2 - middle);
  const found = placed.filter((one) => one.row === row).sort((a, b) => distance(a) - distance(b));
  return found[0]?.index ?? index;
}

// Indexes of the runs that match a search, by agent name or run id; those an agent ends in first.
export function matches(runs, agents, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return null;
  const meant = new Set(agents.flatMap((agent, index) => (`${agent.id} ${agent.title} ${agent.model}`.toLowerCase().includes(wanted) ? [index] : [])));
  const hit = (run) => run.id.startsWith(wanted) || run.agents.some((agent) => meant.has(agent));
  const isEnd = (index) => (runs[index].ends.some((agent) => meant.has(agent)) ? 0 : 1);
  const found = runs.flatMap((run, index) => (hit(run) ? [index] : []));
  return new Set(found.sort((a, b) => isEnd(a) - isEnd(b)));
}
