// What the heads of a set do, and which to look at first, in sentences: a list of texts, and
// of heads as [text, layer, head].

const mostSaid = 3; // heads
const vagueRoles = ['uniform', 'broad'];
// Their scores are no shares of attention, and are not compared with such.
const rolesByLargest = ['aligned', 'positional', 'anti_diagonal', 'monotonic'];
const noRole = 'no_clear_role';

const attends = (name) => page.roles[name] ?? `as ${inWords(name)}`;

const listed = (parts) => (parts.length > 1 ? `${parts.slice(0, -1).join(', ')} and ${parts.at(-1)}` : parts[0]);

// The places of the few largest of [layer, head, value], the first of equal ones first.
function largestOf(values) {
  const known = values.filter(([, , value]) => value !== null && value !== undefined);
  return known.sort(([, , a], [, , b]) => b - a).slice(0, mostSaid);
}

const headsOf = (set) => set.layers.flatMap(({ heads }, layer) => heads.map((_, head) => [layer, head]));

// With a separator between what is said of one head and of the next.
const inOrder = (heads) => heads.flatMap((parts) => ['; ', ...parts]).slice(1);

// At which distance a positional head attends, where that is known.
function distanceWords(set, layer, head) {
  const before = numberOf(set, 'offset', layer, head);
  if (before === null) return attends('positional');
  const isCross = set.layers[layer].kind === 'cross';
  if (!before) return isCross ? 'to the same position of the other text' : attends('own_position');
  const of = isCross ? 'the same one of the other text' : 'each token';
  return `to the position ${Math.abs(before)} ${before > 0 ? 'before' : 'after'} ${of}`;
}

function rolesSaid(set, at) {
  const queries = set.layers.map((_, layer) => set.examples.reduce((sum, each, example) => (
    sum + (each.is_mean ? 0 : exampleOf({ set: at, example, layer }).queries.tokens.length)
  ), 0));
  const isLong = (layer) => queries[layer] >= page.fewest_queries;
  if (!queries.some((_, layer) => isLong(layer))) {
    return [`The text is too short to tell roles: ${Math.max(...queries)} queries. `];
  }
  const heads = headsOf(set).map(([layer, head]) => [layer, head, set.roles[layer][head]])
    .filter(([layer, , role]) => role && isLong(layer));
  const counts = new Map();
  heads.forEach(([, , { name }]) => counts.set(name, (counts.get(name) ?? 0) + 1));
  const others = counts.get(noRole) ?? 0;
  const sorted = [...counts].filter(([name]) => name !== noRole).sort(([, a], [, b]) => b - a);
  const parts = sorted.map(([name, count]) => `${count} attend${count === 1 ? 's' : ''} ${attends(name)}`);
  if (others) parts.push(`${others} ${others === 1 ? 'has' : 'have'} no clear role`);
  const whole = heads.length === 1
    ? `The one head ${parts[0].replace(/^1 /, '')}. ` : `Of ${heads.length} heads ${listed(parts)}. `;
  // The clearest head of each role, and of these the clearest ones, by the share of attention
  // on what the role is about; where the score is none, after the others.
  const best = sorted.filter(([name]) => !vagueRoles.includes(name)).flatMap(([name]) => (
    largestOf(heads.filter(([, , role]) => role.name === name).map(([l, h, { score }]) => [l, h, score])).slice(0, 1)
      .map((place) => [name, place])
  ));
  const of = (isByLargest) => largestOf(
    best.filter(([name]) => rolesByLargest.includes(name) === isByLargest).map(([, place]) => place)
      .sort(([a, b], [c, d]) => a - c || b - d),
  );
  const clearest = [...of(false), ...of(true)].slice(0, mostSaid).map(([layer, head, score]) => {
    const { name } = set.roles[layer][head];
    const words = name === 'positional' ? distanceWords(set, layer, head) : attends(name);
    return [[headName(set, layer, head), layer, head], ` ${words} (${score.toFixed(2)})`];
  });
  return clearest.length ? [whole, 'The clearest: ', ...inOrder(clearest), '. '] : [whole];
}

function sentencesOf(set, at) {
  const said = set.roles?.flat().some(Boolean) ? rolesSaid(set, at) : [];
  const number = set.numbers.find(({ ranks }) => ranks);
  const heads = number ? largestOf(headsOf(set).map(([l, h]) => [l, h, number.values[l][h]])) : [];
  if (!heads.length) return said;
  const unit = /^\d/.test(number.unit) ? `(${number.unit})` : number.unit; // "1 - cosine"
  const parts = heads.map(([layer, head, value]) => [
    [headName(set, layer, head), layer, head], ` ${shownNumber(value)} ${unit}`,
  ]);
  return [...said, `Most important (${number.label}): `, ...inOrder(parts), '.'];
}
