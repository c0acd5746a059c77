// From weights to shares of the colour scale: its end, and linear, root, log or clipped.

const decades = 4; // of a log scale: what is smaller has the colour of 0
const clippedAt = 0.99;
const ends = new Map();

// The weight at the end of the scale. `map`: the chosen one, for a range of its own.
function scaleEnd(map) {
  const own = choice.range === 'own' || map.signed;
  if (choice.scale !== 'clipped') return (own ? map.largest : page.largest) || 1;
  if (own) return quantile(weightsOf(map, 65536)) || map.largest || 1;
  const name = `${choice.set}.${choice.example}`;
  if (!ends.has(name)) {
    const heads = unpacked(choice.set, choice.example).layers.flat();
    const most = Math.max(256, Math.floor(200000 / Math.max(1, heads.length)));
    ends.set(name, quantile(heads.flatMap((head) => weightsOf(head, most))));
  }
  return ends.get(name) || page.largest || 1;
}

function quantile(weights) {
  const sorted = Float32Array.from(weights).sort();
  return sorted[Math.min(sorted.length - 1, Math.ceil(clippedAt * sorted.length))] ?? 0;
}

// Weights of cells that may be attended to, evenly strewn if there are many.
function weightsOf(map, most) {
  const cells = map.rows * map.columns;
  // A step without a common divisor with the row length meets all columns.
  let step = Math.ceil(cells / most);
  while (step > 1 && map.columns % step === 0) step += 1;
  const weights = [];
  for (let cell = 0; cell < cells; cell += step) {
    const [query, key] = [Math.floor(cell / map.columns), cell % map.columns];
    const weight = Math.abs(map.at(query, key));
    if (weight >= 0 && !map.masked(query, key)) weights.push(weight);
  }
  return weights;
}

// The share, 0 to 1 (a difference: -1 to 1), that a weight has of the scale.
function shareOf(weight, end) {
  const share = Math.min(1, Math.abs(weight) / end);
  const sign = weight < 0 ? -1 : 1;
  if (choice.scale === 'root') return sign * Math.sqrt(share);
  if (choice.scale === 'log') return sign * Math.max(0, 1 + Math.log10(share || 1e-30) / decades);
  return sign * share;
}

// The weight that has a share: what a legend says below its bar.
function weightOf(share, end) {
  if (choice.scale === 'root') return end * share ** 2;
  if (choice.scale === 'log') return share > 0 ? end * 10 ** (decades * (share - 1)) : 0;
  return end * share;
}
