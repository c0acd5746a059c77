// The shown weights as a table for screen readers: a part around the chosen cell.

const mostRows = 24;
const mostColumns = 24;

function buildTable() {
  element('table-box').addEventListener('toggle', () => {
    if (shown.length) updateTable(shown[0].context);
  });
}

function updateTable(context) {
  if (!element('table-box').open) return;
  const part = (axis, chosen, most) => {
    const first = Math.max(0, Math.min(axis.count - most, chosen - Math.floor(most / 2)));
    return Array.from({ length: Math.min(most, axis.count) }, (_, bin) => first + bin);
  };
  const { map, queries, keys } = context;
  const rows = part(queries, context.query, mostRows);
  const columns = part(keys, context.key, mostColumns);
  const head = make('tr', '', {}, make('th', 'query \\ key', { scope: 'col' }), ...columns.map((key) => (
    make('th', place(keys, key), { scope: 'col' })
  )));
  const cell = (query, key) => (
    make('td', map.masked(query, key) ? 'masked' : shownWeight(map.at(query, key)))
  );
  element('table').replaceChildren(
    make('caption', `${nameOf(context.where)}: ${rows.length} of `
      + `${plural(queries.count, 'query', 'queries')} `
      + `and ${columns.length} of ${plural(keys.count, 'key')}, around the chosen ones`),
    make('thead', '', {}, head),
    make('tbody', '', {}, ...rows.map((query) => make(
      'tr', '', {}, make('th', place(queries, query), { scope: 'row' }),
      ...columns.map((key) => cell(query, key)),
    ))),
  );
}
