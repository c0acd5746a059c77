// Pixels of a map. Where several cells share a pixel it shows the largest of them, so
// that a thin diagonal is not lost; a masked pixel is left clear, for what lies beneath.

// Which bins each of some pixels along an axis covers: pairs of the first and the end.
function pixelBins(axis, pixels) {
  const { count } = axis;
  const span = axis.last - axis.first;
  const even = axis.even;
  const bins = new Int32Array(2 * pixels);
  for (let pixel = 0; pixel < pixels; pixel += 1) {
    // Even bins are found by their number, others by their positions. Where there are
    // more pixels than bins, the middle of the pixel decides.
    const from = pixel / pixels;
    const to = (pixel + 1) / pixels;
    const middle = (from + to) / 2;
    const first = even
      ? Math.floor((count > pixels ? from : middle) * count) : axis.bin(axis.first + from * span);
    const end = even
      ? (count > pixels ? Math.ceil(to * count) : first + 1) : axis.bin(axis.first + to * span - 1e-6) + 1;
    bins[2 * pixel] = first;
    bins[2 * pixel + 1] = Math.max(first + 1, end);
  }
  return bins;
}

// The map as `width` x `height` pixels, on a scale of colours that ends at `end`.
function raster(map, end, width, height) {
  const across = pixelBins(map.keys, width);
  const down = pixelBins(map.queries, height);
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
  return pixels;
}

// Pixels as the address of an image.
function imageOf(pixels) {
  const canvas = document.createElement('canvas');
  canvas.width = pixels.width;
  canvas.height = pixels.height;
  canvas.getContext('2d').putImageData(pixels, 0, 0);
  return canvas.toDataURL();
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
