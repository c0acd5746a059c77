// Color maps, all of them safe for color-blind eyes, and the paint of special cells.

const stops = {
  viridis: [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
    [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37]],
  cividis: [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
    [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]],
  grays: [[255, 255, 255], [217, 217, 217], [150, 150, 150], [82, 82, 82], [0, 0, 0]],
  difference: [[5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222],
    [209, 229, 240], [247, 247, 247], [253, 219, 199], [244, 165, 130], [214, 96, 77],
    [178, 24, 43], [103, 0, 31]],
};
const paintOfNaN = [213, 0, 109];
const paintOfMasked = [160, 160, 160];

// A map's 256 colors, as bytes: red, green, blue of the first, of the second, ...
const ramps = Object.fromEntries(Object.entries(stops).map(([name, points]) => {
  const ramp = new Uint8Array(3 * 256);
  for (let step = 0; step < 256; step += 1) {
    const along = (step / 255) * (points.length - 1);
    const below = Math.min(Math.floor(along), points.length - 2);
    for (let channel = 0; channel < 3; channel += 1) {
      const [low, high] = [points[below][channel], points[below + 1][channel]];
      ramp[3 * step + channel] = Math.round(low + (along - below) * (high - low));
    }
  }
  return [name, ramp];
}));

// The color of a share, 0 to 1, or of a signed one, -1 to 1: [red, green, blue].
function colorOf(share, signed = false) {
  if (Number.isNaN(share)) return paintOfNaN;
  const along = signed ? (share + 1) / 2 : share;
  const step = 3 * Math.round(255 * Math.min(1, Math.max(0, along)));
  const ramp = signed ? ramps.difference : ramps[choice.colors];
  return [ramp[step], ramp[step + 1], ramp[step + 2]];
}

// Lines over cells: dark beneath, light on top, so that they are seen on every color.
const markLines = [
  { stroke: '#000000', 'stroke-width': 4, 'stroke-opacity': 0.75 },
  { stroke: '#ffffff', 'stroke-width': 2 },
];

// Frames and lines of cells that are right by the task, and their names.
const paintOfAligned = '#ff5a1f';
const alignedLines = [
  { stroke: '#000000', 'stroke-width': 4.5, 'stroke-opacity': 0.8, 'stroke-linecap': 'square' },
  { stroke: paintOfAligned, 'stroke-width': 2.5, 'stroke-linecap': 'square' },
];
const alignedWords = 'aligned: where the row should look';
