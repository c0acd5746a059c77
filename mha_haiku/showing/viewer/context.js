// What a view is told: the chosen map, what lies around it, and how to change the choice.

// `where`: {set, example, layer, head}; `room`: {width, height} in CSS pixels.
function contextOf(where, room) {
  const set = page.sets[where.set];
  const all = mapsAt(where);
  const map = all.layers[where.layer][where.head];
  const example = exampleOf(where);
  const aligned = alignedCells(example, map);
  const names = new Set(aligned.map(String));
  return {
    page,
    choice,
    where,
    room,
    set,
    example, // with the axes and answers of the layer's kind
    layer: set.layers[where.layer],
    maps: all, // {queries, keys, axes, layers}; see `mapsAt`
    map, // the chosen HeadMap, or a Difference
    end: scaleEnd(map), // of the colour scale
    signed: map.signed,
    queries: map.queries,
    keys: map.keys,
    query: map.queries.bin(choice.query), // the chosen cell, in bins
    key: map.keys.bin(choice.key),
    aligned, // cells [query, key] in which the task knows that the query should look
    isAligned: (query, key) => names.has(`${query},${key}`),
    choose,
    point,
  };
}

// The cells of a map that hold an aligned pair of positions, each once.
function alignedCells({ alignment }, { queries, keys }) {
  const cells = new Map();
  for (const [query, key] of alignment ?? []) {
    const cell = [queries.bin(query), keys.bin(key)];
    cells.set(String(cell), cell);
  }
  return [...cells.values()];
}
