// Why the chosen head looks from the chosen query to the chosen key: the largest terms of
// the score, pairs of components. A component that is a head leads to that head, at the
// position that it wrote at.

const whyCells = new WeakMap(); // by what an example says of it: "layer,head,query,key" -> place

function whyCell(why, ...place) {
  if (!whyCells.has(why)) whyCells.set(why, new Map(why.cells.map((cell, at) => [String(cell), at])));
  return whyCells.get(why).get(String(place));
}

function whyPanel() {
  const summary = make('p');
  summary.setAttribute('aria-live', 'polite');
  const table = make('table', '', { className: 'answers' });
  const scroll = make('div', '', { className: 'scroll', tabIndex: 0 }, table);
  scroll.setAttribute('role', 'region');
  scroll.setAttribute('aria-label', 'Terms of the score');
  const hint = make('p', 'Held: the factors of norms. Scores are those before softmax and soft caps; '
    + 'a head leads to that head.', { className: 'hint' });

  // A component, as a button if it is a shown head.
  function side(context, name, position) {
    const found = /^layer (\d+), head (\d+)/.exec(name);
    const layer = found && Number(found[1]);
    const head = found && (context.set.layers[layer]?.heads.indexOf(found[2]) ?? -1);
    if (!found || head < 0) return make('td', name);
    const button = make('button', name, { type: 'button', className: 'why-head' });
    button.addEventListener('click', () => {
      context.choose({ layer, head, query: position, direction: 'from' }, true);
    });
    return make('td', '', {}, button);
  }

  return {
    element: make('div', '', { className: 'answers-panel' }, summary, scroll, hint),
    update(context) {
      const { why } = context.example;
      const { layer, head } = context.where;
      const [query, key] = [context.choice.query, context.choice.key];
      const at = whyCell(why, layer, head, query, key);
      table.replaceChildren();
      if (at === undefined) {
        summary.textContent = `Of query ${query} and key ${key} no terms are kept: they are of the keys that a head looks at most.`;
        return;
      }
      const name = (axis, position) => place(axis, axis.bin(position));
      summary.textContent = `Query ${name(context.queries, query)}, key ${name(context.keys, key)}: score ${shownNumber(why.scores[at][0], 4)}, of which`;
      table.append(make(
        'tr', '', {},
        ...['term', 'at the query', 'at the key'].map((text) => make('th', text, { scope: 'col' })),
      ));
      why.pairs[at].forEach(([first, second], rank) => {
        table.append(make(
          'tr', '', {}, make('td', shownNumber(why.terms[at][rank], 4)),
          side(context, why.components[first], query), side(context, why.components[second], key),
        ));
      });
    },
  };
}

addPanel({
  name: 'why', label: 'Why it looks there', create: whyPanel, shows: ({ example, isOfHead }) => isOfHead && Boolean(example.why),
});
