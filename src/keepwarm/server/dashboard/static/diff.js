// A word-by-word diff of two short texts.

export function diff(before, after) {
  const [a, b] = [split(before), split(after)];
  const common = lengths(a, b);
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) add(parts, "same", a[(j += 1, i++)]);
    else if (j >= b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) add(parts, "del", a[i++]);
    else add(parts, "ins", b[j++]);
  }
  return parts;
}

const split = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

// Length of the longest common subsequence of a[i:] and b[j:], for every i and j.
function lengths(a, b) {
  const table = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  return table;
}

function add(parts, kind, text) {
  const last = parts[parts.length - 1];
  if (last?.kind === kind) last.text += text;
  else parts.push({ kind, text });
}
