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

// The picture that stands at a position, as a data URL; null where there is none. Pictures
// are of the keys, and of the queries where these are the same positions.
function pictureOf({ images, keys }, side, position) {
  if (!images || (side === 'query' && keys)) return null;
  return picturesOf.get(images)?.[position] ?? null;
}
