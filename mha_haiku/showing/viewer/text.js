// The input as text: each position shaded by its weight with the one that is pointed at, or
// else the chosen one; of a head, or as a mean over heads. Patches of a picture, whose texts
// are "row,column", lie where they are in it, also among the words of a text; then their
// shades are shares of the largest weight on the picture, whose share of all is said.

const listedWeights = 5;

declareWord('of', ['head', 'layer', 'all']); // heads whose mean the text has

function textView() {
  const heads = make('select');
  heads.addEventListener('change', () => context.choose({ of: heads.value }, true));
  const title = make('h3');
  title.setAttribute('aria-live', 'polite');
  // If queries and keys are different texts, the chosen position's text is above.
  const chosenTokens = make('div', '', { className: 'tokens' });
  const shadedTokens = make('div', '', { className: 'tokens' });
  const pictureShare = make('p', '', { className: 'picture-share' });
  const list = make('ol', '', { className: 'largest-weights' });
  const hint = make('p', '', { className: 'hint' });
  const element = make(
    'div', '', { className: 'view text-view' },
    make('div', '', { className: 'view-controls' }, make('label', 'Heads ', {}, heads)),
    chosenTokens, shadedTokens, hint, title, pictureShare, list,
  );

  let context = null;
  let built = null; // what the tokens are of
  let pointed = null; // the bin of the chosen side that is pointed at

  const isFrom = () => context.choice.direction !== 'to';
  const chosenSide = () => (isFrom() ? 'query' : 'key');
  const shadedSide = () => (isFrom() ? 'key' : 'query');
  const axis = (side) => (side === 'query' ? context.queries : context.keys);
  const looking = () => pointed ?? context[chosenSide()];
  const cell = (bin) => (isFrom() ? [looking(), bin] : [bin, looking()]);
  const oneText = () => (
    context.queries.tokens === context.keys.tokens
    && context.queries.edges.join() === context.keys.edges.join()
  );

  function tokensOf(side) {
    const made = [];
    let patches = null; // the grid that they are put into
    for (let bin = 0; bin < axis(side).count; bin += 1) {
      const text = axis(side).text(bin);
      const token = make('button', '', { className: 'token', type: 'button', tabIndex: -1 });
      token.classList.toggle('special', axis(side).isSpecial(bin));
      token.dataset.bin = String(bin);
      const picture = axis(side).pooled ? null : pictureOf(context.example, side, axis(side).start(bin));
      const column = patchColumn(text);
      const number = () => make('small', axis(side).positions(bin));
      const image = () => make('img', '', { src: picture, alt: text, className: 'pixels' });
      if (picture && column !== undefined) {
        token.classList.add('patch');
        token.append(image());
        // Another picture, or part of it, begins at its corner.
        if (!patches || text === '0,0') made.push(patches = make('div', '', { className: 'patches' }));
        patches.style.setProperty('--columns', Number(column) + 1);
        patches.append(token);
        continue;
      }
      if (picture) token.append(number(), image());
      else if (axis(side).pooled && text) token.append(number(), shorten(text, 12));
      else token.textContent = text ? shorten(text, 200) : axis(side).positions(bin);
      made.push(token);
      if (text.endsWith('↵') && !axis(side).pooled) made.push(make('br'));
    }
    return made;
  }

  function shade() {
    const side = shadedSide();
    const weights = Array.from({ length: axis(side).count }, (_, bin) => context.map.at(...cell(bin)));
    const size = weights.map((weight) => (Number.isNaN(weight) ? 0 : Math.abs(weight)));
    const onPicture = isFrom() && !context.signed ? shareOnPicture(axis(side), size, context.example) : null;
    const isPatch = (bin) => onPicture !== null && isOfImage(axis(side).text(bin), context.example);
    const largestOf = (bins) => Math.max(0, ...size.filter((_, bin) => bins(bin))) || 1;
    const [largest, ofPicture] = [largestOf((bin) => !isPatch(bin)), largestOf(isPatch)];
    pictureShare.hidden = onPicture === null;
    pictureShare.textContent = `${percent(onPicture ?? 0)} of its attention is on the picture.`;
    const strength = getComputedStyle(document.documentElement).getPropertyValue('--strength');
    for (const token of shadedTokens.querySelectorAll('.token')) {
      const bin = Number(token.dataset.bin);
      const share = size[bin] / (isPatch(bin) ? ofPicture : largest);
      const masked = context.map.masked(...cell(bin));
      // Over a patch the color of the scale is a veil, through which the picture is seen.
      const veil = `rgba(${colorOf(share)}, 0.6)`;
      const plain = token.classList.contains('patch') ? veil : `rgba(${strength}, ${(0.9 * share).toFixed(3)})`;
      token.style.setProperty('--shade', context.signed
        ? colorText(signedColor(Math.sign(weights[bin]) * 0.7 * share)) : plain);
      token.classList.toggle('masked', masked);
      token.classList.toggle('aligned', context.isAligned(...cell(bin)));
      token.title = `${place(axis(side), bin)}: ${masked ? 'masked' : shownWeight(weights[bin])}`;
    }
    const order = [...size.keys()].filter((bin) => size[bin] > 0)
      .sort((a, b) => size[b] - size[a]).slice(0, listedWeights);
    title.replaceChildren(
      `${chosenSide()} `, ...placeNodes(axis(chosenSide()), looking(), 60),
      isFrom() ? ' attends to' : ' is attended to by',
    );
    list.replaceChildren(...order.map((bin) => make(
      'li', `${side} `, {}, ...placeNodes(axis(side), bin, 60), `: ${shownWeight(weights[bin])}`,
    )));
    if (!order.length) {
      const none = weights.some(Number.isNaN) ? 'The weights are not numbers (NaN).' : 'None: all weights are 0.';
      list.append(make('li', none, { className: 'none' }));
    }
    return order[0] ?? context[side];
  }

  // Outlines the chosen token, which alone the tab key reaches; shows it where it scrolls.
  function outline() {
    const box = oneText() ? shadedTokens : chosenTokens;
    for (const token of element.querySelectorAll('.token')) {
      const pressed = box.contains(token) && Number(token.dataset.bin) === context[chosenSide()];
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

  function offerHeads() {
    const { set, where, maps } = context;
    const count = set.layers.reduce((sum, layer, at) => sum + layer.heads.length * isLike(maps, at), 0);
    const kind = context.layer.kind ? `${context.layer.kind} ` : '';
    const own = set.layers[where.layer].heads.length;
    fillSelect(heads, [
      ...(count > own ? [['all', `all ${count} ${kind}heads (mean)`]] : []),
      ...(own > 1 ? [['layer', `all of ${shorten(context.layer.name, 40)} (mean)`]] : []),
      ['head', headName(set, where.layer, where.head)],
    ], context.choice.of);
  }

  element.addEventListener('click', ({ target }) => {
    const token = target.closest('.token');
    pointed = null;
    if (token) chooseToken(sideOf(token), Number(token.dataset.bin));
  });
  element.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.closest('.token')) return;
    event.preventDefault();
    const bin = context[chosenSide()] + step;
    chooseToken(chosenSide(), Math.max(0, Math.min(axis(chosenSide()).count - 1, bin)));
  });
  element.addEventListener('mouseover', ({ target }) => {
    const token = target.closest('.token');
    const bin = token && Number(token.dataset.bin);
    const isLooking = token && sideOf(token) === chosenSide();
    if (!token || (isLooking && bin === pointed)) return;
    if (isLooking) pointed = bin;
    const [query, key] = cell(isLooking ? shade() : bin);
    context.point({ query, key }, context);
  });
  for (const box of [chosenTokens, shadedTokens]) {
    box.setAttribute('role', 'group');
    box.addEventListener('mouseleave', () => {
      pointed = null;
      shade();
      context.point(null, context);
    });
  }

  return {
    element,
    update(wanted) {
      context = wanted;
      pointed = null;
      offerHeads();
      const isPicture = hasPatches(context.example);
      const isMixed = shareOnPicture(context.keys, Array(context.keys.count).fill(0), context.example) !== null;
      const what = isPicture ? `a ${isMixed ? 'word, or a ' : ''}patch (named by its row and column)` : 'a word';
      hint.textContent = `Point at ${oneText() ? what : 'the upper text'} to see where `
        + `${isFrom() ? 'it looks' : 'it is looked at from'}; click, or use the arrow keys, to keep it. `
        + (context.signed
          ? (page.signed ? 'Red: a positive weight or difference; blue: a negative one. '
            : 'Red: more weight in the first than in the second; blue: less. ')
          : `The ${isPicture ? 'lighter a patch' : 'fuller a background'}, the larger the weight. `)
        + `${context.map.masked(...cell(axis(shadedSide()).count - 1)) ? 'Faint: masked. ' : ''}`
        + `${context.aligned.length ? 'Dashes below: aligned by the task.' : ''}`;
      const focused = element.contains(document.activeElement) && document.activeElement !== heads;
      const { set, example } = context.where;
      const now = [
        set, example, context.layer.kind, isFrom(), oneText(), context.queries.edges, context.keys.edges,
      ].join('/');
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
