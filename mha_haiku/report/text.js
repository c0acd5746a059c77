// Everything said in words: the summary, the chosen cell, the input, the predictions.

const element = (id) => document.getElementById(id);

function make(tag, text, properties = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  return Object.assign(made, properties);
}

// Scrolls a part of the page, and never the page, until something in it is seen.
function reveal(box, inside) {
  const above = inside.offsetTop - box.scrollTop;
  if (above < 0 || above + inside.offsetHeight > box.clientHeight) {
    box.scrollTop += above - (box.clientHeight - inside.offsetHeight) / 2;
  }
}

function describe() {
  const count = page.layers.reduce((sum, layer) => sum + layer.heads.length, 0);
  const input = page.examples[0].queries;
  const plural = (number, noun) => `${number} ${noun}${number === 1 ? '' : 's'}`;
  element('summary').textContent = `${plural(page.layers.length, 'layer')}, `
    + `${plural(count, 'attention head')} in all, ${plural(page.num_examples, 'example')}. `
    + (page.pooled
      ? 'The input is long, so the maps are pooled: a cell is the weight that the queries '
        + `of a range (the first: ${input[0][0]}) give, on average, to a range of keys.`
      : 'Each cell is the attention weight of one query on one key.');
  const shown = page.examples.filter((example) => example.answers).length;
  element('precision').textContent = 'Weights on this page are rounded: they are within '
    + `${page.precision.toPrecision(1)} of the saved ones. The exact numbers are in `
    + 'maps.npz beside this page.'
    + (shown < page.num_examples
      ? ` It shows ${shown} of ${page.num_examples} examples; maps.npz has all.` : '')
    + ' Signs: ␣ space, ↵ line break, ⇥ tab, ∅ empty, U+.... other invisible characters.';
}

function readOut(query, key) {
  const { queries, keys } = page.examples[choice.example];
  element('readout').textContent = `query ${place(queries, query)} → `
    + `key ${place(keys, key)}: ${shownWeight(current.at(query, key))}`;
}

// The weights of the chosen query on all keys, or of all queries on the chosen key.
function chosenWeights() {
  const from = choice.direction === 'from';
  const others = Array.from({ length: from ? current.columns : current.rows });
  return others.map((_, other) => (
    from ? current.at(choice.query, other) : current.at(other, choice.key)
  ));
}

function largestFirst() {
  const weights = chosenWeights();
  return weights.map((_, index) => index).sort((a, b) => weights[b] - weights[a]);
}

// The input as text, each position shaded by its weight with the chosen one.
function showText(example) {
  const from = choice.direction === 'from';
  const bins = from ? example.keys : example.queries;
  const chosen = from ? choice.query : choice.key;
  const chosenBins = from ? example.queries : example.keys;
  const weights = chosenWeights();
  const largest = Math.max(...weights) || 1;
  const strength = getComputedStyle(document.documentElement).getPropertyValue('--strength');
  element('text-title').textContent = `${from ? 'Query' : 'Key'} ${place(chosenBins, chosen)}`;
  const isChosen = (index) => bins[index][0] === chosenBins[chosen][0];
  element('tokens').replaceChildren(...bins.flatMap(([positions, text], index) => {
    const token = make('button', text || positions, { className: 'token', type: 'button' });
    if (page.pooled && text) {
      token.textContent = shorten(text, 12);
      token.prepend(make('small', positions));
    }
    token.title = `${place(bins, index)}: ${shownWeight(weights[index])}`;
    token.style.backgroundColor = `rgba(${strength}, ${0.9 * weights[index] / largest})`;
    token.setAttribute('aria-pressed', String(isChosen(index)));
    token.tabIndex = isChosen(index) ? 0 : -1;
    token.addEventListener('click', () => chooseToken(index));
    return text.endsWith('↵') && !page.pooled ? [token, make('br', '')] : [token];
  }));
  const pressed = element('tokens').querySelector('[aria-pressed="true"]');
  if (pressed) reveal(element('tokens'), pressed);
  element('top').replaceChildren(...largestFirst().slice(0, 5).map((index) => (
    make('li', `${from ? 'key' : 'query'} ${place(bins, index)}: ${shownWeight(weights[index])}`)
  )));
}

async function chooseToken(index) {
  await choose(choice.direction === 'from' ? { query: index } : { key: index }, true);
  element('tokens').querySelector('[aria-pressed="true"]')?.focus();
}

function showAnswers({ answers }) {
  element('answers').hidden = !answers?.total;
  if (!answers?.total) return;
  const { right, counted, total, shown } = answers;
  element('answers-summary').textContent = (counted
    ? `Right: ${right} of ${counted}.` : 'No targets are known here.')
    + (shown.length < total ? ` The first ${shown.length} of ${total} are listed.` : '');
  const line = (name, cells) => {
    const made = make('tr', '');
    made.append(make('th', name, { scope: 'row' }), ...cells);
    return made;
  };
  const cell = (text, className = '') => make('td', text, { className });
  const wrong = ([, , got, wanted]) => wanted && got !== wanted;
  const lines = [
    line('prediction', shown.map((answer) => (
      wrong(answer) ? cell(`${answer[2]} ✗`, 'wrong') : cell(answer[2])
    ))),
    line('target', shown.map((answer) => cell(answer[3]))),
  ];
  if (shown[0][0] !== null) {
    lines.unshift(
      line('position', shown.map((answer) => cell(String(answer[0]), 'position'))),
      line('input', shown.map((answer) => cell(answer[1]))),
    );
  }
  element('answers-table').replaceChildren(...lines);
}
