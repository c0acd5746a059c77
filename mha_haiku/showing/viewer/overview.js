// All heads: a line per layer, which never wraps; or, once sorted, the heads in order.
//
// Thumbnails are drawn when they come into sight, a few milliseconds of them per frame,
// so that a thousand heads neither delay a click nor jerk while they are scrolled. Those
// of a layer share one canvas behind its buttons, and a list has images: a browser is
// slow with a thousand canvases.

const largestSide = 92; // pixels a side of a thumbnail
const smallestSide = 12;
const legibleSide = 18; // where the width has room for it, many layers scroll
const captionFrom = 34; // thumbnails as wide as that have words below them
const wordFrom = 58; // thumbnails as wide as that have room for the longest word of a role
const captionLine = 13;
const kindTitleHeight = 22;
const millisecondsPerFrame = 12;

const overview = {
  buttons: new Map(), // "layer.head" -> button
  waiting: new Set(), // buttons whose thumbnails are to be drawn
  watcher: null, marked: null, side: 0, columns: 1, lines: [], most: 0,
  names: '', arranged: '', told: '', look: '', // what the parts were last made for
};
const headId = (layer, head) => `${layer}.${head}`;

function buildOverview() {
  const box = element('overview');
  overview.watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.inSight = isIntersecting;
      if (isIntersecting) wantThumbnails(target);
    }
  }, { root: box, rootMargin: '150px' });
  box.addEventListener('click', ({ target }) => {
    const button = target.closest('.head');
    if (button) chooseHead(button.layer, button.head);
  });
  box.addEventListener('keydown', walkOverHeads);
  window.addEventListener('beforeprint', drawAll);
}

// Another head keeps the query, and goes on to its strongest key.
function chooseHead(layer, head) {
  choose({ layer, head, of: 'head' }, true);
}

function updateOverview() {
  const set = page.sets[choice.set];
  // Steps of a training share their heads: then the buttons stay.
  const names = JSON.stringify(set.layers);
  if (overview.names !== names) makeButtons(set);
  const box = element('overview');
  const arranged = [
    names.length, overview.names === names, choice.order, choice.order && choice.role + choice.set,
    choice.beside, numberNames(set), box.clientWidth, window.innerWidth, window.innerHeight,
  ].join('|');
  if (overview.names !== names || overview.arranged !== arranged) arrangeHeads(set);
  Object.assign(overview, { names, arranged: arranged.replace('false', 'true') });
  tellRoles(set);
  tellSentence(set);
  tellNumbers(set);
  markHead();
  const { example, range, scale, colors, special } = choice;
  const look = [choice.set, example, range, scale, colors, special].join();
  if (look !== overview.look) {
    overview.look = look;
    overview.buttons.forEach((button) => { button.drawn = ''; });
    for (const each of box.children) if (each.inSight) wantThumbnails(each);
  }
}

function makeButtons(set) {
  overview.buttons.clear();
  overview.marked = null;
  set.layers.forEach(({ name: layerName, heads }, layer) => heads.forEach((name, head) => {
    const button = make('button', '', { className: 'head', type: 'button', layer, head, tabIndex: -1 });
    button.append(
      make('span', '', { className: 'thumbnail' }),
      make('span', '', { className: 'name' }),
      make('span', '', { className: 'beside' }),
    );
    button.setAttribute('aria-pressed', 'false');
    button.fullName = `${shorten(layerName, 80)}, head ${shorten(name, 80)}`;
    overview.buttons.set(headId(layer, head), button);
  }));
}

// Puts the buttons into lines by layer, or into one list in the chosen order.
function arrangeHeads(set) {
  const box = element('overview');
  overview.watcher.disconnect();
  overview.waiting.clear();
  overview.told = '';
  sizeThumbnails(set, box);
  const { side } = overview;
  const pitch = side + (side < captionFrom ? 4 : 6);
  const button = ([layer, head]) => overview.buttons.get(headId(layer, head));
  box.className = choice.order ? 'ranked' : `layers${side < captionFrom ? ' small' : ''}`;
  box.style.setProperty('--side', `${side}px`);
  box.style.setProperty('--pitch', `${pitch}px`);
  if (choice.order) {
    box.replaceChildren(...ranked(set).map((head) => {
      const made = button(head);
      const picture = make('img', '', { alt: '' });
      made.firstElementChild.replaceChildren(picture);
      return Object.assign(made, { picture, heads: [made] });
    }));
    box.scrollTop = 0;
  } else {
    box.replaceChildren(...set.layers.flatMap(({ name, heads, kind }, layer) => {
      const shared = makeCanvas(heads.length * pitch);
      const buttons = heads.map((_, head) => {
        const made = button([layer, head]);
        made.firstElementChild.replaceChildren();
        return Object.assign(made, { picture: null, canvas: shared, left: head * pitch });
      });
      const short = shortLayer(name, kind);
      const ofKind = /^\d+$/.test(short) ? `layer ${short}` : short;
      const text = side < captionFrom ? tinyLayer(set, name, kind) ?? short : kind ? ofKind : name;
      const isFirst = kind && kind !== set.layers[layer - 1]?.kind;
      return [...(isFirst ? [kindTitle(layer)] : []), make(
        'div', '', { className: 'layer', heads: buttons },
        make('span', shorten(text, 24), { className: 'layer-name', title: shorten(name, 200) }),
        make('div', '', { className: 'heads' }, shared, ...buttons),
        ...(heads.length ? [] : [make('em', 'no heads left')]),
      )];
    }));
    box.style.setProperty('--rows', Math.ceil(box.children.length / overview.columns));
  }
  overview.buttons.forEach((each) => {
    each.drawn = '';
    each.querySelector('.name').textContent = choice.order
      ? each.fullName : shorten(set.layers[each.layer].heads[each.head], 12);
  });
  for (const each of box.children) overview.watcher.observe(each);
  overview.marked = null;
}

// "3" of "layer 3", and of "cross 3" below the title of its kind.
const shortLayer = (name, kind) => (
  kind && name.startsWith(`${kind} `) ? name.slice(kind.length + 1) : name.replace(/^layer /, '')
);

// The number alone, of "attention_3", where small thumbnails leave no room for names.
function tinyLayer({ layers }, name, kind) {
  const number = (text) => /\d+$/.exec(text)?.[0];
  const alike = layers.filter((layer) => layer.kind === kind && number(layer.name) === number(name));
  return alike.length === 1 ? number(name) : shortLayer(name, kind);
}

// The name of a kind of layers, and the meaning of its maps' rows and columns.
function kindTitle(layer) {
  const { queries, keys } = exampleOf({ ...choice, layer });
  const [rows, columns] = [queries.label, (keys ?? queries).label];
  const { kind } = page.sets[choice.set].layers[layer];
  return make(
    'div', '', { className: 'kind', heads: [] }, make('b', shorten(kind, 24)),
    rows && columns ? ` rows: ${rows}, columns: ${columns}` : '',
  );
}

function makeCanvas(width) {
  const canvas = document.createElement('canvas');
  canvas.width = Math.max(1, Math.round(width * pixelRatio()));
  canvas.height = Math.round(overview.side * pixelRatio());
  canvas.style.width = `${canvas.width / pixelRatio()}px`;
  canvas.style.height = `${overview.side}px`;
  return canvas;
}

const pixelRatio = () => Math.min(2, window.devicePixelRatio || 1);

// As large as the longest layer and the number of layers let thumbnails be; with as many
// lines of numbers below them as there is room for.
function sizeThumbnails(set, box) {
  const known = numberNames(set);
  const wished = known.includes('role') ? ['role']
    : ['aligned', 'importance', 'entropy'].filter((name) => known.includes(name));
  if (choice.beside !== 'all') overview.lines = [choice.beside].filter(Boolean);
  else overview.lines = wished.length ? wished : known.slice(0, 3);
  overview.most = kindsOf(set).length ? Math.min(2, overview.lines.length) : overview.lines.length;
  const most = Math.max(1, ...set.layers.map(({ heads }) => heads.length));
  const titles = kindTitleHeight * kindsOf(set).length;
  const high = (overviewRoom() - titles) / Math.max(1, set.layers.length);
  Object.assign(overview, { side: 56, columns: 1 });
  if (choice.order) return;
  const fit = (lines) => Math.min(
    largestSide, Math.floor((box.clientWidth - 70) / most) - 6,
    Math.floor(high - captionLine * (lines + 1 + Number(overview.lines.includes('role'))) - 10),
  );
  while (overview.most && fit(overview.most) < captionFrom) overview.most -= 1;
  overview.side = fit(overview.most);
  if (overview.side < captionFrom) {
    // Many layers stand in columns next to each other, where that makes heads larger.
    const sideIn = (columns) => Math.max(smallestSide, Math.min(
      captionFrom - 1, Math.floor((box.clientWidth / columns - 42) / most) - 4, Math.max(
        legibleSide, Math.floor((overviewRoom() - titles) / Math.ceil(set.layers.length / columns)) - 8,
      ),
    ));
    for (const columns of [2, 3, 4]) if (sideIn(columns) > sideIn(overview.columns)) overview.columns = columns;
    overview.side = sideIn(overview.columns);
  }
}

// The height that the window leaves below the overview's top; a narrow page scrolls anyway.
function overviewRoom() {
  if (window.innerWidth < 900) return Infinity;
  const top = element('overview').getBoundingClientRect().top + window.scrollY;
  return Math.max(280, window.innerHeight - top - 16);
}

// Role and numbers below the thumbnails and in their hints; those of other roles are dimmed.
function tellNumbers(set) {
  const told = [choice.set, choice.beside, choice.order, choice.role].join('|');
  if (told === overview.told) return;
  overview.told = told;
  const names = numberNames(set);
  const first = names.includes('aligned') ? 'aligned' : (overview.most ? overview.lines[0] : names[0]);
  const barred = choice.beside === 'all' ? first : choice.beside;
  const most = Math.max(1e-30, ...[...overview.buttons.values()]
    .map(({ layer, head }) => Math.abs(numberOf(set, barred, layer, head) ?? 0)));
  const lines = choice.order
    ? [...new Set([choice.order.replace(/^-/, ''), ...overview.lines])] : overview.lines;
  // Each of several kinds of layers has its available numbers.
  const isOfOneKind = !kindsOf(set).length;
  const linesAt = (at) => (choice.order ? lines : lines.filter((name) => (
    isOfOneKind || set.layers[at].heads.some((_, head) => said(set, name, at, head))
  )).slice(0, overview.most));
  let left = 0;
  overview.buttons.forEach((button) => {
    const { layer, head, fullName } = button;
    const passed = passes(set, layer, head);
    left += Number(passed);
    button.classList.toggle('dimmed', !passed);
    button.querySelector('.beside').replaceChildren(...(overview.side < captionFrom ? [] : linesAt(layer))
      .map((name) => make(
        'span', captionOf(set, name, layer, head), { className: name === 'role' ? 'role' : 'number' },
      )));
    button.style.setProperty('--role', roleColor(roleOf(set, layer, head)));
    const all = names.map((name) => [name, said(set, name, layer, head)]).filter(([, text]) => text);
    button.title = [fullName, ...all.map(([name, text]) => `${inWords(name)}: ${text}`)].join('\n');
    button.setAttribute('aria-label', [fullName, ...all.map(([name, text]) => `${inWords(name)} ${text}`)].join(', '));
    button.style.setProperty('--share', barred === 'role' ? 1 : Math.abs(numberOf(set, barred, layer, head) ?? 0) / most);
    button.classList.toggle('by-role', barred === 'role');
  });
  tellLegend(set, barred, names);
  const count = overview.buttons.size;
  element('left').textContent = left < count ? `${left} of ${count} heads` : '';
}

// The meaning of the words and numbers below the thumbnails, or of bars if they are small.
function tellLegend(set, barred, names) {
  const told = (name) => {
    const unit = set.numbers.find((each) => each.name === name)?.unit;
    return shorten(inWords(name) + (unit ? ` in ${unit}` : ''), 60);
  };
  const isSmall = overview.side < captionFrom; // bars alone
  const lines = isSmall ? [barred].filter(Boolean) : overview.lines.slice(0, overview.most);
  const numbers = lines.filter((name) => name !== 'role').map(told);
  const said = [];
  if (!choice.order && names.length) {
    if (lines.includes('role') && overview.side < wordFrom) said.push('The bar below a head has the color of its role.');
    if (numbers.length && isSmall) said.push(`The bar below a head: its ${numbers[0]}, as a share of the largest.`);
    else if (numbers.length) said.push(`Below a head: ${numbers.join('; ')}.`);
  }
  const text = said.join(' ');
  element('legend').textContent = text;
  element('legend').hidden = !text;
}

// In full in a list; below a thumbnail the role's name or the number, briefly.
function captionOf(set, name, layer, head) {
  if (choice.order) {
    const text = said(set, name, layer, head) || '–';
    return name === 'role' ? text : `${inWords(name)} ${text}`;
  }
  // A word is never cut: without room, its color replaces it.
  if (name === 'role') return overview.side < wordFrom ? '' : roleWords(roleOf(set, layer, head));
  const number = shownNumber(numberOf(set, name, layer, head), 2);
  const error = errorOf(set, name, layer, head);
  return error === null || overview.side < 70 ? number : `${number} ± ${shownNumber(error, 1)}`;
}

function headButton() {
  return overview.buttons.get(headId(choice.layer, choice.head));
}

function markHead() {
  const button = headButton();
  const isPressed = String(shownHeads() === 'head');
  if (overview.marked === button && button?.ariaPressed === isPressed) return;
  overview.buttons.forEach((each) => {
    if (each !== button && each.tabIndex === 0) {
      each.setAttribute('aria-pressed', 'false');
      each.tabIndex = -1;
    }
  });
  const isNewList = choice.order && !overview.marked; // which shows its first heads
  overview.marked = button;
  if (!button) return;
  button.setAttribute('aria-pressed', isPressed);
  button.tabIndex = 0;
  if (button.isConnected && !isNewList) reveal(element('overview'), button);
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

function wantThumbnails({ heads }) {
  if (!overview.waiting.size) requestAnimationFrame(drawWaiting);
  heads.forEach((button) => overview.waiting.add(button));
}

// Printed pages have no holes.
function drawAll() {
  const maps = unpacked(choice.set, choice.example);
  if (maps) for (const button of overview.buttons.values()) if (!button.drawn) drawThumbnail(button, maps);
}

function drawWaiting() {
  const end = performance.now() + millisecondsPerFrame;
  const maps = unpacked(choice.set, choice.example);
  for (const button of overview.waiting) {
    if (!maps || performance.now() > end) break;
    overview.waiting.delete(button);
    if (!button.drawn) drawThumbnail(button, maps);
  }
  if (overview.waiting.size) requestAnimationFrame(drawWaiting);
}

function drawThumbnail(button, maps) {
  const map = maps.layers[button.layer]?.[button.head];
  if (!map) return;
  const side = Math.round(overview.side * pixelRatio());
  const pixels = raster(map, scaleEnd(map, maps), side, side);
  const { data } = pixels;
  for (let pixel = 0; pixel < data.length; pixel += 4) {
    if (data[pixel + 3] === 0) data.set([...paintOfMasked, 255], pixel);
  }
  if (button.picture) button.picture.src = imageOf(pixels);
  else {
    button.canvas.getContext('2d', { willReadFrequently: true })
      .putImageData(pixels, Math.round(button.left * pixelRatio()), 0);
  }
  button.drawn = overview.look;
}
