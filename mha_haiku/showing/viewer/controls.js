// The selects and buttons above the maps, and the words of the head of the page.

function describe() {
  const set = page.sets[0];
  const count = set.layers.reduce((sum, { heads }) => sum + heads.length, 0);
  const first = set.examples[0];
  const inputs = set.examples.filter((example) => !example.is_mean);
  const pooled = [first, ...Object.values(first.kinds ?? {})].some(({ queries, keys }) => (
    queries.edges !== null || (keys ?? queries).edges !== null
  ));
  const kinds = kindsOf(set).map((name) => (
    plural(set.layers.filter((layer) => layer.kind === name).length, `${name} layer`)
  ));
  element('summary').textContent = `${kinds.join(', ') || plural(set.layers.length, 'layer')}, `
    + `${plural(count, 'attention head')} in all, ${plural(inputs.length, 'example')}`
    + `${page.sets.length > 1 ? `, ${page.sets.length} models` : ''}. `
    + (pooled
      ? 'The input is long, so the maps are pooled: a cell is the weight that the queries of '
        + 'a range give, on average, to a range of keys.'
      : 'Each cell is the attention weight of one query on one key.');
  element('notes').replaceChildren(...page.notes.map((note) => make('li', note)));
  element('precision').textContent = 'Weights on this page are rounded: they are within '
    + `${page.precision.toPrecision(1)} of the saved ones. `
    + 'Signs: ## continues a word, ␣ space, ↵ line break, ⇥ tab, ∅ empty, U+.... other invisible characters.';
}

function fillSelect(select, options, value) {
  const wanted = JSON.stringify(options);
  if (select.filled !== wanted) {
    const option = ([name, text]) => make('option', text, { value: name });
    // [label, options] is a group of them.
    select.replaceChildren(...options.map(([name, text]) => (
      Array.isArray(text) ? make('optgroup', '', { label: name }, ...text.map(option)) : option([name, text])
    )));
    select.filled = wanted;
  }
  select.value = value;
}

function buildControls() {
  for (const name of ['range', 'scale', 'colors', 'pair', 'beside', 'order']) {
    element(name).addEventListener('change', ({ target }) => choose({ [name]: target.value }));
  }
  // What is compared with a head is a head.
  element('compare').addEventListener('change', ({ target: { value } }) => (
    choose({ compare: value, ...(value.startsWith('head:') ? { of: 'head' } : {}) })
  ));
  element('special').addEventListener('change', ({ target }) => (
    choose({ special: target.checked ? 'without' : 'with' }, true)
  ));
  for (const name of ['set', 'example']) {
    element(name).addEventListener('change', ({ target }) => (
      choose({ [name]: Number(target.value) }, true)
    ));
  }
  buildKeys();
  element('direction').addEventListener('change', ({ target }) => choose({ direction: target.value }, true));
  for (const form of document.querySelectorAll('form')) {
    form.addEventListener('submit', (event) => event.preventDefault());
  }
  views.forEach(({ name, label }) => {
    const tab = make('button', label, { id: `view-${name}`, type: 'button', value: name });
    tab.setAttribute('role', 'tab');
    tab.setAttribute('aria-controls', 'stage');
    element('views').append(tab);
    tab.addEventListener('click', () => chooseView(name));
  });
  element('views').addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const tabs = [...element('views').children].filter((tab) => !tab.hidden);
    const next = tabs[tabs.findIndex((tab) => tab.value === choice.view) + step];
    if (!next) return;
    chooseView(next.value);
    next.focus();
  });
}

// Another view goes on to the strongest key where it is of one head and the text was not; and
// the tabs stay where they are, though on a narrow page the text is above the heads.
function chooseView(view) {
  const tabs = element('views');
  const { top } = tabs.getBoundingClientRect();
  choose({ view }, choice.of !== 'head');
  window.scrollBy(0, tabs.getBoundingClientRect().top - top);
}

function updateControls(set) {
  const names = (list) => list.map((each, index) => [String(index), setName(each, index)]);
  fillSelect(element('set'), names(page.sets), String(choice.set));
  element('set').parentElement.hidden = page.sets.length < 2;
  fillSelect(element('example'), names(set.examples), String(choice.example));
  element('example').parentElement.hidden = set.examples.length < 2;
  element('note').textContent = set.examples[choice.example].note;
  for (const name of ['range', 'scale', 'colors', 'pair']) element(name).value = choice[name];
  element('special').checked = choice.special === 'without';
  element('special-label').hidden = !set.examples.some(hasSpecial);
  for (const input of document.querySelectorAll('input[name="direction"]')) {
    input.checked = input.value === choice.direction;
  }
  offerNumbers(set);
  offerPartners();
}

// Whether tokens along its whole maps are special: [CLS], </s>.
const hasSpecial = (example) => [example, ...Object.values(example.kinds ?? {})]
  .flatMap(({ queries, keys }) => [queries, keys]).some((axis) => axis?.special && !axis.edges);

// The numbers by which heads can be labeled and sorted.
function offerNumbers(set) {
  const names = numberNames(set);
  const heads = set.layers.reduce((sum, layer) => sum + layer.heads.length, 0);
  element('rank').hidden = !names.length || heads < 2;
  const short = (name) => shorten(inWords(name), 30);
  fillSelect(element('beside'), [
    ['all', names.includes('role') ? 'roles' : 'numbers'],
    ...names.filter((name) => name !== 'role').map((name) => [name, short(name)]), ['', 'nothing'],
  ], choice.beside);
  fillSelect(element('order'), [
    ['', 'layer and head'],
    ['largest first', names.map((name) => [name, short(name)])],
    ['smallest first', names.map((name) => [`-${name}`, short(name)])],
  ], choice.order);
}
