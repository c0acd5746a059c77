// The input as text: each position shaded by its weight with the chosen one. Patches of a
// picture, whose texts are "row,column", lie where they are in it.

const listedWeights = 5;

function textView() {
  const title = make('h3');
  // Where queries and keys are different texts, the chosen position's text stands above.
  const chosenTokens = make('div', '', { className: 'tokens' });
  const shadedTokens = make('div', '', { className: 'tokens' });
  const list = make('ol', '', { className: 'largest-weights' });
  const hint = make('p', '', { className: 'hint' });
  const element = make(
    'div', '', { className: 'view text-view' },
    title, chosenTokens, shadedTokens, hint, make('h3', 'Largest weights'), list,
  );

  let context = null;
  let built = null; // what the tokens are of

  const isFrom = () => context.choice.direction !== 'to';
  const chosenSide = () => (isFrom() ? 'query' : 'key');
  const shadedSide = () => (isFrom() ? 'key' : 'query');
  const axis = (side) => (side === 'query' ? context.queries : context.keys);
  const cell = (bin) => (isFrom() ? [context.query, bin] : [bin, context.key]);
  const oneText = () => (
    context.queries.tokens === context.keys.tokens
    && context.queries.edges.join() === context.keys.edges.join()
  );

  function tokensOf(side) {
    const made = [];
    for (let bin = 0; bin < axis(side).count; bin += 1) {
      const text = axis(side).text(bin);
      const token = make('button', '', { className: 'token', type: 'button', tabIndex: -1 });
      const picture = axis(side).pooled ? null : pictureOf(context.example, side, axis(side).start(bin));
      const [, column] = /^\d+,(\d+)$/.exec(text) ?? [];
      if (picture && column !== undefined) {
        if (column === '0') made.push(make('br'));
        token.classList.add('patch');
        token.append(make('img', '', { src: picture, alt: text, className: 'pixels' }));
      } else if (picture) {
        token.append(make('small', axis(side).positions(bin)), make('img', '', { src: picture, alt: text, className: 'pixels' }));
      } else if (axis(side).pooled && text) {
        token.append(make('small', axis(side).positions(bin)), shorten(text, 12));
      } else {
        token.textContent = text ? shorten(text, 200) : axis(side).positions(bin);
      }
      token.dataset.bin = String(bin);
      made.push(token);
      if (text.endsWith('↵') && !axis(side).pooled) made.push(make('br'));
    }
    return made;
  }

  function shade() {
    const side = shadedSide();
    const weights = Array.from({ length: axis(side).count }, (_, bin) => context.map.at(...cell(bin)));
    const size = weights.map((weight) => (Number.isNaN(weight) ? 0 : Math.abs(weight)));
    const largest = Math.max(...size) || 1;
    const strength = getComputedStyle(document.documentElement).getPropertyValue('--strength');
    for (const token of shadedTokens.querySelectorAll('.token')) {
      const bin = Number(token.dataset.bin);
      const share = size[bin] / largest;
      const masked = context.map.masked(...cell(bin));
      // Over a patch the colour is a veil, through which the picture is seen.
      const veil = token.classList.contains('patch') ? 0.75 : 0.9;
      token.style.setProperty('--shade', context.signed
        ? colourText(signedColour(Math.sign(weights[bin]) * 0.7 * share))
        : `rgba(${strength}, ${(veil * share).toFixed(3)})`);
      token.classList.toggle('masked', masked);
      token.classList.toggle('aligned', context.isAligned(...cell(bin)));
      token.title = `${place(axis(side), bin)}: ${masked ? 'masked' : shownWeight(weights[bin])}`;
    }
    const order = [...size.keys()].filter((bin) => size[bin] > 0)
      .sort((a, b) => size[b] - size[a]).slice(0, listedWeights);
    list.replaceChildren(...order.map((bin) => make(
      'li', `${side} `, {}, ...placeNodes(axis(side), bin, 60), `: ${shownWeight(weights[bin])}`,
    )));
    if (!order.length) {
      const none = weights.some(Number.isNaN) ? 'The weights are not numbers (NaN).' : 'None: all weights are 0.';
      list.append(make('li', none, { className: 'none' }));
    }
  }

  // Outlines the chosen token, which alone the tab key reaches; shows it where it scrolls.
  function outline() {
    const box = oneText() ? shadedTokens : chosenTokens;
    for (const token of element.querySelectorAll('.token')) {
      const pressed = token.parentElement === box && Number(token.dataset.bin) === context[chosenSide()];
      token.ariaPressed = String(pressed);
      token.tabIndex = pressed ? 0 : -1;
      if (pressed) reveal(box, token);
    }
    return box.querySelector('[aria-pressed="true"]');
  }

  const chooseToken = (side, bin) => context.choose({
    [side]: axis(side).start(bin), direction: side === 'query' ? 'from' : 'to',
  }, true);
  const sideOf = (token) => (
    shadedTokens.contains(token) && !oneText() ? shadedSide() : chosenSide()
  );

  element.addEventListener('click', ({ target }) => {
    const token = target.closest('.token');
    if (token) chooseToken(sideOf(token), Number(token.dataset.bin));
  });
  element.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.closest('.token')) return;
    event.preventDefault();
    const bin = context[chosenSide()] + step;
    chooseToken(chosenSide(), Math.max(0, Math.min(axis(chosenSide()).count - 1, bin)));
  });
  shadedTokens.addEventListener('mouseover', ({ target }) => {
    const token = target.closest('.token');
    if (!token) return;
    const [query, key] = cell(Number(token.dataset.bin));
    context.point({ query, key }, context);
  });
  shadedTokens.addEventListener('mouseleave', () => context.point(null, context));
  for (const box of [chosenTokens, shadedTokens]) box.setAttribute('role', 'group');

  return {
    element,
    update(wanted) {
      context = wanted;
      title.replaceChildren(isFrom() ? 'Query ' : 'Key ', ...placeNodes(axis(chosenSide()), context[chosenSide()], 60));
      hint.textContent = (context.signed
        ? (page.signed ? 'Red: a positive weight with the chosen position, or difference; blue: a negative one. '
          : 'Red: more weight in the first than in the second; blue: less. ')
        : 'The stronger a background, the larger the weight with the chosen position (the largest: full colour). ')
        + `${context.map.numMasked ? 'Faint: masked. ' : ''}`
        + `${context.aligned.length ? 'Dashes below: aligned by the task. ' : ''}The outlined position is chosen. Click another `
        + `${oneText() ? '' : 'of either text '}to choose it; arrow keys go on to the next.`;
      const focused = element.contains(document.activeElement);
      const { set, example } = context.where;
      const now = [set, example, context.layer.kind, isFrom(), oneText(), axis(shadedSide()).edges.join()].join('/');
      if (built !== now) {
        shadedTokens.replaceChildren(...tokensOf(shadedSide()));
        chosenTokens.replaceChildren(...(oneText() ? [] : tokensOf(chosenSide())));
        chosenTokens.hidden = oneText();
        const names = { query: 'Queries', key: 'Keys' };
        shadedTokens.setAttribute('aria-label', oneText() ? 'Positions of the input' : names[shadedSide()]);
        chosenTokens.setAttribute('aria-label', names[chosenSide()]);
        built = now;
      }
      shade();
      const chosen = outline();
      if (focused) chosen?.focus();
    },
  };
}

addView({ name: 'text', label: 'text', create: textView, shows: () => true });
