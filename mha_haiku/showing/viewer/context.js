// What a view is told: the chosen map, what lies around it, and how to change the choice.

// `where`: {set, example, layer, head}; `room`: {width, height} in CSS pixels.
function contextOf(where, room) {
  const set = page.sets[where.set];
  const all = mapsAt(where);
  // The window is one of the chosen layer's positions.
  const isSameKind = set.layers[where.layer].kind === page.sets[choice.set].layers[choice.layer].kind;
  const zoom = isSameKind ? choice.zoom : null;
  const map = gridOf(all, where.layer, where.head, zoom);
  const example = exampleOf(where);
  const aligned = alignedCells(example, map);
  const names = new Set(aligned.map(String));
  return withScale({
    page,
    choice,
    where,
    room,
    set,
    example, // with the axes and answers of the layer's kind
    layer: set.layers[where.layer],
    maps: all, // {queries, keys, axes, layers, patches}, whole; see `mapsAt`
    map, // {rows, columns, largest, at(q, k), masked(q, k), queries, keys}: the window
    queries: map.queries,
    keys: map.keys,
    query: map.queries.bin(choice.query), // the chosen cell, in bins of the window
    key: map.keys.bin(choice.key),
    aligned, // cells [query, key] in which the task knows that the query should look
    isAligned: (query, key) => names.has(`${query},${key}`),
    // All heads of the layer, on the axes of the chosen one.
    heads: () => all.layers[where.layer].map((_, head) => (
      gridOf(all, where.layer, head, zoom, map.queries, map.keys)
    )),
    choose,
    point,
  });
}

// The cells of a map that hold an aligned pair of positions, each once.
function alignedCells({ alignment }, { queries, keys }) {
  const cells = new Map();
  for (const [query, key] of alignment ?? []) {
    const within = query >= queries.first && query < queries.last
      && key >= keys.first && key < keys.last;
    const cell = [queries.bin(query), keys.bin(key)];
    if (within) cells.set(String(cell), cell);
  }
  return [...cells.values()];
}

function withScale(context) {
  const end = scaleEnd(context.map);
  return Object.assign(context, {
    end,
    signed: context.map.signed,
    share: (weight) => shareOf(weight, end),
    colour: (weight) => colourOf(shareOf(weight, end), context.map.signed),
  });
}
