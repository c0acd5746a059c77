// The heat map of the chosen head: cells as an image, axes and marks as shapes.

addView({
  name: 'map',
  label: 'heat map',
  shows: () => true,
  create: createHeatMap,
});

const labelFont = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
const wordFont = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

function createHeatMap() {
  const drawing = svg('svg', {
    class: 'map', tabindex: 0, role: 'application', 'aria-roledescription': 'attention map',
    'aria-describedby': 'readout', 'font-family': wordFont, 'font-size': 12,
  });
  const marks = svg('g', { 'pointer-events': 'none' });
  let context = null;
  let frame = null;

  function update(next) {
    context = next;
    frame = frameOf(context);
    drawing.setAttribute('aria-label', nameOf(context.where));
    for (const [name, size] of [['width', frame.full.width], ['height', frame.full.height]]) {
      drawing.setAttribute(name, size);
    }
    drawing.setAttribute('viewBox', `0 0 ${frame.full.width} ${frame.full.height}`);
    drawing.replaceChildren(
      ...cellsOf(context, frame), ...alignedFrames(context, frame),
      axisLabels(context, frame), legendOf(context, frame), marks,
    );
    mark(null);
  }

  // Marks the chosen row (or column) and cell, and the cell that is pointed at.
  function mark(cell) {
    marks.replaceChildren(...chosenMarks(context, frame));
    if (cell) marks.append(...pointedMarks(context, frame, cell));
  }

  listenToMap(drawing, () => ({ context, frame }));
  return { element: drawing, update, mark };
}

// Where things lie on the drawing, in pixels.
function frameOf({ queries, keys, room, example, aligned }) {
  const below = aligned.length ? 70 : 52; // the legend
  const spans = [queries.last, keys.last];
  const sides = (left, top) => {
    const [wide, high] = [(room.width - left - 16) / spans[1], (room.height - top - below) / spans[0]];
    const even = Math.min(wide, high);
    // Cells are square; only a map that is much longer than wide (or wider than long) has
    // longer ones, until its short side is a quarter of the long one.
    const longest = even * Math.max(...spans);
    const side = (room, span) => Math.min(room, Math.max(even, longest / 4 / span));
    const [across, down] = [side(wide, spans[1]), side(high, spans[0])];
    // Few cells do not fill the room: 60 pixels a side are enough; bins may be larger.
    const most = queries.pooled || keys.pooled ? Infinity : 60;
    return [Math.min(across, most), Math.min(down, most)];
  };
  // Labels take their room first; how wide they are depends on the cells, so twice.
  let [across, down] = sides(60, 60);
  const pictures = (side) => (position) => pictureOf(example, side, position);
  const rows = labelsOf(queries, (down * spans[0]) / queries.count, 26, pictures('query'));
  const columns = labelsOf(
    keys, (across * spans[1]) / keys.count, 24 + 7 * String(keys.last).length, pictures('key'),
  );
  const turned = columns.legible && columns.width > (across * spans[1]) / keys.count - 2;
  const left = Math.min(room.width / 3, rows.width + 30);
  const top = Math.max(13, turned || columns.marks.some(({ picture }) => picture) ? columns.width : 0) + 30;
  [across, down] = sides(left, top);
  const [width, height] = [
    Math.max(24, across * spans[1]), Math.max(24, down * spans[0]),
  ];
  const x = (position) => left + (position / spans[1]) * width;
  const y = (position) => top + (position / spans[0]) * height;
  return {
    rows, columns, turned, left, top, width, height, x, y,
    full: { width: Math.ceil(Math.max(left + width + 16, 250)), height: Math.ceil(top + height + below) },
  };
}

let measuring = null;

function textWidth(text, size) {
  measuring ??= document.createElement('canvas').getContext('2d');
  measuring.font = `${size}px ${labelFont}`;
  return measuring.measureText(text).width;
}

const middleOf = ({ edges }, bin) => (edges[bin] + edges[bin + 1]) / 2;

// The names along an axis: every bin's picture or text where it is legible, else round
// positions, at least some pixels apart.
function labelsOf(axis, pixels, apart, pictureAt) {
  const even = !axis.pooled;
  const legible = even && pixels >= 10;
  const size = legible ? Math.min(13, pixels - 1) : 11;
  const marks = legible
    ? Array.from({ length: axis.count }, (_, bin) => ({
      at: middleOf(axis, bin),
      picture: pictureAt(axis.start(bin)),
      className: axis.isSpecial(bin) ? 'special' : '',
      text: shorten(axis.text(bin) || axis.positions(bin), 12),
    }))
    : ticks(axis.last, Math.max(2, Math.min(9, (pixels * axis.count) / apart)))
      .map((at) => ({ at: at + (even ? 0.5 : 0), text: axis.timeAt(even ? axis.start(at) : at) }));
  const side = Math.min(28, Math.floor(pixels) - 2); // of pictures
  const width = Math.ceil(Math.max(8, ...marks.map(({ text, picture }) => (
    picture ? side : textWidth(text, size)
  ))));
  return { legible, size, side, marks, width };
}

// At most about so many round numbers below `last`.
function ticks(last, most) {
  const least = last / most;
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  // Long inputs are powers of two more often than of ten.
  const step = last >= 1024
    ? 2 ** Math.ceil(Math.log2(least))
    : [1, 2, 5, 10].map((digit) => digit * power).find((wanted) => wanted >= least);
  return Array.from({ length: Math.ceil(last / step) }, (_, i) => i * step);
}

function cellsOf({ map, end }, { left, top, width, height }) {
  const place = { x: left, y: top, width, height, preserveAspectRatio: 'none' };
  // A pixel per cell where that says it all.
  const size = ({ even, count }, pixels) => (even ? Math.min(count, Math.ceil(pixels)) : Math.ceil(pixels));
  const pixels = raster(map, end, size(map.keys, width), size(map.queries, height));
  const below = map.numMasked ? hatching(left, top, width, height) : [];
  return [...below, svg('image', {
    ...place, href: imageOf(pixels), 'image-rendering': 'pixelated',
  })];
}

// Frames around aligned cells, those that touch in one: dark and light, seen on every
// color, and inside of the cells, so that the frame of the chosen one is seen beside them.
function alignedFrames({ aligned, isAligned, queries, keys }, { x, y }) {
  const d = aligned.map(([query, key]) => {
    const open = [[-1, 0], [1, 0], [0, -1], [0, 1]]
      .map(([down, right]) => !isAligned(query + down, key + right));
    const [above, below, before, after] = open;
    const [left, right] = [x(keys.edges[key]), x(keys.edges[key + 1])];
    const [top, bottom] = [y(queries.edges[query]), y(queries.edges[query + 1])];
    const inset = Math.min(3, (right - left) / 6, (bottom - top) / 6);
    const [west, east] = [left + inset * before, right - inset * after];
    const [north, south] = [top + inset * above, bottom - inset * below];
    return (above ? `M${west} ${north}H${east}` : '') + (below ? `M${west} ${south}H${east}` : '')
      + (before ? `M${west} ${north}V${south}` : '') + (after ? `M${east} ${north}V${south}` : '');
  }).join('');
  return d ? alignedLines.map((line) => (
    svg('path', { d, class: 'aligned', fill: 'none', 'pointer-events': 'none', ...line })
  )) : [];
}

function axisLabels(context, frame) {
  const { rows, columns, left, top, width, height, turned, x, y } = frame;
  const { queries, keys } = context;
  const said = (side, does, { label }) => (label ? `${side}: ${label}` : `${side} (${does})`);
  const text = (words, attributes) => svg('text', { fill: 'currentColor', ...attributes }, words);
  const middle = top + height / 2;
  const group = svg('g', {}, 
    text(`${said('key', 'attended to', keys)} →`, { x: left + Math.max(60, width / 2), y: 12, 'text-anchor': 'middle' }),
    text(`← ${said('query', 'attends', queries)}`, {
      x: 0, y: 0, 'text-anchor': 'middle',
      transform: `translate(12 ${Math.max(middle, top + 40, queries.label ? 80 : 0)}) rotate(-90)`,
    }));
  const mono = (size) => ({ 'font-family': labelFont, 'font-size': size });
  const image = (picture, side, center) => svg('image', {
    href: picture, x: center[0] - side / 2, y: center[1] - side / 2, width: side, height: side,
    'image-rendering': 'pixelated',
  });
  for (const { at, text: words, picture, className } of rows.marks) {
    group.append(picture ? image(picture, rows.side, [left - 4 - rows.side / 2, y(at)]) : text(words, {
      ...mono(rows.size), class: className, x: left - 5, y: y(at), 'text-anchor': 'end', 'dominant-baseline': 'central',
    }));
  }
  for (const { at, text: words, picture, className } of columns.marks) {
    const where = turned
      ? { transform: `translate(${x(at)} ${top - 5}) rotate(-90)`, 'dominant-baseline': 'central' }
      : { x: x(at), y: top - 6, 'text-anchor': 'middle' };
    group.append(picture ? image(picture, columns.side, [x(at), top - 4 - columns.side / 2])
      : text(words, { ...mono(columns.size), class: className, ...where }));
  }
  return group;
}

const bars = new Map();

// The colors in a row, as the address of an image.
function barOf(signed) {
  const name = signed ? 'difference' : choice.colors;
  if (!bars.has(name)) {
    const pixels = new ImageData(256, 1);
    for (let step = 0; step < 256; step += 1) {
      pixels.data.set([...ramps[name].subarray(3 * step, 3 * step + 3), 255], 4 * step);
    }
    bars.set(name, imageOf(pixels));
  }
  return bars.get(name);
}

// The color bar, and the meaning of the other two paints.
function legendOf({ map, end, signed, aligned }, { left, top, width, height }) {
  const text = (words, x, anchor = 'start') => svg('text', {
    x, y: top + height + 38, fill: 'currentColor', 'font-size': 11, 'text-anchor': anchor,
  }, words);
  const long = Math.min(220, Math.max(130, width * 0.5));
  const y = top + height + 14;
  const box = { x: left, y, width: long, height: 10 };
  const rim = { stroke: 'currentColor', 'stroke-opacity': 0.4 };
  const said = (share) => shownWeight(Math.sign(share) * weightOf(Math.abs(share), end));
  const group = svg('g', {},
    svg('image', { ...box, preserveAspectRatio: 'none', href: barOf(signed) }),
    svg('rect', { ...box, ...rim, fill: 'none' }));
  const shares = signed ? [-1, 0, 1] : [0, 0.5, 1];
  shares.forEach((share, index) => {
    const at = left + (long * index) / 2;
    const low = share === 0 && choice.scale === 'log' && !signed;
    const words = low ? `≤ ${shownNumber(end * 10 ** -decades)}` : said(share);
    group.append(text(words, at, index === 1 ? 'middle' : (index ? 'end' : 'start')));
  });
  let x = left + long + 16;
  const swatch = (paint, words) => {
    group.append(
      svg('rect', { x, y, width: 12, height: 10, fill: `rgb(${paint})`, ...rim }),
      svg('text', { x: x + 16, y: y + 9, fill: 'currentColor', 'font-size': 11 }, words),
    );
    x += 26 + 6 * words.length;
  };
  if (map.numMasked) swatch(paintOfMasked, 'masked');
  if (map.numNaN) swatch(paintOfNaN, `${map.numNaN} not a number`);
  if (aligned.length) {
    const frame = { x: left + 1, y: top + height + 49, width: 11, height: 11, fill: 'none' };
    group.append(
      ...alignedLines.map((line) => svg('rect', { ...frame, ...line })),
      svg('text', { x: left + 20, y: top + height + 59, fill: 'currentColor', 'font-size': 11 }, alignedWords),
    );
  }
  return group;
}

const doubled = (attributes) => markLines.map((line) => (
  svg('rect', { fill: 'none', ...line, ...attributes })
));

// The box of some bins, at least two pixels wide.
function boxOf({ queries, keys }, { x, y }, query, key) {
  const across = key === null ? [x(0), x(keys.last)] : [x(keys.edges[key]), x(keys.edges[key + 1])];
  const down = query === null
    ? [y(0), y(queries.last)] : [y(queries.edges[query]), y(queries.edges[query + 1])];
  return {
    x: across[0] - 1, y: down[0] - 1,
    width: Math.max(2, across[1] - across[0]) + 2, height: Math.max(2, down[1] - down[0]) + 2,
  };
}

function chosenMarks(context, frame) {
  const { query, key } = context;
  const line = choice.direction === 'from'
    ? boxOf(context, frame, query, null) : boxOf(context, frame, null, key);
  return [
    ...doubled({ class: 'chosen-line', ...line }),
    ...doubled({ class: 'chosen-cell', ...boxOf(context, frame, query, key) }),
  ];
}

// Row and column of the cell under the pointer, and both tokens on the axes.
function pointedMarks(context, frame, { query, key }) {
  const { left, top, x, y } = frame;
  const { queries, keys } = context;
  const [row, column] = [boxOf(context, frame, query, null), boxOf(context, frame, null, key)];
  const thin = (box) => svg('rect', {
    ...box, class: 'pointed', fill: '#ffffff', 'fill-opacity': 0.12,
    stroke: '#ffffff', 'stroke-opacity': 0.9,
  });
  const name = (axis, bin) => shorten(axis.text(bin) || axis.positions(bin), 20);
  return [
    ...[row, column].map(thin),
    ...doubled(boxOf(context, frame, query, key)),
    ...tag(name(queries, query), left - 3, y(middleOf(queries, query)), 'end', frame),
    ...tag(name(keys, key), x(middleOf(keys, key)), top - 13, 'middle', frame),
  ];
}

// White text on black, as far inside the drawing as it must be.
function tag(words, x, y, anchor, frame) {
  const width = textWidth(words, 12) + 8;
  const wanted = anchor === 'end' ? x - width : x - width / 2;
  const start = Math.max(0, Math.min(wanted, frame.full.width - width));
  return [
    svg('rect', { class: 'tag', x: start, y: y - 9, width, height: 18, rx: 3, fill: '#000000' }),
    svg('text', {
      x: start + 4, y, fill: '#ffffff', 'font-family': labelFont, 'font-size': 12,
      'dominant-baseline': 'central',
    }, words),
  ];
}
