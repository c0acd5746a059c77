// The context of a view: the chosen map, its surroundings, and how to change the choice.

// `where`: {set, example, layer, head}; `room`: {width, height} in CSS pixels.
function contextOf(where, room) {
  const set = page.sets[where.set];
  const all = mapsAt(where);
  const map = shownMap(where, all);
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
    map, // of the chosen head, a mean over heads, or a Difference
    isOfHead: shownHeads() === 'head',
    end: scaleEnd(map, all), // of the color scale
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

// The shown heads: the text has a mean over several if that is chosen.
const shownHeads = () => (choice.view === 'text' ? choice.of : 'head');

// Whether a layer's maps lie along the same axes as the chosen layer's.
const isLike = ({ axes, queries, keys }, layer) => axes[layer].queries === queries && axes[layer].keys === keys;

// `all`: as `mapsAt` returns it.
function shownMap({ layer, head }, all) {
  if (shownHeads() === 'head') return all.layers[layer][head];
  const isShown = (_, at) => (shownHeads() === 'layer' ? at === layer : isLike(all, at));
  return new MeanMap(all.layers.filter(isShown).flat());
}

// The cells of a map that hold an aligned pair of positions, each once.
function alignedCells({ alignment }, { queries, keys }) {
  const cells = new Map();
  const isShown = ({ kept }, position) => !kept || kept.includes(position);
  for (const [query, key] of alignment ?? []) {
    if (!isShown(queries, query) || !isShown(keys, key)) continue;
    const cell = [queries.bin(query), keys.bin(key)];
    cells.set(String(cell), cell);
  }
  return [...cells.values()];
}
