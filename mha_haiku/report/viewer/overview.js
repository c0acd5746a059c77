// All heads: a line per layer, which never wraps; or, once sorted, the heads in order.
//
// A thumbnail is drawn when it comes into sight, a few milliseconds of them per frame,
// so that a thousand heads neither delay a click nor jerk while they are scrolled.

const smallest = 14; // pixels a side of a thumbnail
const largestSide = 92;
const captionFrom = 40; // thumbnails as wide as that have words below them
const millisecondsPerFrame = 8;

const overview = { set: -1, buttons: new Map(), mode: '', watcher: null, waiting: new Set(), look: '' };
const headId = (layer, head) => `${layer}.${head}`;

function buildOverview() {
  const box = element('overview');
  overview.watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.inSight = isIntersecting;
      if (isIntersecting) wantThumbnail(target);
    }
  }, { root: box, rootMargin: '200px' });
  box.addEventListener('click', ({ target }) => {
    const button = target.closest('.head');
    if (button) chooseHead(button.layer, button.head);
  });
  box.addEventListener('keydown', walkOverHeads);
}

// Another head keeps the query, and goes on to its strongest key.
function chooseHead(layer, head) {
  choose({ layer, head }, true);
}

function updateOverview() {
  const set = page.sets[choice.set];
  const mode = `${choice.order}|${choice.order ? choice.filter : ''}`;
  // Steps of a training share their heads: then the buttons stay.
  const names = JSON.stringify(set.layers);
  if (overview.names !== names) { makeButtons(set); overview.names = names; overview.mode = null; }
  if (overview.mode !== mode || overview.set !== choice.set) {
    if (overview.mode !== mode || choice.order) arrangeHeads(set);
    overview.mode = mode;
    overview.told = '';
  }
  overview.set = choice.set;
  tellNumbers(set);
  sizeOverview(set);
  markHead();
  const { example, range, scale, colours } = choice;
  const look = [choice.set, example, range, scale, colours, overview.side].join();
  if (look !== overview.look) {
    overview.look = look;
    overview.buttons.forEach((button) => { if (button.inSight) wantThumbnail(button); });
  }
}

function makeButtons(set) {
  overview.watcher.disconnect();
  overview.waiting.clear();
  overview.buttons.clear();
  set.layers.forEach(({ name: layerName, heads }, layer) => heads.forEach((name, head) => {
    const button = make('button', '', { className: 'head', type: 'button', layer, head, tabIndex: -1 });
    button.append(
      document.createElement('canvas'),
      make('span', shorten(name, 12), { className: 'name' }),
      make('span', '', { className: 'beside' }),
    );
    button.fullName = `${shorten(layerName, 80)}, head ${shorten(name, 80)}`;
    button.shortName = `${shorten(layerName.replace(/^layer /, ''), 12)}.${shorten(name, 12)}`;
    overview.buttons.set(headId(layer, head), button);
  }));
}

function arrangeHeads(set) {
  const box = element('overview');
  overview.watcher.disconnect();
  const button = ([layer, head]) => overview.buttons.get(headId(layer, head));
  box.className = choice.order ? 'ranked' : 'layers';
  if (choice.order) box.replaceChildren(...ranked(set).map(button));
  else {
    box.replaceChildren(...set.layers.map(({ name, heads }, layer) => make(
      'div', '', { className: 'layer' },
      make('span', shorten(name, 40), { className: 'layer-name', title: shorten(name, 200) }),
      ...(heads.length ? heads.map((_, head) => button([layer, head])) : [make('em', 'no heads left')]),
    )));
  }
  overview.buttons.forEach((each) => {
    each.inSight = false;
    each.querySelector('.name').textContent = choice.order
      ? each.shortName : shorten(set.layers[each.layer].heads[each.head], 12);
    if (each.isConnected) overview.watcher.observe(each);
  });
}

// Role and numbers below the thumbnails and in their hints; others are dimmed by a filter.
function tellNumbers(set) {
  const told = [choice.set, choice.beside, choice.order, choice.filter].join('|');
  if (told === overview.told) return;
  overview.told = told;
  const filter = readFilter(choice.filter);
  const names = numberNames(set);
  const most = Math.max(...set.numbers.filter(({ name }) => name === choice.beside)
    .flatMap(({ values }) => values.flat()).map((value) => Math.abs(value ?? 0)), 1e-30);
  let left = 0;
  overview.buttons.forEach((button) => {
    const { layer, head, fullName } = button;
    const passed = passes(set, filter, layer, head);
    left += Number(passed);
    button.classList.toggle('dimmed', !passed);
    const lines = names.map((name) => [name, said(set, name, layer, head)]).filter(([, text]) => text);
    const sorted = choice.order.replace(/^-/, '');
    const besides = new Set([choice.beside, ...(sorted ? [sorted, 'role', 'importance', 'entropy'] : [])]);
    button.querySelector('.beside').replaceChildren(...lines.filter(([name]) => besides.has(name))
      .map(([name, text]) => make('span', choice.order && name !== 'role' ? `${name} ${text}` : text)));
    button.title = [fullName, ...lines.map(([name, text]) => `${name}: ${text}`)].join('\n');
    button.setAttribute('aria-label', [fullName, ...lines.map(([name, text]) => `${name} ${text}`)].join(', '));
    const share = Math.abs(numberOf(set, choice.beside, layer, head) ?? 0) / (choice.beside === 'role' ? 1 : most);
    button.style.setProperty('--share', Math.min(1, share));
  });
  const count = overview.buttons.size;
  element('left').textContent = left < count ? `${left} of ${count} heads` : '';
}

// As large as the longest layer and the number of layers let the thumbnails be.
function sizeOverview(set) {
  const box = element('overview');
  const [wide, high] = [box.clientWidth - 70, overviewRoom()];
  const most = Math.max(1, ...set.layers.map(({ heads }) => heads.length));
  let side = Math.min(largestSide, Math.floor(wide / most) - 6, Math.floor(high / set.layers.length) - 40);
  if (side < captionFrom) {
    side = Math.min(captionFrom - 1, Math.floor(wide / most) - 5, Math.floor(high / set.layers.length) - 10);
  }
  overview.side = choice.order ? 56 : Math.max(smallest, side);
  box.style.setProperty('--side', `${overview.side}px`);
  box.classList.toggle('small', overview.side < captionFrom);
}

// The height that is left in the window below the overview's top, where it stands beside.
function overviewRoom() {
  const top = element('overview').getBoundingClientRect().top + window.scrollY;
  return Math.max(280, window.innerHeight - top - 16);
}

function headButton() {
  return overview.buttons.get(headId(choice.layer, choice.head));
}

function markHead() {
  const button = headButton();
  if (overview.marked === button) return;
  overview.marked?.setAttribute('aria-pressed', 'false');
  if (overview.marked) overview.marked.tabIndex = -1;
  overview.marked = button;
  if (!button) return;
  button.setAttribute('aria-pressed', 'true');
  button.tabIndex = 0;
  if (button.isConnected) reveal(element('overview'), button);
}

function walkOverHeads(event) {
  const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (!move) return;
  event.preventDefault();
  const [down, right] = move;
  const { layers } = page.sets[choice.set];
  if (choice.order) {
    const heads = ranked(page.sets[choice.set]);
    const now = heads.findIndex(([layer, head]) => layer === choice.layer && head === choice.head);
    const next = heads[now + down + right];
    if (next) chooseHead(...next);
  } else {
    let layer = choice.layer + down;
    while (layers[layer] && !layers[layer].heads.length) layer += down;
    if (!layers[layer]) return;
    chooseHead(layer, Math.max(0, choice.head + right));
  }
  headButton()?.focus();
}

function wantThumbnail(button) {
  if (!overview.waiting.size) requestAnimationFrame(drawWaiting);
  overview.waiting.add(button);
}

function drawWaiting() {
  const end = performance.now() + millisecondsPerFrame;
  const maps = unpacked(choice.set, choice.example);
  for (const button of overview.waiting) {
    if (!maps || performance.now() > end) break;
    overview.waiting.delete(button);
    if (button.drawn !== overview.look) drawThumbnail(button, maps.layers[button.layer]?.[button.head]);
  }
  if (overview.waiting.size) requestAnimationFrame(drawWaiting);
}

function drawThumbnail(button, map) {
  if (!map) return;
  const canvas = button.firstElementChild;
  const side = Math.round(overview.side * Math.min(2, window.devicePixelRatio || 1));
  const small = raster(map, scaleEnd(map), side);
  canvas.width = side;
  canvas.height = side;
  const brush = canvas.getContext('2d');
  brush.fillStyle = `rgb(${paintOfMasked})`;
  brush.fillRect(0, 0, side, side);
  brush.imageSmoothingEnabled = false;
  brush.drawImage(small, 0, 0, side, side);
  button.drawn = overview.look;
}
