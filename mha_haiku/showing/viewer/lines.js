// Lines between two columns of tokens: from each query to the keys that it attends to.

const lineLimits = {
  roomy: 40, // tokens, up to which all lines are drawn
  lines: 3000, // of all heads together
  strengths: 8,
  faintest: 0.005, // of the largest weight; weaker lines are left out
};

declareChoice('lines', '', (text) => (['1', '3', '10', 'all'].includes(text) ? text : undefined));
// The heads whose lines are drawn: "0.3.5", or "" for only the chosen one.
declareChoice('heads', '', (text) => (/^(\d{1,4}(\.\d{1,4})*)?$/.test(text) ? text : undefined));

// Of each query the `most` strongest lines (0: all): [query, key, weight].
function strongestLines(map, most) {
  const lines = [];
  const least = lineLimits.faintest * map.largest;
  for (let query = 0; query < map.rows; query += 1) {
    const row = [];
    for (let key = 0; key < map.columns; key += 1) {
      const weight = map.at(query, key);
      const wanted = weight > 0 && weight >= least
        && !(most && row.length === most && weight <= row[most - 1][2]);
      if (wanted) {
        let rank = row.length;
        if (most) while (rank && row[rank - 1][2] < weight) rank -= 1;
        row.splice(rank, 0, [query, key, weight]);
        if (most && row.length > most) row.pop();
      }
    }
    lines.push(...row);
  }
  return lines;
}

// Dashes, which lie over the lines of weights, and the bands between them.
function alignedPath(d) {
  return svg('path', {
    d, class: 'aligned', fill: paintOfAligned, 'fill-opacity': 0.13,
    stroke: paintOfAligned, 'stroke-width': 2, 'stroke-dasharray': '5 4',
  });
}

// Aligned cells in blocks, [first query, last, first key, last]: neighboring queries that
// are aligned with the same run of keys.
function alignedBlocks(cells) {
  const blocks = [];
  const sorted = [...cells].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  for (const [query, key] of sorted) {
    const run = blocks.find((block) => block[0] === query && block[3] === key - 1);
    if (run) run[3] = key;
    else blocks.push([query, query, key, key]);
  }
  return blocks.reduce((kept, [query, , first, last]) => {
    const above = kept.find((block) => block[1] === query - 1 && block[2] === first && block[3] === last);
    if (above) above[1] = query;
    else kept.push([query, query, first, last]);
    return kept;
  }, []);
}

function linesView() {
  const toggles = make('div', '', { className: 'head-toggles' });
  toggles.setAttribute('role', 'group');
  toggles.setAttribute('aria-label', 'Heads whose lines are drawn');
  const amount = make('select');
  for (const [value, text] of [['1', 'largest weight'], ['3', '3 largest weights'],
    ['10', '10 largest weights'], ['all', 'all weights']]) amount.append(make('option', text, { value }));
  const scroller = make('div', '', { className: 'lines-scroller', tabIndex: 0 });
  scroller.setAttribute('role', 'group');
  const readout = make('p', '', { className: 'view-readout' });
  readout.setAttribute('aria-live', 'polite');
  const hint = make('p', '', { className: 'hint' });
  const legend = make(
    'p', '', { className: 'lines-legend' },
    svg('svg', { width: 34, height: 12, 'aria-hidden': 'true' }, alignedPath('M1 6H33')), ` ${alignedWords}`,
  );
  const element = make(
    'div', '', { className: 'view lines-view' },
    make('div', '', { className: 'view-controls' }, toggles, make('label', 'Of each query the ', {}, amount)),
    readout, legend, scroller, hint,
  );

  let context = null;
  let heads = []; // [number in the layer, map] of the drawn heads
  let frame = null; // where all lies
  let pointed = null; // {side, bin} of the token whose lines are shown alone
  let drawn = {}; // what the columns and the lines are of, to draw only what is new
  // The lines are a separate drawing below the tokens: fading it repaints nothing else.
  const back = svg('svg', { class: 'lines-back', 'aria-hidden': 'true' });
  const front = svg('svg', { class: 'lines', role: 'img' });
  const alone = svg('g', { class: 'lines-alone' });
  scroller.append(make('div', '', { className: 'lines-sheet' }, back, front));
  let boxes = {}; // by side, a rectangle behind each token
  let touched = []; // the rectangles that are filled or outlined

  const axis = (side) => (side === 'query' ? context.queries : context.keys);
  const other = (side) => (side === 'query' ? 'key' : 'query');
  const chosenSide = () => (context.choice.direction === 'to' ? 'key' : 'query');

  function drawnHeads() {
    const count = context.layer.heads.length;
    const wanted = context.choice.heads.split('.').filter(Boolean).map(Number);
    const kept = [...new Set(wanted)].filter((head) => head < count);
    return kept.length ? kept.sort((a, b) => a - b) : [context.where.head];
  }

  function drawToggles() {
    const names = context.layer.heads;
    const now = new Set(drawnHeads());
    const toggle = (text, changed, properties) => {
      const button = make('button', text, { type: 'button', className: 'head-toggle', ...properties });
      button.addEventListener('click', () => {
        const rank = [...toggles.children].indexOf(button);
        context.choose({ heads: changed() });
        toggles.children[rank]?.focus();
      });
      return button;
    };
    toggles.replaceChildren(
      make('span', names.length > 1 ? 'Heads' : 'Head'),
      ...names.map((name, head) => {
        const button = toggle(shorten(name, 12), () => {
          const next = new Set(now);
          if (!next.delete(head)) next.add(head);
          return [...next].join('.');
        }, { ariaPressed: String(now.has(head)) });
        button.style.setProperty('--head', headColor(head));
        return button;
      }),
    );
    if (names.length > 1) {
      toggles.append(
        toggle('all', () => [...names.keys()].join('.')),
        toggle('only the chosen', () => ''),
      );
    }
  }

  const tokenLabel = (side, bin) => {
    const text = axis(side).text(bin);
    if (!axis(side).pooled) return text || axis(side).positions(bin);
    return `${axis(side).start(bin)} ${text}`;
  };

  function measure() {
    const most = Math.max(context.queries.count, context.keys.count);
    const pictures = context.example.images && !context.keys.pooled;
    const pitch = pictures ? 34 : Math.max(16, Math.min(34, Math.floor(520 / most)));
    const size = Math.max(12, Math.min(15, pitch - 5));
    const room = Math.max(280, Math.min(640, context.room.width - 24));
    const width = (side) => {
      if (pictures && pictureOf(context.example, side, axis(side).start(0))) return 66;
      let longest = title(side).length * 0.8; // the word above, in smaller letters
      for (let bin = 0; bin < axis(side).count; bin += 1) {
        longest = Math.max(longest, [...tokenLabel(side, bin).slice(0, 80)].length);
      }
      return Math.min(10 + 0.61 * size * longest, room * 0.33);
    };
    const left = width('query');
    const right = width('key');
    const between = Math.min(room - left - right, Math.max(220, 34 * Math.sqrt(most) + 60));
    return {
      pitch, size, pictures, left, right, between, top: 26,
      width: left + between + right, height: 26 + pitch * most + 4,
    };
  }

  const title = (side) => axis(side).label || side;

  const middle = (bin) => frame.top + (bin + 0.5) * frame.pitch;

  // A few paths, one for each strength and head, the faintest below: thousands of elements
  // would be slow. `all`: [head, its lines].
  function paths(all, largest, width) {
    const { strengths } = lineLimits;
    const groups = Array.from({ length: strengths }, () => all.map(() => []));
    const [start, end] = [frame.left, frame.left + frame.between].map((x) => x.toFixed(1));
    all.forEach(([, lines], rank) => {
      for (const [query, key, weight] of lines) {
        const strength = Math.min(strengths - 1, Math.floor(strengths * shareOf(weight, largest)));
        groups[strength][rank].push(`M${start} ${middle(query)}L${end} ${middle(key)}`);
      }
    });
    return groups.flatMap((heads, strength) => heads.flatMap((lines, rank) => (lines.length ? [svg('path', {
      d: lines.join(''), fill: 'none', stroke: headColor(all[rank][0]),
      'stroke-width': width, 'stroke-opacity': ((strength + 0.7) / strengths).toFixed(2),
    })] : [])));
  }

  // A line for a pair of tokens, a band from several to several.
  function alignment(cells) {
    const [start, end, half] = [frame.left, frame.left + frame.between, frame.pitch / 2 - 2];
    const d = alignedBlocks(cells).map(([top, bottom, first, last]) => (
      top === bottom && first === last
        ? `M${start} ${middle(top)}L${end} ${middle(first)}`
        : `M${start} ${middle(top) - half}L${end} ${middle(first) - half}V${middle(last) + half}`
          + `L${start} ${middle(bottom) + half}Z`
    )).join('');
    return d ? [alignedPath(d)] : [];
  }

  function column(side) {
    const { left, between, right, pitch, pictures, size } = frame;
    const isQuery = side === 'query';
    const x = isQuery ? left - 6 : left + between + 6;
    const outwards = isQuery ? -1 : 1;
    const fits = Math.max(3, Math.floor(((isQuery ? left : right) - 8) / (size * 0.61)));
    const group = svg('g', {
      class: `lines-${side}`, 'font-size': size, 'text-anchor': isQuery ? 'end' : 'start',
    });
    boxes[side] = [];
    for (let bin = 0; bin < axis(side).count; bin += 1) {
      const y = middle(bin);
      boxes[side].push(svg('rect', {
        x: isQuery ? 1 : left + between + 2, y: y - pitch / 2, rx: 2,
        width: (isQuery ? left : right) - 3, height: pitch - 1, fill: 'none',
      }));
      group.append(boxes[side][bin]);
      const picture = pictures ? pictureOf(context.example, side, axis(side).start(bin)) : null;
      if (picture) {
        group.append(svg('image', {
          href: picture, class: 'pixels', x: isQuery ? x - 30 : x, y: y - 15, width: 30, height: 30,
        }));
      }
      group.append(svg(
        'text', {
          x: x + (picture ? 34 * outwards : 0), y, dy: '.35em', class: axis(side).isSpecial(bin) ? 'special' : '',
        },
        picture ? axis(side).positions(bin) : shorten(tokenLabel(side, bin), fits),
      ));
    }
    return group;
  }

  function drawColumns() {
    frame = measure();
    for (const drawing of [back, front]) {
      for (const [name, value] of Object.entries({
        width: frame.width, height: frame.height, viewBox: `0 0 ${frame.width} ${frame.height}`,
      })) drawing.setAttribute(name, value);
    }
    front.setAttribute('aria-label', `Lines from ${context.queries.count} queries to ${context.keys.count} keys`);
    touched = [];
    front.replaceChildren(
      svg('text', { class: 'lines-title', x: frame.left - 6, y: 15, 'text-anchor': 'end' }, title('query')),
      svg('text', { class: 'lines-title', x: frame.left + frame.between + 6, y: 15 }, title('key')),
      alone, column('query'), column('key'),
    );
  }

  function drawLines() {
    const most = amount.value === 'all' ? 0 : Number(amount.value);
    const all = heads.map(([head, map]) => [head, strongestLines(map, most)]);
    const weights = Float64Array.from(all.flatMap(([, lines]) => lines.map((line) => line[2]))).sort();
    const largest = weights[weights.length - 1] ?? 1;
    const cut = weights[weights.length - lineLimits.lines] ?? 0;
    back.replaceChildren(...paths(all.map(([head, lines]) => (
      [head, cut ? lines.filter((line) => line[2] >= cut) : lines]
    )), largest, 1.4), ...alignment(context.aligned));
    legend.hidden = !context.aligned.length;
    hint.textContent = 'A line leads from a query to a key that it attends to; the fuller its color, the '
      + `larger the weight, on the scale chosen above (full: ${shownWeight(largest)}). `
      + (cut ? `The ${shownInteger(lineLimits.lines)} largest are drawn, from ${shownWeight(cut)}. `
        : `Weights below ${shownWeight(lineLimits.faintest * largest)} are left out. `)
      + 'Point at a token to see its lines alone, click to choose it. Keys: up and down choose '
      + 'another token, left and right the other column.';
  }

  // The weights of a token with all of the other side, the largest first: [query, key,
  // weight, bin of the other side, head].
  function linesOf({ side, bin }, head, map) {
    const lines = [];
    for (let there = 0; there < axis(other(side)).count; there += 1) {
      const [query, key] = side === 'query' ? [bin, there] : [there, bin];
      const weight = map.at(query, key);
      if (weight > 0) lines.push([query, key, weight, there, head]);
    }
    return lines.sort((a, b) => b[2] - a[2]);
  }

  // Outlines the chosen token; shows the lines of the pointed one and shades their ends.
  function mark() {
    for (const box of touched) {
      box.setAttribute('fill', 'none');
      box.removeAttribute('class');
    }
    const at = pointed ?? { side: chosenSide(), bin: context[chosenSide()] };
    const chosen = boxes[chosenSide()][context[chosenSide()]];
    chosen.setAttribute('class', 'lines-chosen');
    touched = [chosen];
    const all = heads.map(([head, map]) => [head, linesOf(at, head, map)]);
    alone.replaceChildren(...(pointed ? all.flatMap(([head, lines]) => (
      lines.length ? paths([[head, lines]], lines[0][2], 2) : []
    )) : []));
    if (pointed) {
      const own = at.side === 'query' ? 0 : 1;
      alone.append(...alignment(context.aligned.filter((cell) => cell[own] === at.bin)));
    }
    back.classList.toggle('faded', Boolean(pointed));
    if (pointed) {
      const strongest = new Map(); // of each reached token the largest of its shares
      for (const [head, lines] of all) {
        for (const [, , weight, there] of lines) {
          const share = weight / lines[0][2];
          if (share > 0.03 && !(strongest.get(there)?.share >= share)) strongest.set(there, { share, head });
        }
      }
      for (const [there, { share, head }] of strongest) {
        const box = boxes[other(at.side)][there];
        box.setAttribute('fill', headColor(head));
        box.setAttribute('fill-opacity', (0.6 * share).toFixed(2));
        touched.push(box);
      }
    }
    const said = all.flatMap(([, lines]) => lines.slice(0, 3)).sort((a, b) => b[2] - a[2]).slice(0, 3);
    readout.replaceChildren(
      `${at.side} `, ...placeNodes(axis(at.side), at.bin, 16),
      at.side === 'query' ? ' attends to ' : ' is attended to by ',
      ...said.flatMap(([, , weight, there, head], rank) => [
        rank ? ', ' : '', ...placeNodes(axis(other(at.side)), there, 16), ` ${shownWeight(weight)}`,
        heads.length > 1 ? ` (head ${shorten(context.layer.heads[head], 12)})` : '',
      ]),
      said.length ? '' : 'nothing',
    );
  }

  function tokenAt(event) {
    const box = front.getBoundingClientRect();
    const x = (event.clientX - box.left) * frame.width / box.width;
    const bin = Math.floor(((event.clientY - box.top) * frame.width / box.width - frame.top) / frame.pitch);
    const side = x < frame.left ? 'query' : x > frame.left + frame.between ? 'key' : null;
    return side && bin >= 0 && bin < axis(side).count ? { side, bin } : null;
  }

  function showAlone(at) {
    if (at?.side === pointed?.side && at?.bin === pointed?.bin) return;
    pointed = at;
    mark();
  }

  function revealToken(bin) {
    const below = middle(bin) - scroller.scrollTop;
    if (below < frame.pitch || below > scroller.clientHeight - frame.pitch) {
      scroller.scrollTop += below - scroller.clientHeight / 2;
    }
  }

  const chooseToken = ({ side, bin }) => context.choose({
    [side]: axis(side).start(bin), direction: side === 'query' ? 'from' : 'to',
  });

  amount.addEventListener('change', () => context.choose({ lines: amount.value }));
  scroller.addEventListener('mousemove', (event) => showAlone(tokenAt(event)));
  scroller.addEventListener('mouseleave', () => showAlone(null));
  scroller.addEventListener('blur', () => showAlone(null));
  scroller.addEventListener('click', (event) => {
    const at = tokenAt(event);
    if (at) chooseToken(at);
  });
  scroller.addEventListener('keydown', (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, ArrowLeft: 0, ArrowRight: 0 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const side = { ArrowLeft: 'query', ArrowRight: 'key' }[event.key] ?? chosenSide();
    const bin = Math.max(0, Math.min(axis(side).count - 1, context[side] + step));
    pointed = { side, bin };
    chooseToken(pointed);
  });

  return {
    element,
    update(wanted) {
      context = wanted;
      const { where, choice, queries, keys, maps } = context;
      amount.value = choice.lines
        || (Math.max(queries.count, keys.count) > lineLimits.roomy ? '3' : 'all');
      scroller.setAttribute('aria-label', `Lines of ${shorten(context.layer.name, 60)}`);
      const columns = [
        where.set, where.example, context.layer.kind, queries.count, keys.count, context.room.width,
      ].join();
      const shown = drawnHeads();
      const lines = [columns, where.layer, shown, amount.value, choice.scale].join();
      const sameColumns = columns === drawn.columns;
      if (!sameColumns) drawColumns();
      if (lines !== drawn.lines) {
        heads = shown.map((head) => [head, maps.layers[where.layer][head]]);
        pointed = null;
        drawLines();
      }
      drawn = { columns, lines };
      drawToggles();
      if (sameColumns) revealToken(context[chosenSide()]);
      mark();
    },
  };
}

addView({
  name: 'lines', label: 'lines', create: linesView, shows: (context) => !context.signed,
});
