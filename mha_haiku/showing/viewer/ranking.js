// What is known of each head (its role, its numbers), and heads in an order, or only some.

// "role:induction", "importance>0.02" and "importance<0.02" are filters;
// "importance" is an order, the largest first, and "-importance" the smallest first.

function numberOf(set, name, layer, head) {
  if (name === 'role') return set.roles?.[layer]?.[head]?.score ?? null;
  return set.numbers.find((each) => each.name === name)?.values[layer]?.[head] ?? null;
}

// Names as the tables of numbers spell them.
const inWords = (name) => name.replaceAll('_', ' ');

function errorOf(set, name, layer, head) {
  return set.numbers.find((each) => each.name === name)?.errors?.[layer]?.[head] ?? null;
}

const numberNames = (set) => [
  ...(set.roles ? ['role'] : []), ...set.numbers.map(({ name }) => name),
];

function roleNames(set) {
  const names = (set.roles ?? []).flat().filter(Boolean).map(({ name }) => name);
  return [...new Set(names)].sort();
}

// "induction 0.93", "0.012 ± 0.003" or "" where nothing is known.
function said(set, name, layer, head) {
  const value = numberOf(set, name, layer, head);
  if (name === 'role') {
    const role = set.roles?.[layer]?.[head];
    return role ? `${roleWords(role.name)}${value === null ? '' : ` ${shownNumber(value)}`}` : '';
  }
  const error = errorOf(set, name, layer, head);
  return value === null ? '' : shownNumber(value) + (error === null ? '' : ` ± ${shownNumber(error)}`);
}

function readFilter(text) {
  if (text.startsWith('role:')) return { role: text.slice(5) };
  const [, name, sign, bound] = /^(.+)([<>])(-?[\d.]+(?:e-?\d+)?)$/.exec(text) ?? [];
  return name === undefined || Number.isNaN(Number(bound)) ? null : { name, sign, bound: Number(bound) };
}

function passes(set, filter, layer, head) {
  if (!filter) return true;
  if (filter.role !== undefined) return set.roles?.[layer]?.[head]?.name === filter.role;
  const value = numberOf(set, filter.name, layer, head);
  return value !== null && (filter.sign === '>' ? value >= filter.bound : value <= filter.bound);
}

// The heads that pass, [layer, head], in the chosen order: those without a number last.
function ranked(set) {
  const filter = readFilter(choice.filter);
  const heads = set.layers.flatMap(({ heads: names }, layer) => names.map((_, head) => [layer, head]))
    .filter(([layer, head]) => passes(set, filter, layer, head));
  if (!choice.order) return heads;
  const upwards = choice.order.startsWith('-');
  const name = choice.order.replace(/^-/, '');
  const value = ([layer, head]) => numberOf(set, name, layer, head);
  return heads.map((head) => [head, value(head)])
    .sort(([, a], [, b]) => (
      Number(a === null) - Number(b === null) || (upwards ? a - b : b - a)
    ))
    .map(([head]) => head);
}
