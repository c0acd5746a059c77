// The numbers of the chosen head, each with its error and its place among all heads.

const mostTelling = 3; // numbers, those in which a head is most unlike others; the rest is folded away

// The number of a role, where it has another name than the role.
const numberOfRole = { induction: 'after_same_token', positional: 'offset', uniform: 'entropy', broad: 'entropy' };
// How concentrated weights are: one fact, of which the first is among the most telling numbers.
const concentration = ['entropy', 'perplexity', 'squared_weights', 'largest_weight'];

function standingPanel() {
  const role = make('p', '', { className: 'standing-role' });
  const table = make('table', '', { className: 'standing' });
  const missing = make('div', '', { className: 'standing-missing' });
  const hint = make('p', 'A dot is a head, the ring is the chosen one, the bar through it two standard '
    + 'errors to either side. Ranks count from the largest, as an interval of likely ranks.', { className: 'hint' });
  const others = make('table', '', { className: 'standing' });
  const summary = make('summary');
  const more = make('details', '', {}, summary, others, hint);
  const element = make('div', '', { className: 'standing-panel' }, role, table, more, missing);
  const size = { width: 150, height: 18, margin: 7 };

  function strip({ values, errors, label }, layer, head) {
    const all = values.flat().filter((value) => value !== null);
    const value = values[layer][head];
    const error = errors?.[layer]?.[head] ?? null;
    const spread = value === null ? [] : [value - 2 * (error ?? 0), value + 2 * (error ?? 0)];
    let [low, high] = [Math.min(...all, ...spread), Math.max(...all, ...spread)];
    if (low > 0 && low < 0.5 * high) low = 0;
    const x = (number) => size.margin + (size.width - 2 * size.margin) * (
      high > low ? Math.max(0, Math.min(1, (number - low) / (high - low))) : 0.5
    );
    const middle = size.height / 2;
    const picture = svg(
      'svg', {
        class: 'strip', width: size.width, height: size.height, viewBox: `0 0 ${size.width} ${size.height}`,
        role: 'img', 'aria-label': `${label}: from ${shownNumber(low)} to ${shownNumber(high)} over all heads`,
      },
      svg('title', {}, `All heads: ${shownNumber(low)} to ${shownNumber(high)}`),
      svg('line', { class: 'axis-line', x1: 2, x2: size.width - 2, y1: middle, y2: middle }),
      // Round ends of lines without length are dots: one element for 1,024 heads. They lie
      // at seven heights, so that close ones can be distinguished.
      svg('path', {
        class: all.length > 200 ? 'strip-dots many' : 'strip-dots',
        d: all.map((number, rank) => `M${x(number).toFixed(1)} ${middle + 2.4 * ((3 * rank) % 7 - 3)}h0`).join(''),
      }),
    );
    if (value !== null && error !== null) {
      picture.append(svg('line', {
        class: 'strip-error', x1: x(value - 2 * error), x2: x(value + 2 * error), y1: middle, y2: middle,
      }));
    }
    if (value !== null) picture.append(svg('circle', { class: 'strip-chosen', cx: x(value), cy: middle, r: 5 }));
    return picture;
  }

  function row(number, layer, head, count) {
    const value = number.values[layer]?.[head] ?? null;
    const error = number.errors?.[layer]?.[head] ?? null;
    const ranks = number.ranks?.[layer]?.[head] ?? null;
    const said = value === null ? 'no value '
      : `${shownNumber(value)}${error === null ? '' : ` ± ${shownNumber(error)}`} `;
    const rank = ranks && ranks[0] !== null
      ? `rank ${ranks[0] === ranks[1] ? ranks[0] : `${ranks[0]}–${ranks[1]}`} of ${count}` : '';
    const words = shorten(inWords(number.name), 40);
    const name = make('th', words, { scope: 'row' });
    if (number.label && number.label !== number.name) name.append(make('small', shorten(number.label, 300), { className: 'meaning' }));
    return make(
      'tr', '', {}, name,
      make('td', said, { className: 'standing-value' }, make('small', shorten(number.unit, 24)), make('small', rank, { className: 'standing-rank' })),
      ...(count > 1 ? [make('td', '', {}, strip(number, layer, head))] : []),
    );
  }

  // How unlike other heads this one is in a number, in standard deviations; importance first.
  function distance({ values, ranks }, layer, head) {
    const all = values.flat().filter((value) => value !== null);
    const value = values[layer]?.[head] ?? null;
    if (value === null) return -1;
    const mean = all.reduce((sum, each) => sum + each, 0) / all.length;
    const spread = Math.sqrt(all.reduce((sum, each) => sum + (each - mean) ** 2, 0) / all.length);
    return (ranks ? 1e6 : 0) + (spread ? Math.abs(value - mean) / spread : 0);
  }

  return {
    element,
    update({ set, where }) {
      const own = set.roles?.[where.layer]?.[where.head];
      role.hidden = !set.roles;
      role.textContent = own
        ? `Role: ${roleWords(own.name)}${own.score === null ? '' : `, score ${shownNumber(own.score)}`}`
        : 'Role: none of the known ones';
      const count = set.layers.reduce((sum, { heads }) => sum + heads.length, 0);
      const ofRole = own && (numberOfRole[own.name] ?? own.name);
      const far = (number) => (number.name === ofRole ? Infinity : distance(number, where.layer, where.head));
      const sorted = [...set.numbers].sort((a, b) => far(b) - far(a) || 0);
      const one = sorted.find(({ name }) => concentration.includes(name));
      const telling = sorted.filter((number) => number === one || !concentration.includes(number.name))
        .slice(0, mostTelling);
      const rest = set.numbers.filter((number) => !telling.includes(number));
      hint.hidden = count < 2;
      const rows = (numbers) => numbers.map((number) => row(number, where.layer, where.head, count));
      table.replaceChildren(...rows(telling));
      others.replaceChildren(...rows(rest));
      summary.textContent = rest.length
        ? `${plural(rest.length, 'other number')}${count > 1 ? ', and how to read them' : ''}` : 'How to read them';
      table.hidden = !set.numbers.length;
      more.hidden = !rest.length && (count < 2 || !set.numbers.length);
      // Missing results, with the command that computes them: [[what, command]].
      missing.replaceChildren(...(set.missing ?? []).map(([what, command]) => (
        make('p', `${inWords(what)}${set.numbers.some(({ name }) => name === what) ? ' over many examples: ' : ': not computed. '}`, {}, make('code', command))
      )));
    },
  };
}

addPanel({
  name: 'standing',
  label: 'This head',
  create: standingPanel,
  shows: ({ set, layer, isOfHead }) => isOfHead && layer.heads.length > 0
    && Boolean(set.numbers.length || set.roles || set.missing?.length),
});
