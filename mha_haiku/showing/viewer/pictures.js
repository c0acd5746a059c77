// Images of an example: pictures that stand at positions, or one picture cut in patches.

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
  if (images?.kind !== 'positions' || (side === 'query' && keys)) return null;
  return picturesOf.get(images)?.[position] ?? null;
}

// One picture in patches: how much of each the chosen position sees, and the first position
// (the class token, if there is one). The unseen is washed out; beside it are the weights.
function patchesView() {
  const drawings = make('div', '', { className: 'patch-drawings', tabIndex: 0 });
  drawings.setAttribute('role', 'group');
  drawings.setAttribute('aria-label', 'Picture with the attention over its patches');
  const hint = make('p', 'Left: the less weight a patch has, the more it is washed out. Right: the weights, '
    + 'in the colours of the heat map. The frame is the chosen patch; click another to choose it, or use '
    + 'the arrow keys.', { className: 'hint' });
  const element = make('div', '', { className: 'view patches-view' }, drawings, hint);
  let context = null;

  // The patches are keys, and queries too unless those are other tokens.
  const both = () => !context.example.keys;
  const side = () => (context.choice.direction === 'to' && both() ? 'key' : 'query');
  const weightOf = (chosen, patch) => (
    side() === 'query' ? context.map.at(chosen, patch) : context.map.at(patch, chosen)
  );
  const others = () => (side() === 'query' ? context.keys : context.queries);

  function drawing(chosen) {
    const { images } = context.example;
    const { rows, columns, first } = images;
    const patches = Array.from({ length: rows * columns }, (_, patch) => first + patch);
    const cell = Math.max(4, Math.floor(Math.min(270, (context.room.width - 30) / 2) / Math.max(rows, columns)));
    const [width, height] = [cell * columns, cell * rows];
    const title = `${side() === 'query' ? 'From query' : 'To key'} ${place(context[side() === 'query' ? 'queries' : 'keys'], chosen)}`;
    const largest = Math.max(...patches.map((patch) => weightOf(chosen, patch) || 0)) || 1;
    const box = (patch, attributes) => svg('rect', {
      x: cell * ((patch - first) % columns), y: cell * Math.floor((patch - first) / columns),
      width: cell, height: cell, 'shape-rendering': 'crispEdges', ...attributes,
    });
    const sheet = (name, ...below) => svg('svg', {
      width: width + 4, height: height + 4, viewBox: `-2 -2 ${width + 4} ${height + 4}`,
      role: 'img', 'aria-label': `${title}: ${name}`, class: 'patches',
    }, ...below);
    const filled = (attributes) => patches.map((patch) => {
      const weight = weightOf(chosen, patch);
      const made = box(patch, { class: 'patch', ...attributes(weight) });
      made.dataset.position = String(patch);
      made.append(svg('title', {}, `${place(others(), patch)}: ${shownWeight(weight)}`));
      return made;
    });
    const chosenBox = () => (both() && patches.includes(chosen)
      ? markLines.map((line) => box(chosen, { fill: 'none', 'pointer-events': 'none', ...line })) : []);
    const picture = svg('image', {
      href: picturesOf.get(images)[0], class: 'pixels', width, height, preserveAspectRatio: 'none',
    });
    const figure = make(
      'div', '', { className: 'patch-figure' }, make('p', title, { className: 'patch-title' }),
      make(
        'div', '', { className: 'patch-pair' },
        sheet('picture', picture, ...filled((weight) => ({
          class: 'patch patch-wash', 'fill-opacity': (0.88 * (1 - Math.max(0, weight || 0) / largest)).toFixed(3),
        })), ...chosenBox()),
        sheet('weights', ...filled((weight) => ({ fill: `rgb(${context.colour(weight)})` })), ...chosenBox()),
      ),
    );
    const beside = [];
    for (let position = 0; position < others().count; position += 1) {
      if (!patches.includes(position)) beside.push(`${place(others(), position)} ${shownWeight(weightOf(chosen, position))}`);
    }
    if (beside.length) {
      figure.append(make('p', `Beside the picture: ${beside.slice(0, 4).join(', ')}`
        + (beside.length > 4 ? ` and ${beside.length - 4} more` : '')));
    }
    return figure;
  }

  const choosePatch = (position) => (
    both() ? context.choose({ [side()]: position }, true) : context.choose({ key: position })
  );
  drawings.addEventListener('click', ({ target }) => {
    const patch = target.closest('.patch');
    if (patch) choosePatch(Number(patch.dataset.position));
  });
  drawings.addEventListener('keydown', (event) => {
    const { rows, columns, first } = context.example.images;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!step) return;
    event.preventDefault();
    const position = context[side()] + step;
    if (position >= 0 && position < first + rows * columns) choosePatch(position);
  });

  return {
    element,
    update(wanted) {
      context = wanted;
      const chosen = context[side()];
      const withFirst = both() && context.example.images.first > 0 && chosen !== 0;
      drawings.replaceChildren(drawing(chosen), ...(withFirst ? [drawing(0)] : []));
    },
  };
}

addView({
  name: 'picture',
  label: 'picture',
  create: patchesView,
  // Of a zoomed or pooled map the patches are not single positions.
  shows: ({ example, queries, keys, choice: { zoom }, signed }) => (
    example.images?.kind === 'grid' && !queries.pooled && !keys.pooled
    && !zoom && !signed
  ),
});
