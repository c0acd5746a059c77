// Two maps next to each other, or their difference: of examples, models, steps or heads.

// The partner of the chosen head, {set, example, layer, head}, or a reason why there is none.
function partner() {
  const [kind, text] = choice.compare.split(':');
  if (!kind) return null;
  const here = { set: choice.set, example: choice.example, layer: choice.layer, head: choice.head };
  const [first, second] = text.split('.').map(Number);
  if (kind === 'example') here.example = first;
  if (kind === 'head') [here.layer, here.head] = [first, second];
  if (kind === 'set') {
    here.set = first;
    if (!page.sets[first]) return { reason: 'There is no such model on this page.' };
    const head = headIn(here, first);
    if (!head) return { reason: 'The other model has no such head.' };
    [here.layer, here.head] = head;
  }
  const set = page.sets[here.set];
  if (!set?.examples[here.example]) return { reason: 'There is no such example.' };
  if (set.layers[here.layer]?.heads[here.head] === undefined) return { reason: 'There is no such head.' };
  return here;
}

// The head of another set that corresponds: by its name.
function headIn({ layer, head }, other) {
  const [mine, its] = [page.sets[choice.set].layers[layer], page.sets[other].layers];
  const l = its.findIndex(({ name }) => name === mine.name);
  const h = its[l]?.heads.indexOf(mine.heads[head]) ?? -1;
  return h >= 0 ? [l, h] : null;
}

// The select's choices, which depend on the chosen set.
function offerPartners() {
  const chosen = page.sets[choice.set];
  const options = [['', 'nothing']];
  page.sets.forEach((set, index) => {
    if (index !== choice.set) options.push([`set:${index}`, setName(set, index)]);
  });
  chosen.examples.forEach(({ name }, index) => {
    if (index !== choice.example) options.push([`example:${index}`, shorten(name, 60)]);
  });
  const { layer, head } = choice;
  const heads = new Set([`head:${layer}.${head}`]);
  if (choice.compare.startsWith('head:')) heads.add(choice.compare);
  for (const value of heads) {
    const [l, h] = value.slice(5).split('.').map(Number);
    if (chosen.layers[l]?.heads[h] !== undefined) {
      const name = headName(chosen, l, h);
      const isPinned = value === choice.compare;
      options.push([value, isPinned ? name : `this head (${name}); then choose another`]);
    }
  }
  if (!options.some(([value]) => value === choice.compare)) options.push([choice.compare, '(not here)']);
  fillSelect(element('compare'), options, choice.compare);
  element('pair-label').hidden = !choice.compare;
}

// The contexts to show, with captions; one without a caption if nothing is compared.
function shownContexts(room) {
  const here = { set: choice.set, example: choice.example, layer: choice.layer, head: choice.head };
  const there = partner();
  if (!there || there.reason) {
    return { shown: [{ context: contextOf(here, room) }], reason: there?.reason };
  }
  const narrow = room.width < 640;
  const half = {
    width: narrow ? room.width : (room.width - 24) / 2,
    height: narrow ? room.height * 0.7 : room.height - 24,
  };
  if (choice.pair === 'side') {
    return {
      shown: [here, there].map((where) => ({
        context: contextOf(where, half), caption: nameOf(where, here, there),
      })),
    };
  }
  const first = contextOf(here, { ...room, height: room.height - 44 });
  const { map: other, maps } = contextOf(there, room);
  const same = (name) => maps[name].last === first.maps[name].last;
  if (page.sets[there.set].layers[there.layer].kind !== first.layer.kind) {
    return { shown: [{ context: first }], reason: 'Maps of different kinds have no difference.' };
  }
  if (!same('queries') || !same('keys')) {
    return { shown: [{ context: first }], reason: 'Maps of different lengths have no difference.' };
  }
  const map = new Difference(first.map, other);
  const context = { ...first, map, end: scaleEnd(map, maps), signed: true };
  const [mine, its] = [nameOf(here, here, there), nameOf(there, here, there)];
  const caption = `${mine} less ${its}: red is more in the first, blue in the second`;
  const differ = ['queries', 'keys'].some((side) => (
    first.maps[side].tokens.some((text, position) => text !== maps[side].tokens[position])
  ));
  const reason = differ ? 'The tokens of the two differ: weights at the same positions are subtracted, '
    + 'and the tokens are those of the first.' : undefined;
  return { shown: [{ context, caption }], reason };
}
