// Images of an example: pictures that stand at its positions.

const picturesOf = new WeakMap(); // by the example's images: their data URLs

// Reads an example's images once; until then, and without images, there are none.
async function readPictures({ images }) {
  if (!images || picturesOf.has(images)) return;
  const { height, width, channels, count } = images;
  const bytes = await unpackBytes(images.codes);
  const canvas = document.createElement('canvas');
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext('2d');
  picturesOf.set(images, Array.from({ length: count }, (_, index) => {
    const pixels = new ImageData(width, height);
    for (let place = 0; place < height * width; place += 1) {
      const from = (index * height * width + place) * channels;
      const parts = channels === 1 ? Array(3).fill(bytes[from]) : bytes.subarray(from, from + 3);
      pixels.data.set([...parts, 255], 4 * place);
    }
    context.putImageData(pixels, 0, 0);
    return canvas.toDataURL();
  }));
}

// The picture at a position, as a data URL, or null. Pictures are of the keys, and of the
// queries where these are the same positions; special positions (of an image's class) have
// none, nor do words next to patches.
function pictureOf(example, side, position) {
  const { images, queries, keys } = example;
  const { special, tokens } = keys ?? queries;
  if (!images || (side === 'query' && keys) || special?.includes(position)) return null;
  if (hasPatches(example) && patchColumn(tokens[position]) === undefined) return null;
  return picturesOf.get(images)?.[position] ?? null;
}

// The column of a patch, from its text "row,column"; undefined of other texts.
const patchColumn = (text) => /^\d+,(\d+)$/.exec(text)?.[1];

// Whether an example is a picture cut into patches, or has one.
const hasPatches = ({ images, queries, keys }) => Boolean(images)
  && (keys ?? queries).tokens.some((text) => patchColumn(text) !== undefined);

// Whether the text of a position stands for a part of a picture.
const isOfImage = (text, { images }) => /^\[image \d+\]$/.test(text)
  || (Boolean(images) && patchColumn(text) !== undefined);

// Which share of weights along an axis is on a picture; null unless there are words, too.
function shareOnPicture(axis, weights, example) {
  const are = weights.map((_, bin) => isOfImage(axis.text(bin), example));
  const hasWords = are.some((isImage, bin) => !isImage && axis.text(bin) && !axis.isSpecial(bin));
  if (axis.pooled || !are.includes(true) || !hasWords) return null;
  const sum = (parts) => parts.reduce((total, part) => total + part, 0);
  return sum(weights.filter((_, bin) => are[bin])) / (sum(weights) || 1);
}
