// Lines between two columns of tokens: from each query to the keys that it attends to.

const lineLimits = {
  roomy: 40, // tokens, up to which all lines are drawn
  lines: 3000, // of all heads together
  strengths: 8,
  faintest: 0.005, // of the largest weight; weaker lines are left out
};

declareChoice('lines', '', (text) => (['1', '3', '10', 'all'].includes(text) ? text : undefined));
// The heads whose lines are drawn: "0.3.5", or "" for the chosen one alone.
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
  const element = make(
    'div', '', { className: 'view lines-view' },
    make('div', '', { className: 'view-controls' }, toggles, make('label', 'Of each query the ', {}, amount)),
    readout, scroller, hint,
  );

  let context = null;
  let heads = []; // [number in the layer, map] of the drawn heads
  let frame = null; // where all lies
  let pointed = null; // {side, bin} of the token whose lines are shown alone
  let drawn = ''; // what the drawing shows, to draw only what is new

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
        button.style.setProperty('--head', headColour(head));
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
    const pictures = context.example.images?.kind === 'positions' && !context.queries.pooled;
    const pitch = pictures ? 34 : Math.max(16, Math.min(34, Math.floor(520 / most)));
    const size = Math.max(12, Math.min(15, pitch - 5));
    const room = Math.max(280, Math.min(640, context.room.width - 24));
    const width = (side) => {
      if (pictures) return 66;
      let longest = 2;
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
      d: lines.join(''), fill: 'none', stroke: headColour(all[rank][0]),
      'stroke-width': width, 'stroke-opacity': ((strength + 0.7) / strengths).toFixed(2),
    })] : [])));
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
    for (let bin = 0; bin < axis(side).count; bin += 1) {
      const y = middle(bin);
      group.append(svg('rect', {
        x: isQuery ? 1 : left + between + 2, y: y - pitch / 2, rx: 2,
        width: (isQuery ? left : right) - 3, height: pitch - 1, fill: 'none',
      }));
      const picture = pictures ? pictureOf(context.example.images, axis(side).start(bin)) : null;
      if (picture) {
        group.append(svg('image', {
          href: picture, class: 'pixels', x: isQuery ? x - 30 : x, y: y - 15, width: 30, height: 30,
        }));
      }
      group.append(svg(
        'text', { x: x + (picture ? 34 * outwards : 0), y, dy: '.35em' },
        picture ? axis(side).positions(bin) : shorten(tokenLabel(side, bin), fits),
      ));
    }
    return group;
  }

  function draw() {
    frame = measure();
    const amountShown = amount.value === 'all' ? 0 : Number(amount.value);
    const all = heads.map(([head, map]) => [head, strongestLines(map, amountShown)]);
    const weights = Float64Array.from(all.flatMap(([, lines]) => lines.map((line) => line[2]))).sort();
    const largest = weights[weights.length - 1] ?? 1;
    const cut = weights[weights.length - lineLimits.lines] ?? 0;
    scroller.replaceChildren(svg(
      'svg', {
        class: 'lines', width: frame.width, height: frame.height,
        viewBox: `0 0 ${frame.width} ${frame.height}`, role: 'img',
        'aria-label': `Lines from ${context.queries.count} queries to ${context.keys.count} keys`,
      },
      svg('text', { class: 'lines-title', x: frame.left - 6, y: 15, 'text-anchor': 'end' }, 'query'),
      svg('text', { class: 'lines-title', x: frame.left + frame.between + 6, y: 15 }, 'key'),
      svg('g', { class: 'lines-all' }, ...paths(all.map(([head, lines]) => (
        [head, cut ? lines.filter((line) => line[2] >= cut) : lines]
      )), largest, 1.4)),
      svg('g', { class: 'lines-alone' }),
      column('query'),
      column('key'),
    ));
    hint.textContent = 'A line leads from a query to a key that it attends to; the fuller its colour, the '
      + `larger the weight, on the scale chosen above (full: ${shownWeight(largest)}). `
      + (cut ? `The ${shownInteger(lineLimits.lines)} largest are drawn, from ${shownWeight(cut)}. `
        : `Weights below ${shownWeight(lineLimits.faintest * largest)} are left out. `)
      + 'Point at a token to see its lines alone, click to choose it. Keys: up and down choose '
      + 'another token, left and right the other column.';
  }

  // Outlines the chosen token; shows the lines of the pointed one and shades what they reach.
  function mark() {
    const drawing = scroller.firstElementChild;
    const boxes = (side) => drawing.querySelectorAll(`.lines-${side} rect`);
    for (const box of drawing.querySelectorAll('rect')) {
      box.setAttribute('fill', 'none');
      box.removeAttribute('class');
    }
    const at = pointed ?? { side: chosenSide(), bin: context[chosenSide()] };
    boxes(chosenSide())[context[chosenSide()]]?.setAttribute('class', 'lines-chosen');
    const alone = [];
    const said = [];
    for (const [head, map] of heads) {
      const lines = [];
      for (let bin = 0; bin < axis(other(at.side)).count; bin += 1) {
        const [query, key] = at.side === 'query' ? [at.bin, bin] : [bin, at.bin];
        const weight = map.at(query, key);
        if (weight > 0) lines.push([query, key, weight, bin, head]);
      }
      lines.sort((a, b) => b[2] - a[2]);
      said.push(...lines.slice(0, 3));
      if (pointed && lines.length) {
        alone.push(...paths([[head, lines]], lines[0][2], 2));
        const targets = boxes(other(at.side));
        for (const [, , weight, bin] of lines) {
          if (targets[bin].getAttribute('fill') === 'none' || weight > Number(targets[bin].dataset.weight)) {
            targets[bin].setAttribute('fill', headColour(head));
            targets[bin].setAttribute('fill-opacity', (0.6 * weight / lines[0][2]).toFixed(2));
            targets[bin].dataset.weight = String(weight);
          }
        }
      }
    }
    drawing.querySelector('.lines-alone').replaceChildren(...alone);
    drawing.querySelector('.lines-all').setAttribute('opacity', pointed ? '0.08' : '1');
    said.sort((a, b) => b[2] - a[2]);
    readout.replaceChildren(
      `${at.side} `, ...placeNodes(axis(at.side), at.bin, 16),
      at.side === 'query' ? ' attends to ' : ' is attended to by ',
      ...said.slice(0, 3).flatMap(([, , weight, bin, head], rank) => [
        rank ? ', ' : '', ...placeNodes(axis(other(at.side)), bin, 16), ` ${shownWeight(weight)}`,
        heads.length > 1 ? ` (head ${shorten(context.layer.heads[head], 12)})` : '',
      ]),
      said.length ? '' : 'nothing',
    );
  }

  function tokenAt(event) {
    const box = scroller.firstElementChild.getBoundingClientRect();
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
      const { where, choice, queries, keys } = context;
      amount.value = choice.lines
        || (Math.max(queries.count, keys.count) > lineLimits.roomy ? '3' : 'all');
      const now = [where.set, where.example, where.layer, drawnHeads(), choice.zoom, amount.value,
        choice.scale, context.room.width].join();
      const chosen = context[chosenSide()];
      if (now === drawn) revealToken(chosen);
      else {
        const maps = drawnHeads().join() === String(where.head) ? null : context.heads();
        heads = drawnHeads().map((head) => [head, maps ? maps[head] : context.map]);
        pointed = null;
        drawToggles();
        draw();
        drawn = now;
      }
      scroller.setAttribute('aria-label', `Lines of ${context.layer.name}`);
      mark();
    },
  };
}

addView({
  name: 'lines', label: 'lines', create: linesView, shows: (context) => !context.signed,
});
