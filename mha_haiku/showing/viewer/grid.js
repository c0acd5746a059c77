// The part of a map that is shown, at the finest grain there is for its room.
//
// Where a head has finer patches, the grid has the edges of all maps together, so
// its bins differ in length; a cell has the weight of the finest map that covers it.

const fewestPixels = 2; // a patch is used once its cells are about as large as that
const roomInPixels = 560;

class Grid {
  constructor(queries, keys) {
    Object.assign(this, { queries, keys, rows: queries.count, columns: keys.count });
    this.weights = new Float32Array(this.rows * this.columns);
    this.forbidden = new Uint8Array(this.rows * this.columns);
    this.largest = 0;
    this.numNaN = 0;
    this.numMasked = 0;
    this.signed = page.signed;
  }

  at(query, key) { return this.weights[query * this.columns + key]; }

  masked(query, key) { return this.forbidden[query * this.columns + key] === 1; }

}

// A head's map and its patches that are legible in the window, coarse ones first.
function mapsOf(example, layer, head, zoom) {
  const base = example.layers[layer][head];
  const [top, bottom, left, right] = zoom ?? [0, base.queries.last, 0, base.keys.last];
  const size = ({ queries, keys }) => (
    (queries.last - queries.first) / queries.count + (keys.last - keys.first) / keys.count
  );
  const legible = ({ queries, keys }) => (
    queries.first < bottom && queries.last > top && keys.first < right && keys.last > left
    && ((queries.last - queries.first) / queries.count) * roomInPixels >= fewestPixels * (bottom - top)
    && ((keys.last - keys.first) / keys.count) * roomInPixels >= fewestPixels * (right - left)
  );
  const finer = example.patches
    .filter((patch) => patch.layer === layer && patch.head === head && legible(patch.map))
    .map((patch) => patch.map);
  return [base, ...finer.sort((a, b) => size(b) - size(a))];
}

// The edges of all maps inside [from, to): the first and the last bin are whole.
function joinedEdges(axes, from, to) {
  const base = axes[0];
  const wanted = new Set(base.edges.slice(base.bin(from), base.bin(to - 1) + 2));
  for (const axis of axes.slice(1)) axis.edges.forEach((edge) => wanted.add(edge));
  // In a window inside of a finer map no more than the window is shown.
  const inside = axes.length > 1;
  const kept = [...wanted].filter((edge) => !inside || (edge > from && edge < to));
  if (inside) kept.push(from, to);
  return [...new Set(kept)].sort((a, b) => a - b);
}

// The grid of a head in a window; of other axes than its own if `queries`, `keys` are given.
function gridOf(example, layer, head, zoom, queries = null, keys = null) {
  const maps = mapsOf(example, layer, head, zoom);
  const [top, bottom, left, right] = zoom ?? [0, maps[0].queries.last, 0, maps[0].keys.last];
  const axes = (name) => maps.map((map) => map[name]);
  const grid = new Grid(
    queries ?? maps[0].queries.binned(joinedEdges(axes('queries'), top, bottom)),
    keys ?? maps[0].keys.binned(joinedEdges(axes('keys'), left, right)),
  );
  for (const map of maps) fillGrid(grid, map);
  return countGrid(grid);
}

// Writes a map's weights into the grid's cells that it covers.
function fillGrid(grid, map) {
  const bins = (axis, own) => Array.from({ length: axis.count }, (_, bin) => {
    const position = axis.start(bin);
    return position < own.first || position >= own.last ? -1 : own.bin(position);
  });
  const columns = bins(grid.keys, map.keys);
  bins(grid.queries, map.queries).forEach((row, query) => {
    if (row < 0) return;
    for (let key = 0; key < grid.columns; key += 1) {
      if (columns[key] >= 0) {
        const cell = query * grid.columns + key;
        grid.weights[cell] = map.at(row, columns[key]);
        grid.forbidden[cell] = Number(map.masked(row, columns[key]));
      }
    }
  });
}

function countGrid(grid) {
  grid.weights.forEach((weight, cell) => {
    if (grid.forbidden[cell]) grid.numMasked += 1;
    else if (Number.isNaN(weight)) grid.numNaN += 1;
    else grid.largest = Math.max(grid.largest, Math.abs(weight));
  });
  return grid;
}

// One grid less another of the same axes; masked where either is.
function difference(first, second) {
  const grid = new Grid(first.queries, first.keys);
  grid.signed = true;
  first.weights.forEach((weight, cell) => {
    grid.weights[cell] = weight - second.weights[cell];
    grid.forbidden[cell] = first.forbidden[cell] && second.forbidden[cell];
  });
  return countGrid(grid);
}
