// Pixels of a map. Where several cells share a pixel it shows the largest of them, so
// that a thin diagonal is not lost; a masked pixel is transparent.

// Which bins each of some pixels along an axis covers: pairs of the first and the end.
function pixelBins(axis, pixels) {
  const { count } = axis;
  const even = axis.even;
  const bins = new Int32Array(2 * pixels);
  for (let pixel = 0; pixel < pixels; pixel += 1) {
    // Even bins are found by their number, others by their positions. Where there are
    // more pixels than bins, the middle of the pixel decides.
    const from = pixel / pixels;
    const to = (pixel + 1) / pixels;
    const middle = (from + to) / 2;
    const first = even
      ? Math.floor((count > pixels ? from : middle) * count) : axis.binAt(from);
    const end = even
      ? (count > pixels ? Math.ceil(to * count) : first + 1) : axis.binAt(to - 1e-9) + 1;
    bins[2 * pixel] = first;
    bins[2 * pixel + 1] = Math.max(first + 1, end);
  }
  return bins;
}

// The map as `width` x `height` pixels, on a scale of colors that ends at `end`.
function raster(map, end, width, height) {
  const across = pixelBins(map.keys, width);
  const down = pixelBins(map.queries, height);
  const pixels = new ImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const weight = pixelWeight(map, down[2 * y], down[2 * y + 1], across[2 * x], across[2 * x + 1]);
      if (weight !== null) {
        const [red, green, blue] = colorOf(shareOf(weight, end), map.signed);
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

const easel = document.createElement('canvas').getContext('2d', { willReadFrequently: true });

// Pixels as the address of an image.
function imageOf(pixels) {
  easel.canvas.width = pixels.width;
  easel.canvas.height = pixels.height;
  easel.putImageData(pixels, 0, 0);
  return easel.canvas.toDataURL();
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

// Slanted lines on gray for masked cells. A line lies on x + y = constant.
function hatching(left, top, width, height) {
  let lines = '';
  for (let sum = 6; sum < width + height; sum += 6) {
    lines += `M${left + Math.max(0, sum - height)} ${top + Math.min(sum, height)}`
      + `L${left + Math.min(sum, width)} ${top + Math.max(0, sum - width)}`;
  }
  return [
    svg('rect', { x: left, y: top, width, height, fill: `rgb(${paintOfMasked})` }),
    svg('path', { d: lines, fill: 'none', stroke: '#858585', 'stroke-width': 1 }),
  ];
}
