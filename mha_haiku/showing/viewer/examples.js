// Where the chosen head attends most in the inputs of this page, one place of each input.

const mostPlaces = 5;
const wordsBefore = 8;

// The largest weight of a map, of queries that see several keys: that of one key is always 1.
function strongestCell(map) {
  let best = null;
  for (let query = 0; query < map.rows; query += 1) {
    let [seen, largest, at] = [0, -Infinity, 0];
    for (let key = 0; key < map.columns; key += 1) {
      const weight = map.at(query, key);
      if (map.masked(query, key) || Number.isNaN(weight)) continue;
      seen += 1;
      if (weight > largest) [largest, at] = [weight, key];
    }
    if (seen > 1 && (!best || largest > best.weight)) best = { query, key: at, weight: largest };
  }
  return best;
}

function examplesPanel() {
  const table = make('table', '', { className: 'answers' });
  const scroll = make('div', '', { className: 'scroll', tabIndex: 0 }, table);
  scroll.setAttribute('role', 'region');
  scroll.setAttribute('aria-label', 'Where the head attends most');
  const hint = make('p', 'The largest weight in each input of this page; a click goes there.', { className: 'hint' });
  const element = make('div', '', { className: 'answers-panel examples' }, scroll, hint);
  let asked = '';

  function row(context, [example, { query, key, weight }, { queries, keys }]) {
    const word = (axis, bin) => shorten(axis.text(bin), 24) || axis.positions(bin);
    const before = Array.from({ length: Math.min(wordsBefore, query) }, (_, i) => word(queries, query - Math.min(wordsBefore, query) + i));
    const go = make('button', `${word(queries, query)} → ${word(keys, key)}`, { type: 'button', className: 'why-head' });
    go.addEventListener('click', () => context.choose({
      example, query: queries.start(query), key: keys.start(key), of: 'head', direction: 'from',
    }));
    return make(
      'tr', '', {}, make('td', shownWeight(weight)), make('td', '', {}, go),
      make('td', before.length ? `${before.join(' ')} ` : '', { className: 'said-before' }, make('strong', word(queries, query))),
    );
  }

  return {
    element,
    async update(context) {
      const { set, layer, head } = context.where;
      asked = [set, layer, head, choice.special].join();
      const now = asked;
      const inputs = page.sets[set].examples.flatMap(({ is_mean: isMean }, at) => (isMean ? [] : [at]));
      await Promise.all(inputs.map((example) => unpack(set, example)));
      if (now !== asked) return; // another head was chosen meanwhile
      const places = inputs.map((example) => {
        const maps = mapsAt({ set, example, layer });
        return [example, strongestCell(maps.layers[layer][head]), maps];
      }).filter(([, cell]) => cell).sort(([, a], [, b]) => b.weight - a.weight).slice(0, mostPlaces);
      table.replaceChildren(
        make('tr', '', {}, ...['weight', 'query → key', 'the text up to the query'].map((text) => make('th', text, { scope: 'col' }))),
        ...places.map((each) => row(context, each)),
      );
    },
  };
}

addPanel({
  name: 'examples',
  label: 'Where it attends most',
  create: examplesPanel,
  shows: ({ set, isOfHead, layer }) => isOfHead && layer.heads.length > 0
    && set.examples.filter((example) => !example.is_mean).length > 1,
});
