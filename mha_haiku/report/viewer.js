// The page's parts and what happens when one of them is used.

const canvas = element('map');
let current = null; // the enlarged map
let geometry = null; // and where it lies on its canvas

function buildOverview() {
  page.layers.forEach((layer, layerIndex) => {
    const line = make('div', '', { className: 'layer' });
    const heads = make('div', layer.heads.length ? '' : 'no heads left');
    layer.heads.forEach((name, headIndex) => {
      const button = make('button', '', { className: 'head', type: 'button' });
      button.append(document.createElement('canvas'), make('span', name));
      button.setAttribute('aria-label', `${layer.name}, ${name}`);
      button.addEventListener('click', () => (
        choose({ layer: layerIndex, head: headIndex }, true)
      ));
      heads.append(button);
    });
    line.append(make('span', layer.name), heads);
    element('overview').append(line);
  });
  element('overview').addEventListener('keydown', (event) => {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if (!moves[event.key]) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    let layer = choice.layer + down;
    while (page.layers[layer] && !page.layers[layer].heads.length) layer += down;
    if (!page.layers[layer]) return;
    choose({ layer, head: Math.max(0, choice.head + right) }, true);
    headButton().focus();
  });
}

function headButton() {
  const line = element('overview').children[choice.layer];
  return line.querySelectorAll('.head')[choice.head];
}

async function drawOverview() {
  const { example } = choice;
  const all = await maps(example);
  if (choice.example !== example) return;
  all.forEach((heads, layer) => {
    const thumbnails = element('overview').children[layer].querySelectorAll('canvas');
    heads.forEach((map, head) => drawThumbnail(thumbnails[head], map));
  });
}

// Takes over some choices and shows them; only what they touch is drawn again.
// `strongest`: go on to the largest weight of the chosen row (or column).
async function choose(changes, strongest = false) {
  Object.assign(choice, changes);
  clampChoice();
  writeAddress();
  for (const name of ['example', 'range', 'scale']) element(name).value = choice[name];
  document.querySelectorAll('input[name="direction"]').forEach((input) => {
    input.checked = input.value === choice.direction;
  });
  for (const button of document.querySelectorAll('.head')) {
    button.setAttribute('aria-pressed', 'false');
    button.tabIndex = -1;
  }
  const button = headButton();
  element('detail').hidden = !button;
  const example = page.examples[choice.example];
  element('note').textContent = example.note;
  if ('example' in changes) showAnswers(example);
  if (['example', 'range', 'scale'].some((name) => name in changes)) await drawOverview();
  if (!button) return;
  button.setAttribute('aria-pressed', 'true');
  button.tabIndex = 0;
  reveal(element('overview'), button);
  const heads = (await maps(choice.example))[choice.layer];
  // Another choice, made while this one was unpacked, shows itself.
  if (page.examples[choice.example] !== example) return;
  current = heads[choice.head];
  if (strongest) choice[choice.direction === 'from' ? 'key' : 'query'] = largestFirst()[0];
  writeAddress();
  const layer = page.layers[choice.layer];
  element('detail-title').textContent = `${layer.name}, ${layer.heads[choice.head]}: ${example.name}`;
  canvas.setAttribute('aria-label', element('detail-title').textContent);
  geometry = layout(current, example.queries, example.keys);
  drawMap(canvas, current, geometry);
  drawBar(element('bar'));
  element('bar-end').textContent = shownWeight(scaleEnd(current));
  showText(example);
  readOut(choice.query, choice.key);
}

function cellAt(event) {
  const box = canvas.getBoundingClientRect();
  const shrunk = box.width / (geometry.left + geometry.width + 12);
  const key = Math.floor(((event.clientX - box.left) / shrunk - geometry.left) / geometry.cell);
  const query = Math.floor(((event.clientY - box.top) / shrunk - geometry.top) / geometry.cell);
  const inside = key >= 0 && query >= 0 && key < current.columns && query < current.rows;
  return inside ? { query, key } : null;
}

function listen() {
  for (const name of ['example', 'range', 'scale']) {
    element(name).addEventListener('change', ({ target }) => {
      if (name === 'example') choose({ example: Number(target.value) }, true);
      else choose({ [name]: target.value });
    });
  }
  element('controls').addEventListener('submit', (event) => event.preventDefault());
  element('direction').addEventListener('change', ({ target }) => {
    choose({ direction: target.value }, true);
  });
  canvas.addEventListener('mousemove', (event) => {
    const cell = cellAt(event) ?? choice;
    readOut(cell.query, cell.key);
  });
  canvas.addEventListener('mouseleave', () => readOut(choice.query, choice.key));
  canvas.addEventListener('click', (event) => choose(cellAt(event) ?? {}));
  canvas.addEventListener('keydown', (event) => {
    const moves = {
      ArrowRight: ['key', 1], ArrowLeft: ['key', -1], ArrowDown: ['query', 1], ArrowUp: ['query', -1],
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    const [name, step] = moves[event.key];
    choose({ [name]: Math.max(0, choice[name] + step) });
  });
  element('tokens').addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const chosen = choice.direction === 'from' ? choice.query : choice.key;
    chooseToken(Math.max(0, chosen + step));
  });
  window.addEventListener('hashchange', () => {
    const wanted = readAddress();
    choose({ example: choice.example }, !wanted.has('key'));
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => choose({}));
}

async function start() {
  describe();
  buildOverview();
  page.examples.forEach(({ name }, index) => {
    element('example').append(make('option', name, { value: String(index) }));
  });
  if (page.examples[0].keys.length > 32) choice.scale = 'root';
  choice.query = Infinity; // the last query, which also a causal model lets see most
  const wanted = readAddress();
  clampChoice();
  listen();
  element('main').hidden = false;
  await choose({ example: choice.example }, !wanted.has('key'));
}

start().catch((error) => {
  element('failure').hidden = false;
  element('failure').textContent = `This page could not draw its maps (${error.message}). `
    + 'It needs a browser of 2023 or later; the pictures beside it show the same maps.';
});
