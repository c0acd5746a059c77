// Roles in colors: a legend of the existing roles, and a sentence of links.

const roleColors = {
  previous_token: '#4477aa', next_token: '#56b4e9', own_position: '#228833', first_token: '#d6a400',
  separator: '#8a6d00', induction: '#ee6677', positional: '#aa3377', anti_diagonal: '#882255',
  monotonic: '#44aa99', aligned: '#ff5a1f', on_image: '#00798c', uniform: '#9d8cd6', broad: '#b0a8b9',
};
const roleColor = (name) => roleColors[name] ?? (!name || name === 'no_clear_role' ? 'transparent' : '#808080');

const roleWords = (name) => shorten(inWords(name), 40);

const roleOf = (set, layer, head) => set.roles?.[layer]?.[head]?.name ?? '';

// A click on a role shows only its heads; another click shows all heads again.
function tellRoles(set) {
  const counts = new Map();
  set.roles?.flat().filter(Boolean).forEach(({ name }) => counts.set(name, (counts.get(name) ?? 0) + 1));
  const isKnown = (name) => Number(name !== 'no_clear_role');
  const sorted = [...counts].sort(([x, a], [y, b]) => isKnown(y) - isKnown(x) || b - a);
  element('roles').hidden = !sorted.length;
  element('roles').replaceChildren(...sorted.map(([name, count]) => {
    const chip = make('button', `${roleWords(name)} ${count}`, {
      type: 'button', className: 'role-chip', ariaPressed: String(choice.role === name),
      title: 'Show the heads of this role alone',
    });
    chip.style.setProperty('--role', roleColor(name));
    chip.addEventListener('click', () => {
      choose({ role: choice.role === name ? '' : name });
      element('roles').children[sorted.findIndex(([each]) => each === name)].focus();
    });
    return chip;
  }));
}

// `said`: texts, and heads as [text, layer, head], which a click chooses.
function tellSentence({ said = [] }) {
  element('said').replaceChildren(...said.map((part) => {
    if (typeof part === 'string') return part;
    const [text, layer, head] = part;
    const link = make('button', text, { type: 'button', className: 'head-link' });
    link.addEventListener('click', () => chooseHead(layer, head));
    return link;
  }));
}
