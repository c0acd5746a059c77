// Everything drawn on a canvas: thumbnails, the enlarged map and its axes, the bar.

const stops = [ // viridis
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
  [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37],
];
const labelFont = (size) => `${size}px ui-monospace, "DejaVu Sans Mono", monospace`;

// The colour of a share (0 to 1) of the largest weight, as [red, green, blue].
function colour(share) {
  const bright = choice.scale === 'root' ? Math.sqrt(share) : share;
  const along = Math.min(1, Math.max(0, bright)) * (stops.length - 1);
  const below = Math.min(Math.floor(along), stops.length - 2);
  return stops[below].map((low, channel) => (
    low + (along - below) * (stops[below + 1][channel] - low)
  ));
}

function scaleEnd(map) {
  return (choice.range === 'own' ? map.largest : page.largest) || 1;
}

// An image of one pixel per cell; `step` cells a side become one, by their largest.
function image(map, step) {
  const width = Math.ceil(map.columns / step);
  const height = Math.ceil(map.rows / step);
  const pixels = new ImageData(width, height);
  const end = scaleEnd(map);
  const largest = new Float32Array(width * height);
  for (let query = 0; query < map.rows; query += 1) {
    const line = Math.floor(query / step) * width;
    for (let key = 0; key < map.columns; key += 1) {
      const pixel = line + Math.floor(key / step);
      largest[pixel] = Math.max(largest[pixel], map.at(query, key));
    }
  }
  largest.forEach((weight, pixel) => {
    pixels.data.set([...colour(weight / end), 255], 4 * pixel);
  });
  const canvas = document.createElement('canvas');
  canvas.width = width;
  canvas.height = height;
  canvas.getContext('2d').putImageData(pixels, 0, 0);
  return canvas;
}

function drawThumbnail(canvas, map) {
  const small = image(map, Math.ceil(Math.max(map.rows, map.columns) / 92));
  canvas.width = 184;
  canvas.height = 184;
  const context = canvas.getContext('2d');
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
}

function drawBar(canvas) {
  const context = canvas.getContext('2d');
  for (let x = 0; x < canvas.width; x += 1) {
    context.fillStyle = `rgb(${colour(x / (canvas.width - 1))})`;
    context.fillRect(x, 0, 1, canvas.height);
  }
}

// Where the enlarged map lies on its canvas: sizes in CSS pixels.
function layout(map, queries, keys) {
  const cells = Math.max(map.rows, map.columns);
  const roomy = Math.max(32, Math.floor(170 / cells)); // the axes' names have to fit
  const cell = Math.max(2, Math.min(roomy, Math.floor(620 / cells)));
  const legible = cell >= 9 && !page.pooled;
  const size = legible ? Math.min(14, cell + 1) : 11;
  const context = document.createElement('canvas').getContext('2d');
  context.font = labelFont(size);
  const label = (bins) => bins.map(([positions, text]) => (
    legible ? shorten(text || positions, 12) : positions.split('–')[0]
  ));
  const widest = (texts) => Math.ceil(
    texts.reduce((most, text) => Math.max(most, context.measureText(text).width), 0),
  );
  const rowLabels = label(queries);
  const columnLabels = label(keys);
  const turned = legible && widest(columnLabels) > cell - 1;
  return {
    cell, size, legible, turned, rowLabels, columnLabels,
    left: widest(rowLabels) + 32,
    top: (turned ? widest(columnLabels) : size) + 32,
    width: map.columns * cell,
    height: map.rows * cell,
  };
}

function shorten(text, most) {
  const characters = [...text];
  return characters.length > most ? `${characters.slice(0, most - 1).join('')}…` : text;
}

function drawMap(canvas, map, frame) {
  const { cell, left, top, width, height } = frame;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round((left + width + 12) * ratio);
  canvas.height = Math.round((top + height + 4) * ratio);
  canvas.style.width = `${left + width + 12}px`;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  context.drawImage(image(map, 1), left, top, width, height);
  drawAxes(context, frame, getComputedStyle(canvas).color);
  const mark = getComputedStyle(document.documentElement).getPropertyValue('--choice');
  context.strokeStyle = mark;
  context.lineWidth = 2;
  const row = top + choice.query * cell;
  const column = left + choice.key * cell;
  // Around the cells, so that even thin ones keep their colour.
  if (choice.direction === 'from') context.strokeRect(left, row - 1, width, cell + 2);
  else context.strokeRect(column - 1, top, cell + 2, height);
  context.strokeStyle = '#ffffff';
  context.strokeRect(column - 1, row - 1, cell + 2, cell + 2);
}

function drawAxes(context, frame, ink) {
  const { cell, left, top, width, height, size, legible, turned } = frame;
  context.fillStyle = ink;
  context.font = '13px system-ui, sans-serif';
  context.textAlign = 'center';
  context.fillText('key (attended to) →', left + width / 2, 14);
  context.save();
  context.translate(14, top + height / 2);
  context.rotate(-Math.PI / 2);
  context.fillText('← query (attends)', 0, 0);
  context.restore();
  context.font = labelFont(size);
  context.textBaseline = 'middle';
  const every = (count) => (legible ? 1 : tickStep(count));
  context.textAlign = 'right';
  for (let row = 0; row < frame.rowLabels.length; row += every(frame.rowLabels.length)) {
    context.fillText(frame.rowLabels[row], left - 5, top + (row + 0.5) * cell);
  }
  const { columnLabels } = frame;
  for (let column = 0; column < columnLabels.length; column += every(columnLabels.length)) {
    context.save();
    context.translate(left + (column + 0.5) * cell, top - 5);
    if (turned) context.rotate(-Math.PI / 2);
    context.textAlign = turned ? 'left' : 'center';
    context.textBaseline = turned ? 'middle' : 'bottom';
    context.fillText(columnLabels[column], 0, 0);
    context.restore();
  }
}

// A round number of cells, so that there are at most ten ticks.
function tickStep(count) {
  if (page.pooled) return 2 ** Math.ceil(Math.log2(Math.max(1, count / 8)));
  let power = 1;
  for (;;) {
    const step = [1, 2, 5].find((digit) => count / (digit * power) <= 10);
    if (step) return step * power;
    power *= 10;
  }
}
