// How far back a head looks: its weights by the distance from the query to the key.

const mostDistanceBars = 160;

// Mass by distance t - s, of the shown weights and of a head that attends evenly to all
// keys that it may attend to. A mean over queries; queries without weights do not count.
// Of a pooled cell all mass lies at the distance between the middles of its bins.
function distances(map, queries, keys) {
  const centre = (axis, index) => (axis.start(index) + axis.stop(index) - 1) / 2;
  const size = (axis, index) => axis.stop(index) - axis.start(index);
  let widest = 1;
  for (let index = 0; index < keys.count; index += 1) widest = Math.max(widest, size(keys, index));
  for (let index = 0; index < queries.count; index += 1) widest = Math.max(widest, size(queries, index));
  const low = centre(queries, 0) - centre(keys, keys.count - 1);
  const high = centre(queries, queries.count - 1) - centre(keys, 0);
  // Bars of one width, so wide that there are not too many, one with its middle on 0. Of
  // pooled maps a multiple of the bins', or they would hold more and fewer of them in turn.
  const width = widest * Math.ceil((high - low + 1) / widest / mostDistanceBars);
  const first = Math.round(low / width);
  const count = Math.round(high / width) - first + 1;
  const mass = new Float64Array(count);
  const even = new Float64Array(count);
  let total = 0;
  let mean = 0;
  let evenMean = 0;
  let lost = 0;
  const keySizes = Array.from({ length: keys.count }, (_, key) => size(keys, key));
  const keyCentres = Array.from({ length: keys.count }, (_, key) => centre(keys, key));
  for (let query = 0; query < queries.count; query += 1) {
    const weight = size(queries, query);
    const at = centre(queries, query);
    let seen = 0;
    let finite = true;
    let some = false;
    for (let key = 0; key < keys.count; key += 1) {
      if (map.masked(query, key)) continue;
      seen += keySizes[key];
      const cell = map.at(query, key);
      if (Number.isNaN(cell)) finite = false;
      some ||= cell > 0;
    }
    if (!finite || !some) { lost += weight; continue; }
    total += weight;
    for (let key = 0; key < keys.count; key += 1) {
      if (map.masked(query, key)) continue;
      const distance = at - keyCentres[key];
      const bar = Math.round(distance / width) - first;
      const cell = weight * map.at(query, key);
      const flat = weight * keySizes[key] / seen;
      mass[bar] += cell;
      even[bar] += flat;
      mean += cell * distance;
      evenMean += flat * distance;
    }
  }
  const scale = total || 1;
  return {
    width, first, lost, total,
    mass: mass.map((value) => value / scale),
    even: even.map((value) => value / scale),
    mean: mean / scale,
    evenMean: evenMean / scale,
    pooled: widest > 1,
  };
}

function distancesView() {
  const summary = make('p', '', { className: 'view-readout' });
  const holder = make('div', '', { className: 'chart', tabIndex: 0 });
  const hint = make('p', '', { className: 'hint' });
  const element = make('div', '', { className: 'view distances-view' });
  element.append(summary, holder, hint);
  let pointed = null;
  let result = null;
  let said = '';

  const rangeText = (bar) => {
    const { width, first } = result;
    const low = Math.ceil((first + bar - 0.5) * width);
    const high = Math.ceil((first + bar + 0.5) * width) - 1;
    return (low === high ? String(low) : `${low} to ${high}`).replaceAll('-', '−');
  };
  const sayBar = (bar) => {
    summary.textContent = bar === null ? said
      : `distance ${rangeText(bar)}: ${shownWeight(result.mass[bar])} of the mass; attending evenly: ${shownWeight(result.even[bar])}`;
  };

  function draw(context) {
    const { mass, even, width, first } = result;
    // Bars without mass at both ends, of masked keys, are left out.
    let start = 0;
    let stop = mass.length;
    while (stop - start > 8 && !mass[start] && !even[start]) start += 1;
    while (stop - start > 8 && !mass[stop - 1] && !even[stop - 1]) stop -= 1;
    const count = stop - start;
    const frame = { left: 46, top: 12, width: Math.max(220, Math.min(560, context.room.width - 80)), height: 190 };
    const top = Math.max(...mass, ...even) || 1;
    const ticks = roundTicks(0, top, 4);
    const x = (bar) => frame.left + (bar - start) * frame.width / count;
    const y = (value) => frame.top + frame.height * (1 - value / top);
    const picture = svg('svg', {
      width: frame.left + frame.width + 14, height: frame.top + frame.height + 42,
      viewBox: `0 0 ${frame.left + frame.width + 14} ${frame.top + frame.height + 42}`,
      role: 'img', 'aria-label': said, class: 'distances',
    });
    for (const tick of ticks) {
      picture.append(
        svg('line', { class: 'grid-line', x1: frame.left, x2: frame.left + frame.width, y1: y(tick), y2: y(tick) }),
        svg('text', { x: frame.left - 5, y: y(tick), dy: '.35em', 'text-anchor': 'end' }, String(tick)),
      );
    }
    const bars = [];
    const line = [];
    const gap = frame.width / count > 4 ? 1 : 0;
    for (let bar = start; bar < stop; bar += 1) {
      if (mass[bar] > 0) {
        bars.push(`M${x(bar).toFixed(2)} ${y(0)}V${y(mass[bar]).toFixed(2)}H${(x(bar + 1) - gap).toFixed(2)}V${y(0)}Z`);
      }
      line.push(`${line.length ? 'L' : 'M'}${x(bar).toFixed(2)} ${y(even[bar]).toFixed(2)}H${x(bar + 1).toFixed(2)}`);
    }
    picture.append(
      svg('path', { class: 'bars', d: bars.join('') }),
      svg('path', { class: 'even-line', d: line.join('') }),
      svg('line', { class: 'axis-line', x1: frame.left, x2: frame.left + frame.width, y1: y(0), y2: y(0) }),
    );
    // A tick stands at the middle of the bar that holds its distance.
    for (const tick of roundTicks((first + start) * width, (first + stop - 1) * width, Math.max(3, Math.floor(frame.width / 60)))) {
      const at = x(tick / width - first + 0.5);
      if (!Number.isInteger(tick) || at < frame.left || at > frame.left + frame.width) continue;
      picture.append(
        svg('line', { class: 'axis-line', x1: at, x2: at, y1: y(0), y2: y(0) + 4 }),
        svg('text', { x: at, y: y(0) + 17, 'text-anchor': 'middle' }, shownInteger(tick)),
      );
    }
    picture.append(svg('text', {
      class: 'axis-name', x: frame.left + frame.width / 2, y: y(0) + 35, 'text-anchor': 'middle',
    }, 'positions back from the query'));
    const cursor = svg('rect', { class: 'bar-pointed', y: frame.top, height: frame.height, width: Math.max(1, frame.width / count), visibility: 'hidden' });
    picture.append(cursor);
    holder.replaceChildren(picture);

    const point = (bar) => {
      pointed = bar === null ? null : Math.max(start, Math.min(stop - 1, bar));
      cursor.setAttribute('visibility', pointed === null ? 'hidden' : 'visible');
      if (pointed !== null) cursor.setAttribute('x', x(pointed));
      sayBar(pointed);
    };
    picture.addEventListener('mousemove', (event) => {
      const box = picture.getBoundingClientRect();
      const along = ((event.clientX - box.left) * picture.width.baseVal.value / box.width - frame.left) / frame.width;
      point(along >= 0 && along < 1 ? start + Math.floor(along * count) : null);
    });
    picture.addEventListener('mouseleave', () => point(null));
    holder.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      point(pointed === null ? mass.indexOf(Math.max(...mass)) : pointed + step);
    };
  }

  holder.setAttribute('role', 'group');
  holder.setAttribute('aria-label', 'Weights by distance; left and right read the bars');
  summary.setAttribute('aria-live', 'polite');

  return {
    element,
    update(context) {
      // All of the head's map, at its own grain, also where a part of it is shown.
      const map = context.maps.layers[context.where.layer][context.where.head];
      const { queries, keys } = map;
      result = distances(map, queries, keys);
      const about = result.pooled ? 'about ' : '';
      pointed = null;
      said = result.total
        ? `Mean distance ${about}${shownNumber(result.mean)} positions; attending evenly: ${about}${shownNumber(result.evenMean)}.`
        : 'No query has weights here.';
      sayBar(null);
      hint.textContent = 'Bars: the share of attention that lies at a distance, as a mean over queries. '
        + 'Line: a head that attends evenly to all keys that are not masked. '
        + (result.pooled ? `The map is pooled: distances are between bins, to within ${shownInteger(result.width)} positions. `
          : result.width > 1 ? `A bar is ${result.width} distances wide. ` : '')
        + (keys.tokens === queries.tokens ? '' : 'Queries and keys are different texts: the distance is between their numbers. ')
        + (result.lost ? `${shownInteger(result.lost)} of ${shownInteger(result.lost + result.total)} queries have no weights, or NaN, and are left out.` : '');
      draw(context);
    },
  };
}

addView({
  name: 'distances',
  label: 'distances',
  create: distancesView,
  shows: (context) => !context.signed && context.queries.count > 0 && context.keys.count > 0,
});
