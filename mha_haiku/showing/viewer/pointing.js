// Pointing at the heat map, and walking on it by keys.

function listenToMap(drawing, now) {
  const cellAt = (event) => {
    const { context: { queries, keys }, frame: { left, top, width, height, full } } = now();
    const box = drawing.getBoundingClientRect();
    const shrunk = box.width / full.width;
    const across = ((event.clientX - box.left) / shrunk - left) / width;
    const down = ((event.clientY - box.top) / shrunk - top) / height;
    if (Math.min(across, down) < 0 || Math.max(across, down) >= 1) return null;
    return { query: queries.binAt(down), key: keys.binAt(across) };
  };
  drawing.addEventListener('pointermove', (event) => point(cellAt(event), now().context));
  drawing.addEventListener('pointerleave', () => point(null, now().context));
  drawing.addEventListener('click', (event) => {
    const cell = cellAt(event);
    if (cell) chooseCell(now().context, cell);
  });
  drawing.addEventListener('keydown', (event) => walkOnMap(event, now().context));
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
  if (arrows[event.key]) {
    const [down, right] = arrows[event.key];
    const within = (bin, axis) => Math.max(0, Math.min(axis.count - 1, bin));
    chooseCell(context, { query: within(query + down, queries), key: within(key + right, keys) });
  } else if (event.key === 'Home') choose({ key: keys.start(0) });
  else if (event.key === 'End') choose({ key: keys.start(keys.count - 1) });
  else return;
  event.preventDefault();
}
