// Role and numbers of each head; heads in an order, or the heads of a role.
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

// "induction 0.93", "0.012 ± 0.003" or "" if unknown.
function said(set, name, layer, head) {
  const value = numberOf(set, name, layer, head);
  if (name === 'role') {
    const role = set.roles?.[layer]?.[head];
    return role ? `${roleWords(role.name)}${value === null ? '' : ` ${shownNumber(value)}`}` : '';
  }
  const error = errorOf(set, name, layer, head);
  return value === null ? '' : shownNumber(value) + (error === null ? '' : ` ± ${shownNumber(error)}`);
}

const passes = (set, layer, head) => !choice.role || roleOf(set, layer, head) === choice.role;

// The heads of the chosen role or of all, [layer, head], in the chosen order: those without a number last.
function ranked(set) {
  const heads = set.layers.flatMap(({ heads: names }, layer) => names.map((_, head) => [layer, head]))
    .filter(([layer, head]) => passes(set, layer, head));
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
