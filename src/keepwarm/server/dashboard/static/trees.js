// The layout of runs: along a row by position in the prompt; where conversations diverge, later
// branches get rows below.

export function arrange(runs) {
  const children = runs.map(() => []);
  let rows = -1;
  let width = 0;
  const placed = runs.map((run, index) => {
    const parent = run.parent;
    const isFirst = parent !== null && children[parent].length === 0;
    if (parent !== null) children[parent].push(index);
    const row = isFirst ? null : (rows += 1);
    width = Math.max(width, run.first_block + run.blocks);
    return { run, index, row, parent, children: children[index] };
  });
  for (const one of placed) {
    if (one.row === null) one.row = placed[one.parent].row;
  }
  return { placed, rows: rows + 1, width: Math.max(width, 1) };
}

// The run that an arrow key selects.
export function neighbour(placed, index, key) {
  const here = placed[index];
  if (key === "ArrowLeft") return here.parent ?? index;
  if (key === "ArrowRight") return here.children[0] ?? index;
  const step = key === "ArrowDown" ? 1 : -1;
  const rows = [...new Set(placed.map((one) => one.row))].sort((a, b) => a - b);
  const row = rows[rows.indexOf(here.row) + step];
  if (row === undefined) return index;
  const middle = here.run.first_block + here.run.blocks / 2;
  const distance = (one) => Math.abs(one.run.first_block + one.run.blocks / 2 - middle);
  return placed.filter((one) => one.row === row).sort((a, b) => distance(a) - distance(b))[0].index;
}

// Indexes of the runs that match a search, by agent name or run id.
export function matches(runs, agents, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return null;
  const meant = new Set(agents.flatMap((agent, index) => (agent.id.toLowerCase().includes(wanted) ? [index] : [])));
  const hit = (run) => run.id.startsWith(wanted) || run.agents.some((agent) => meant.has(agent));
  return new Set(runs.flatMap((run, index) => (hit(run) ? [index] : [])));
}
