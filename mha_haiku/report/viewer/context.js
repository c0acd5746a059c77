// What a view is told: the chosen map, what lies around it, and how to change the choice.

// `where`: {set, example, layer, head}; `room`: {width, height} in CSS pixels.
function contextOf(where, room) {
  const set = page.sets[where.set];
  const all = unpacked(where.set, where.example);
  const map = gridOf(all, where.layer, where.head, choice.zoom);
  return withScale({
    page,
    choice,
    where,
    room,
    set,
    example: set.examples[where.example],
    layer: set.layers[where.layer],
    maps: all, // {queries, keys, layers, patches}, whole
    map, // {rows, columns, largest, at(q, k), masked(q, k), queries, keys}: the window
    queries: map.queries,
    keys: map.keys,
    query: map.queries.bin(choice.query), // the chosen cell, in bins of the window
    key: map.keys.bin(choice.key),
    // All heads of the layer, on the axes of the chosen one.
    heads: () => all.layers[where.layer].map((_, head) => (
      gridOf(all, where.layer, head, choice.zoom, map.queries, map.keys)
    )),
    choose,
    point,
  });
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
