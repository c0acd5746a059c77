// Pixels of a map. Where several cells share a pixel it shows the largest of them, so
// that a thin diagonal is not lost; a masked pixel is left clear, for what lies beneath.

// Which bins each pixel along an axis covers: Int32Array of [first, end) pairs.
function pixelBins(axis, most) {
  const { count } = axis;
  const span = axis.last - axis.first;
  const even = count <= 1 || axis.edges.every((edge, bin) => (
    bin >= count || (edge - axis.first) * count === span * bin
  ));
  if (even && count <= most) return Int32Array.from({ length: 2 * count }, (_, i) => (i + 1) >> 1);
  const bins = new Int32Array(2 * most);
  for (let pixel = 0; pixel < most; pixel += 1) {
    // Even bins by their number (exact), uneven ones by their positions.
    const [from, to] = [pixel / most, (pixel + 1) / most];
    const first = even ? Math.floor(from * count) : axis.bin(axis.first + from * span);
    const end = even ? Math.ceil(to * count) : axis.bin(axis.first + to * span - 1e-6) + 1;
    bins.set([first, Math.max(first + 1, end)], 2 * pixel);
  }
  return bins;
}

// A canvas with the map in at most `wide` x `high` pixels, on a scale that ends at `end`.
function raster(map, end, wide, high = wide) {
  const across = pixelBins(map.keys, wide);
  const down = pixelBins(map.queries, high);
  const [width, height] = [across.length / 2, down.length / 2];
  const pixels = new ImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const weight = pixelWeight(map, down[2 * y], down[2 * y + 1], across[2 * x], across[2 * x + 1]);
      if (weight !== null) {
        const [red, green, blue] = colourOf(shareOf(weight, end), map.signed);
        const pixel = 4 * (y * width + x);
        pixels.data[pixel] = red;
        pixels.data[pixel + 1] = green;
        pixels.data[pixel + 2] = blue;
        pixels.data[pixel + 3] = 255;
      }
    }
  }
  const canvas = document.createElement('canvas');
  canvas.width = width;
  canvas.height = height;
  canvas.getContext('2d').putImageData(pixels, 0, 0);
  return canvas;
}

// The largest weight of a block of cells; NaN where one is, null where all are masked.
function pixelWeight(map, top, bottom, left, right) {
  let largest = null;
  for (let query = top; query < bottom; query += 1) {
    for (let key = left; key < right; key += 1) {
      if (!map.masked(query, key)) {
        const weight = map.at(query, key);
        if (Number.isNaN(weight)) return weight;
        if (largest === null || Math.abs(weight) > Math.abs(largest)) largest = weight;
      }
    }
  }
  return largest;
}

const hatchings = new Map();

// Slanted lines on grey, as the address of an image: what masked cells look like.
function hatching(width, height) {
  const name = `${width}x${height}`;
  if (!hatchings.has(name)) {
    const canvas = document.createElement('canvas');
    canvas.width = width;
    canvas.height = height;
    const brush = canvas.getContext('2d');
    brush.fillStyle = '#c9c9c9';
    brush.fillRect(0, 0, width, height);
    brush.strokeStyle = '#8f8f8f';
    brush.beginPath();
    for (let x = -height; x < width; x += 6) {
      brush.moveTo(x, height);
      brush.lineTo(x + height, 0);
    }
    brush.stroke();
    hatchings.clear(); // one size is in use at a time
    hatchings.set(name, canvas.toDataURL());
  }
  return hatchings.get(name);
}
