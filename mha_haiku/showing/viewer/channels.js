// Query-key view: which channels of a head make the score of a query and a key.

declareWord('channels', ['inOrder', 'byProduct']);

const unpackedChannels = new WeakMap(); // by an example's channels of a layer

// Queries and keys of a layer: {size, exact, query(head, position, channel), key(...)}.
async function readChannels(packed, numQueries, numKeys) {
  if (!unpackedChannels.has(packed)) {
    const signed = async (text) => new Int8Array((await unpackBytes(text)).buffer);
    const [queries, keys] = [await signed(packed.query), await signed(packed.key)];
    const { size } = packed;
    unpackedChannels.set(packed, {
      size,
      exact: packed.exact,
      query: (head, position, channel) => (
        packed.query_scale[head] * queries[(head * numQueries + position) * size + channel]
      ),
      key: (head, position, channel) => (
        packed.key_scale[head] * keys[(head * numKeys + position) * size + channel]
      ),
    });
  }
  return unpackedChannels.get(packed);
}

// The products of a query and all keys: {query [K], keys [S][K], products [S][K], scores [S],
// error: two standard deviations of what rounding to 8 bits does to the chosen score}.
function productsOf(read, packed, head, query, chosenKey, numKeys) {
  const channels = Array.from({ length: read.size }, (_, channel) => channel);
  const queryParts = channels.map((channel) => read.query(head, query, channel));
  const keys = Array.from({ length: numKeys }, (_, key) => (
    channels.map((channel) => read.key(head, key, channel))
  ));
  const products = keys.map((parts) => parts.map((part, channel) => part * queryParts[channel]));
  const sum = (parts) => parts.reduce((total, part) => total + part, 0);
  // Rounding to whole steps has the variance step ** 2 / 12.
  const [queryStep, keyStep] = [packed.query_scale[head], packed.key_scale[head]];
  return {
    query: queryParts,
    keys,
    products,
    scores: products.map(sum),
    error: 2 * Math.sqrt(sum(channels.map((channel) => (
      (queryParts[channel] * keyStep) ** 2 + (keys[chosenKey][channel] * queryStep) ** 2
    ))) / 12),
  };
}

function channelsView() {
  const order = make(
    'select', '', {},
    make('option', 'in order', { value: 'inOrder' }),
    make('option', 'largest product first', { value: 'byProduct' }),
  );
  const summary = make('p', '', { className: 'view-readout' });
  summary.setAttribute('aria-live', 'polite');
  const holder = make('div', '', { className: 'chart', tabIndex: 0 });
  holder.setAttribute('role', 'group');
  holder.setAttribute('aria-label', 'Channels; left and right read them, up and down choose another key');
  const warning = make('p', '', { className: 'warning' });
  const hint = make('p', '', { className: 'hint' });
  const element = make(
    'div', '', { className: 'view channels-view' },
    make('div', '', { className: 'view-controls' }, make('label', 'Channels ', {}, order)),
    summary, warning, holder, hint,
  );
  let context = null;
  let all = null; // products of the chosen query
  let ranked = []; // channels from left to right
  let frame = null;
  let pointed = null; // rank of the channel that is read

  const position = () => ({
    query: context.queries.start(context.query), key: context.keys.start(context.key),
  });

  function say() {
    const { query, key } = position();
    if (pointed === null) {
      summary.textContent = `query ${place(context.queries, context.query)} · key ${place(context.keys, context.key)}: `
        + `score ${shownNumber(all.scores[key])} (± ${shownNumber(all.error)} by rounding), `
        + (context.map.masked(context.query, context.key) ? 'but masked: no weight.'
          : `weight ${shownWeight(context.map.at(context.query, context.key))} after the softmax over keys.`);
      return;
    }
    const channel = ranked[pointed];
    summary.textContent = `channel ${channel}: query ${query} has ${shownNumber(all.query[channel])}, key ${key} has `
      + `${shownNumber(all.keys[key][channel])}; product ${shownNumber(all.products[key][channel])}`
      + ` of the score ${shownNumber(all.scores[key])}`;
  }

  function barStrip(name, values, top) {
    const height = 58;
    const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
    const zero = top + height / 2;
    const group = svg(
      'g', {},
      svg('text', { x: frame.left - 8, y: zero, dy: '.35em', 'text-anchor': 'end' }, name),
      svg('text', { class: 'small', x: frame.left + frame.width + 6, y: top + 9 }, shownNumber(largest)),
      svg('text', { class: 'small', x: frame.left + frame.width + 6, y: top + height - 2 }, shownNumber(-largest)),
      svg('line', { class: 'axis-line', x1: frame.left, x2: frame.left + frame.width, y1: zero, y2: zero }),
    );
    const paths = { above: [], below: [] };
    values.forEach((value, rank) => {
      const size = (height / 2 - 2) * Math.abs(value) / largest;
      paths[value < 0 ? 'below' : 'above'].push(
        `M${(frame.left + rank * frame.cell).toFixed(2)} ${zero}`
        + `v${(value < 0 ? size : -size).toFixed(2)}h${(frame.cell * 0.85).toFixed(2)}V${zero}Z`,
      );
    });
    for (const [sign, path] of Object.entries(paths)) {
      group.append(svg('path', { d: path.join(''), fill: colourText(signedColour(sign === 'below' ? -1 : 1)) }));
    }
    return group;
  }

  // Keys down, channels across, as an image of a pixel per product.
  function productImage(largest) {
    const canvas = document.createElement('canvas');
    canvas.width = ranked.length;
    canvas.height = all.products.length;
    const pixels = new ImageData(canvas.width, canvas.height);
    all.products.forEach((parts, key) => ranked.forEach((channel, rank) => {
      pixels.data.set(signedColour(parts[channel] / largest), 4 * (key * ranked.length + rank));
    }));
    canvas.getContext('2d').putImageData(pixels, 0, 0);
    return canvas.toDataURL();
  }

  function draw() {
    const { key } = position();
    const { keys, map } = context;
    const numKeys = all.products.length;
    const channels = [...all.query.keys()];
    ranked = order.value === 'inOrder' ? channels
      : channels.sort((a, b) => Math.abs(all.products[key][b]) - Math.abs(all.products[key][a]));
    const pitch = numKeys <= 30 ? 17 : Math.max(2, Math.floor(420 / numKeys));
    const labelled = pitch >= 12;
    const longest = Math.max(3, ...Array.from({ length: labelled ? numKeys : 0 }, (_, index) => (
      Math.min(14, [...keys.text(index).slice(0, 40)].length)
    )));
    const left = Math.max(56, 16 + 7.6 * longest);
    const cell = Math.max(2, Math.min(26, (Math.min(640, context.room.width - 24) - left - 76) / ranked.length));
    frame = { left, cell, width: cell * ranked.length, top: 236, pitch };
    const height = frame.top + pitch * numKeys + 24;
    const width = left + frame.width + 76;
    const largest = Math.max(...all.products.flat().map(Math.abs)) || 1;
    const picture = svg('svg', {
      class: 'channels', width, height, viewBox: `0 0 ${width} ${height}`, role: 'img',
      'aria-label': summary.textContent,
    });
    picture.append(
      barStrip('query', ranked.map((channel) => all.query[channel]), 6),
      barStrip('key', ranked.map((channel) => all.keys[key][channel]), 72),
      barStrip('product', ranked.map((channel) => all.products[key][channel]), 138),
      svg('text', { class: 'axis-name', x: left, y: 226 }, `products with all ${numKeys} keys`),
      svg('text', { class: 'axis-name', x: left + frame.width + 6, y: 226 }, 'weight'),
      svg('image', {
        class: 'pixels', href: productImage(largest), x: left, y: frame.top,
        width: frame.width, height: pitch * numKeys, preserveAspectRatio: 'none',
      }),
      svg('rect', { class: 'grid-frame', x: left, y: frame.top, width: frame.width, height: pitch * numKeys }),
    );
    const ticks = labelled ? [...Array(numKeys).keys()] : roundTicks(0, numKeys - 1, 8);
    for (const index of ticks) {
      const label = labelled ? shorten(keys.text(index) || String(index), 14) : String(index);
      picture.append(svg('text', {
        class: index === key ? 'chosen-text' : '', x: left - 6, y: frame.top + (index + 0.5) * pitch, dy: '.35em', 'text-anchor': 'end',
      }, label));
    }
    const weights = Array.from({ length: numKeys }, (_, index) => map.at(context.query, index));
    const most = Math.max(...weights.filter((weight) => weight > 0), 0) || 1;
    picture.append(svg('path', {
      class: 'bars',
      d: weights.map((weight, index) => (weight > 0
        ? `M${left + frame.width + 6} ${frame.top + index * pitch}h${(56 * weight / most).toFixed(2)}`
          + `v${pitch - (pitch > 4 ? 1 : 0)}h${(-56 * weight / most).toFixed(2)}Z` : '')).join(''),
    }));
    picture.append(
      svg('rect', {
        class: 'row-chosen', x: left - 1, y: frame.top + key * pitch - 1, width: frame.width + 2, height: pitch + 2,
      }),
      svg('text', { class: 'axis-name', x: left, y: height - 6 }, order.value === 'inOrder'
        ? `channel 0 to ${ranked.length - 1}` : 'channels, the largest product first'),
      svg('rect', { class: 'bar-pointed', y: 4, height: height - 26, width: cell, visibility: 'hidden' }),
    );
    holder.replaceChildren(picture);
  }

  function pointAt(rank) {
    pointed = rank === null ? null : Math.max(0, Math.min(ranked.length - 1, rank));
    const cursor = holder.querySelector('.bar-pointed');
    cursor.setAttribute('visibility', pointed === null ? 'hidden' : 'visible');
    if (pointed !== null) cursor.setAttribute('x', frame.left + pointed * frame.cell);
    say();
  }

  function cellAt(event) {
    const picture = holder.firstElementChild;
    const box = picture.getBoundingClientRect();
    const scale = picture.width.baseVal.value / box.width;
    const rank = Math.floor(((event.clientX - box.left) * scale - frame.left) / frame.cell);
    const key = Math.floor(((event.clientY - box.top) * scale - frame.top) / frame.pitch);
    return {
      rank: rank >= 0 && rank < ranked.length ? rank : null,
      key: key >= 0 && key < all.products.length ? key : null,
    };
  }

  order.addEventListener('change', () => context.choose({ channels: order.value }));
  holder.addEventListener('mousemove', (event) => pointAt(cellAt(event).rank));
  holder.addEventListener('mouseleave', () => pointAt(null));
  holder.addEventListener('click', (event) => {
    const { key } = cellAt(event);
    if (key !== null) context.choose({ key });
  });
  holder.addEventListener('keydown', (event) => {
    const [across, down] = {
      ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1],
    }[event.key] ?? [0, 0];
    if (!across && !down) return;
    event.preventDefault();
    if (across) pointAt(pointed === null ? 0 : pointed + across);
    else context.choose({ key: Math.max(0, Math.min(all.products.length - 1, position().key + down)) });
  });

  return {
    element,
    async update(wanted) {
      context = wanted;
      const { example, where, maps, choice } = context;
      const packed = example.channels[where.layer];
      const read = await readChannels(packed, maps.queries.count, maps.keys.count);
      if (context !== wanted) return;
      order.value = choice.channels;
      const { query, key } = position();
      all = productsOf(read, packed, where.head, query, key, maps.keys.count);
      warning.hidden = read.exact;
      warning.textContent = 'The score is more than this sum here: a bias, a soft cap or positions that depend on '
        + 'the distance come in as well, so the weights do not follow from the products alone.';
      hint.textContent = 'The score of a query and a key is the sum over channels of their products '
        + '(the query is scaled already). Red: above 0; blue: below 0. Each row of bars has a scale of '
        + 'its own. Click a row to choose its key.';
      pointed = null;
      say();
      draw();
    },
  };
}

addView({
  name: 'channels',
  label: 'query and key',
  create: channelsView,
  shows: ({ example, where, maps, choice, signed }) => (
    Boolean(example.channels?.[where.layer]) && !maps.queries.pooled && !maps.keys.pooled
    && !choice.zoom && !signed
  ),
});
