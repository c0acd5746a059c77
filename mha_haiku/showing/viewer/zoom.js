// Pointing at the heat map, walking on it by keys, and zooming into it.

const dragAtLeast = 6; // pixels: a shorter drag is a click

function listenToMap(drawing, marks, now) {
  let dragged = null; // where a drag began, in the drawing's pixels

  const spot = (event) => {
    const box = drawing.getBoundingClientRect();
    const shrunk = box.width / now().frame.full.width;
    return [(event.clientX - box.left) / shrunk, (event.clientY - box.top) / shrunk];
  };
  // The positions below a spot, kept inside of the map.
  const positions = ([x, y]) => {
    const { context: { queries, keys }, frame: { left, top, width, height } } = now();
    const along = (axis, share) => axis.first + (axis.last - axis.first) * Math.min(1, Math.max(0, share));
    return [along(queries, (y - top) / height), along(keys, (x - left) / width)];
  };
  const cellAt = (event) => {
    const [x, y] = spot(event);
    const { context: { queries, keys }, frame: { left, top, width, height } } = now();
    if (x < left || y < top || x >= left + width || y >= top + height) return null;
    const [query, key] = positions([x, y]);
    return { query: queries.bin(query), key: keys.bin(key) };
  };

  drawing.addEventListener('pointermove', (event) => {
    if (dragged) drawBand(marks, dragged, spot(event));
    else point(cellAt(event), now().context);
  });
  drawing.addEventListener('pointerleave', () => { if (!dragged) point(null, now().context); });
  drawing.addEventListener('pointerdown', (event) => {
    // With a finger one scrolls the page.
    if (event.button === 0 && event.pointerType !== 'touch' && cellAt(event)) {
      dragged = spot(event);
      drawing.setPointerCapture(event.pointerId);
    }
  });
  drawing.addEventListener('pointercancel', () => { dragged = null; point(null, now().context); });
  drawing.addEventListener('pointerup', (event) => {
    const from = dragged;
    dragged = null;
    if (!from) return;
    const to = spot(event);
    if (Math.hypot(to[0] - from[0], to[1] - from[1]) < dragAtLeast) return;
    const [[query, key], [lastQuery, lastKey]] = [positions(from), positions(to)];
    zoomTo(
      Math.min(query, lastQuery), Math.max(query, lastQuery),
      Math.min(key, lastKey), Math.max(key, lastKey),
    );
    drawing.dataset.dragged = 'yes';
  });
  drawing.addEventListener('click', (event) => {
    const wasDrag = drawing.dataset.dragged === 'yes';
    drawing.dataset.dragged = '';
    const cell = cellAt(event);
    if (cell && !wasDrag) chooseCell(now().context, cell);
  });
  drawing.addEventListener('dblclick', () => choose({ zoom: null }));
  drawing.addEventListener('wheel', (event) => {
    // Without a key the wheel scrolls the page, as everywhere; pinching sends Ctrl.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const [query, key] = positions(spot(event));
    zoomBy(event.deltaY < 0 ? 0.8 : 1.25, query, key);
  }, { passive: false });
  drawing.addEventListener('keydown', (event) => walkOnMap(event, now().context));
}

function drawBand(marks, from, to) {
  marks.querySelectorAll('.band').forEach((band) => band.remove());
  marks.append(...doubled({
    class: 'band',
    x: Math.min(from[0], to[0]), y: Math.min(from[1], to[1]),
    width: Math.abs(to[0] - from[0]), height: Math.abs(to[1] - from[1]),
  }));
}

function chooseCell({ queries, keys }, { query, key }) {
  choose({ query: queries.start(query), key: keys.start(key) });
}

const arrows = {
  ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0],
  PageDown: [10, 0], PageUp: [-10, 0],
};

function walkOnMap(event, context) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { queries, keys, query, key } = context;
  const zooms = { '+': 0.5, '=': 0.5, '-': 2 };
  if (arrows[event.key]) {
    const [down, right] = arrows[event.key];
    const within = (bin, axis) => Math.max(0, Math.min(axis.count - 1, bin));
    const goal = { query: query + down, key: key + right };
    const kept = { query: within(goal.query, queries), key: within(goal.key, keys) };
    const isOutside = kept.query !== goal.query || kept.key !== goal.key;
    if (choice.zoom && isOutside) moveWindow(Math.sign(down), Math.sign(right));
    else chooseCell(context, kept);
  } else if (event.key === 'Home') choose({ key: keys.first });
  else if (event.key === 'End') choose({ key: keys.last - 1 });
  else if (zooms[event.key]) zoomBy(zooms[event.key], choice.query, choice.key);
  else if (event.key === '0') choose({ zoom: null });
  else return;
  event.preventDefault();
}

function wholeWindow() {
  const { queries, keys } = mapsAt(choice);
  return [0, queries.last, 0, keys.last];
}

// Shows the positions between these, at least four and at most all.
function zoomTo(top, bottom, left, right) {
  const whole = wholeWindow();
  const side = (from, to, end) => {
    const size = Math.min(end, Math.max(Math.min(4, end), Math.ceil(to) - Math.floor(from)));
    const start = Math.max(0, Math.min(end - size, Math.floor(from)));
    return [start, start + size];
  };
  const zoom = [...side(top, bottom, whole[1]), ...side(left, right, whole[3])];
  // The chosen cell comes along, so that it stays in sight.
  const inside = (position, from, to) => Math.max(from, Math.min(to - 1, position));
  choose({
    zoom, query: inside(choice.query, zoom[0], zoom[1]), key: inside(choice.key, zoom[2], zoom[3]),
  });
}

// The windows of the chosen head's patches, from left to right within a row of them.
function finerParts() {
  const patches = unpacked(choice.set, choice.example)?.patches ?? [];
  return patches
    .filter(({ layer, head }) => layer === choice.layer && head === choice.head)
    .map(({ map: { queries, keys } }) => [queries.first, queries.last, keys.first, keys.last])
    .sort((a, b) => a[0] - b[0] || a[2] - b[2] || a[1] - b[1]);
}

function zoomToNextPart() {
  const parts = finerParts();
  const now = parts.findIndex((part) => String(part) === String(choice.zoom));
  zoomTo(...parts[(now + 1) % parts.length]);
}

// A window as large as the shown one times `factor`, with a cell where it was.
function zoomBy(factor, query, key) {
  const [top, bottom, left, right] = choice.zoom ?? wholeWindow();
  const side = (from, to, at) => {
    const wanted = (to - from) * factor;
    // At least one position more or less, or a small window would stay as it is.
    const size = factor < 1 ? Math.min(wanted, to - from - 1) : Math.max(wanted, to - from + 1);
    const start = at + 0.5 - size * ((at + 0.5 - from) / (to - from));
    return [Math.round(start), Math.round(start + size)];
  };
  zoomTo(...side(top, bottom, query), ...side(left, right, key));
}

// The arrow keys push the window on at its rim.
function moveWindow(down, right) {
  const [top, bottom, left, rightEnd] = choice.zoom;
  const whole = wholeWindow();
  const by = (from, to, end, direction) => {
    const step = direction * Math.max(1, Math.floor((to - from) / 4));
    return Math.max(-from, Math.min(end - to, step));
  };
  const [rows, columns] = [by(top, bottom, whole[1], down), by(left, rightEnd, whole[3], right)];
  const zoom = [top + rows, bottom + rows, left + columns, rightEnd + columns];
  const step = (position, direction, from, to) => Math.max(from, Math.min(to - 1, position + direction));
  choose({
    zoom,
    query: step(choice.query, down, zoom[0], zoom[1]),
    key: step(choice.key, right, zoom[2], zoom[3]),
  });
}
