// Joins the page's parts: after a choice, the affected parts are drawn again.

let shown = []; // {context, view, element, update, mark, caption} of each map on the stage
let shownPanels = [];

function headName(set, layer, head) {
  return `${shorten(set.layers[layer].name, 60)}, head ${shorten(set.layers[layer].heads[head], 60)}`;
}

const setName = ({ name }, index) => shorten(name || `model ${index + 1}`, 60);

// A head with the set and the example that it is of, where there are several to tell apart.
function nameOf(where, ...others) {
  const set = page.sets[where.set];
  const { name, kind } = set.layers[where.layer];
  const parts = [{
    head: () => headName(set, where.layer, where.head),
    layer: () => `${shorten(name, 60)}, mean of its heads`,
    all: () => (kind ? `Mean of all ${kind} heads` : 'Mean of all heads'),
  }[shownHeads()]()];
  // Next to other sets only the differences are shown.
  const said = (field, count) => (
    others.length ? others.some((other) => other[field] !== where[field]) : count > 1
  );
  if (said('set', page.sets.length)) parts.unshift(setName(set, where.set));
  if (said('example', set.examples.length)) {
    parts.push(shorten(set.examples[where.example].name, 60));
  }
  return parts.join(' · ');
}

// Takes over some choices and shows them. `strongest`: go on to the largest weight of the
// chosen row (or column). All of it happens at once if the maps are unpacked already.
function choose(changes, strongest = false) {
  Object.assign(choice, changes);
  clampChoice();
  writeAddress();
  const other = partner();
  const needed = [choice, ...(other && !other.reason ? [other] : [])];
  if (needed.every(({ set, example }) => unpacked(set, example))) {
    show(strongest);
    return;
  }
  // The controls answer at once, the maps once they are unpacked.
  updateControls(page.sets[choice.set]);
  const wanted = [choice.set, choice.example, choice.compare].join();
  element('stage').setAttribute('aria-busy', 'true');
  Promise.all(needed.map(({ set, example }) => unpack(set, example))).then(() => {
    // Another choice, made while this one was unpacked, shows itself.
    if (wanted === [choice.set, choice.example, choice.compare].join()) show(strongest);
  }).catch(fail);
}

function show(strongest) {
  const set = page.sets[choice.set];
  element('stage').setAttribute('aria-busy', 'false');
  updateControls(set);
  updateOverview();
  element('detail').hidden = !headButton();
  if (!headButton()) return;
  if (strongest) chooseStrongest();
  element('answer').hidden = !exampleOf(choice).answers;
  element('detail-title').textContent = nameOf({ ...choice }); // before its room is measured
  const { shown: wanted, reason } = shownContexts(stageRoom());
  element('compare-note').textContent = reason ?? '';
  showTabs(wanted);
  showOnStage(wanted);
  for (const panel of shownPanels) {
    panel.box.hidden = !panel.shows(wanted[0].context);
    if (!panel.box.hidden) panel.update(wanted[0].context);
  }
  updateTable(wanted[0].context);
  showAnswer(wanted[0].context);
  point(null, wanted[0].context);
}

function chooseStrongest() {
  const map = shownMap(choice, mapsAt(choice));
  const { queries, keys } = map;
  const from = choice.direction === 'from';
  const [own, others] = from ? [queries, keys] : [keys, queries];
  const chosen = own.bin(choice[from ? 'query' : 'key']);
  if (own.kept) choice[from ? 'query' : 'key'] = own.start(chosen); // a special token may have been chosen
  let best = 0;
  const weight = (other) => (from ? map.at(chosen, other) : map.at(other, chosen));
  for (let other = 1; other < others.count; other += 1) {
    if (weight(other) > weight(best)) best = other;
  }
  choice[from ? 'key' : 'query'] = others.start(best);
  clampChoice();
}

// The room for a view: as wide as the stage, as high as the window leaves.
function stageRoom() {
  const stage = element('stage');
  const top = stage.getBoundingClientRect().top + window.scrollY;
  return {
    width: Math.max(240, stage.clientWidth),
    // Below each other (on a phone) each part has the whole window.
    height: window.innerWidth < 900
      ? Math.max(360, window.innerHeight - 140)
      : Math.max(320, Math.min(900, window.innerHeight - top - 16)),
  };
}

// The views that can show all that is wanted.
function showTabs(wanted) {
  const possible = views.filter((view) => wanted.every(({ context }) => view.shows(context)));
  if (!possible.some(({ name }) => name === choice.view)) choice.view = 'map';
  for (const tab of element('views').children) {
    tab.hidden = !possible.some(({ name }) => name === tab.value);
    tab.setAttribute('aria-selected', String(tab.value === choice.view));
    tab.tabIndex = tab.value === choice.view ? 0 : -1;
  }
  const { example } = wanted[0].context;
  element('view-text').textContent = hasPatches(example) ? 'picture' : 'text';
  element('map-hint').hidden = element('readout').hidden = choice.view !== 'map';
  element('panes').classList.toggle('reading', choice.view === 'text');
  element('stage').setAttribute('aria-labelledby', `view-${choice.view}`);
}

// Views stay as they are, with their focus and scroll, while the same ones are wanted.
function showOnStage(wanted) {
  const same = shown.length === wanted.length && shown.every(({ name }) => name === choice.view);
  if (!same) {
    const view = views.find(({ name }) => name === choice.view);
    shown = wanted.map(() => {
      const made = view.create();
      const caption = make('figcaption');
      const figure = make('figure', '', {}, caption, made.element);
      return { ...made, name: view.name, caption, figure };
    });
    element('stage').replaceChildren(...shown.map(({ figure }) => figure));
  }
  wanted.forEach(({ context, caption }, index) => {
    const one = shown[index];
    one.context = context;
    one.caption.textContent = caption ?? '';
    one.caption.hidden = !caption;
    one.update(context);
  });
}

// A cell is pointed at, {query, key} in bins of a shown map, or none: says its weight, and
// marks the same positions in the other map.
function point(cell, context = shown[0]?.context) {
  if (!context) return;
  const { query, key } = cell ?? context;
  const { map, queries, keys } = context;
  element('readout').classList.toggle('pooled', context.maps.queries.pooled);
  const noWeight = map instanceof Difference ? 'no difference, masked in one of the two' : 'masked, may not attend';
  const weight = map.masked(query, key) ? noWeight : shownWeight(map.at(query, key));
  const aligned = context.isAligned(query, key) ? ', aligned' : '';
  element('readout').textContent = `query ${place(queries, query)} → key ${place(keys, key)}: ${weight}${aligned}`;
  for (const one of shown) {
    // Maps of another kind have other positions.
    const there = cell && one.context.layer.kind === context.layer.kind && {
      query: one.context.queries.bin(queries.start(query)), key: one.context.keys.bin(keys.start(key)),
    };
    one.mark?.(there);
  }
}

async function start() {
  await unpackTokens();
  const wanted = prepare();
  element('main').hidden = false;
  await unpack(choice.set, choice.example);
  if (!wanted.has('query') && !exampleOf(choice).alignment?.length) chooseSeeingQuery();
  if (!wanted.has('head') && !wanted.has('view') && (hasWords() || hasPatches(exampleOf(choice)))) Object.assign(choice, { view: 'text', of: 'all' });
  choose({}, !wanted.has('key'));
  putAddress();
}

// Whether the input is a text of words, which says more at first than a head's map; not where the
// task knows where heads should look.
function hasWords() {
  const { queries, keys, alignment } = exampleOf(choice);
  const special = new Set(queries.special);
  return !alignment && !(keys ?? queries).edges
    && queries.tokens.some((text, position) => !special.has(position) && /\p{L}{2}/u.test(text));
}

// The last query that may attend to anything, as padding may not, and is of the text.
function chooseSeeingQuery() {
  const { layers, queries, keys } = mapsAt(choice);
  const map = layers[choice.layer]?.[choice.head];
  if (!map) return;
  const isPlain = (query) => queries.special.size === queries.count || !queries.isSpecial(query);
  for (let query = queries.count - 1; query >= 0; query -= 1) {
    for (let key = 0; key < keys.count; key += 1) {
      if (!map.masked(query, key) && isPlain(query)) {
        choice.query = queries.stop(query) - 1;
        return;
      }
    }
  }
}

// Everything but the maps.
function prepare() {
  page.sets.forEach((set, at) => { set.said = sentencesOf(set, at); });
  describe();
  buildOverview();
  buildControls();
  buildTable();
  shownPanels = panels.map((panel) => {
    const made = panel.create();
    const box = make(
      'section', '', { className: `panel ${panel.name}`, hidden: true },
      make('h3', panel.label), made.element,
    );
    element('panels').append(box);
    return { ...panel, ...made, box };
  });
  declareInitial();
  const wanted = readAddress();
  clampChoice();
  window.addEventListener('hashchange', () => {
    const again = readAddress();
    choose({}, !again.has('key'));
  });
  // Room and colors change: the page is laid out again.
  let timer = null;
  window.addEventListener('resize', () => {
    clearTimeout(timer);
    timer = setTimeout(() => choose({}), 100);
  });
  return wanted;
}

// What the choices are at first, on this page: the first head that the sentence names, or else
// `tellingHead`; the last query (the last that is aligned), which also a causal model lets see
// most; and a scale that shows small weights of long rows.
function declareInitial() {
  const set = page.sets.at(-1);
  const initial = (name, value) => { fields.get(name).initial = value; };
  if (page.sets.length === 2) initial('compare', 'set:1');
  const first = [Math.max(0, set.layers.findIndex(({ heads }) => heads.length)), 0];
  const named = set.said.find(Array.isArray)?.slice(1);
  const [layer, head] = (kindsOf(set).length ? null : named) ?? tellingHead(set) ?? first;
  initial('layer', layer);
  initial('head', head);
  const { queries, keys, alignment } = exampleOf({ set: page.sets.length - 1, example: 0, layer });
  initial('query', alignment?.at(-1)?.[0] ?? queries.tokens.length - 1);
  if ((keys ?? queries).tokens.length > 32) initial('scale', 'root');
}

// The head that is aligned best, or has the least entropy where nothing is aligned; of several
// kinds of layers a head of the last kind (cross-attention), which says most.
function tellingHead(set) {
  const kind = kindsOf(set).at(-1);
  const heads = set.layers.flatMap((layer, at) => (
    !kind || layer.kind === kind ? layer.heads.map((_, head) => [at, head]) : []
  ));
  for (const [name, sign] of [['aligned', -1], ['entropy', 1]]) {
    const value = ([layer, head]) => numberOf(set, name, layer, head);
    const known = heads.filter((head) => value(head) !== null);
    if (known.length) return known.sort((a, b) => sign * (value(a) - value(b)))[0];
  }
  return heads[0];
}

function fail(error) {
  element('failure').hidden = false;
  element('failure').textContent = `This page could not draw its maps (${error.message}). `
    + 'It needs a browser of 2023 or later.';
}

start().catch(fail);
