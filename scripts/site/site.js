// The menu, the search, and the pages before and after, of every page. pages.js has sitePages,
// [section, title, address, entries], in their order; an entry is [title, address, text].
(() => {
  const { up, path } = document.currentScript.dataset;
  const make = (name, text, ...children) => {
    const made = document.createElement(name);
    made.textContent = text;
    made.append(...children);
    return made;
  };
  const link = ([, title, address], before = '') => Object.assign(make('a', before + title), { href: up + address });

  const menu = document.querySelector('.site-menu');
  for (const section of new Set(sitePages.map(([name]) => name).filter(Boolean))) {
    const listed = sitePages.filter(([name]) => name === section).map((page) => make('li', '', link(page)));
    menu.append(make('div', '', make('b', section), make('ul', '', ...listed)));
  }

  const at = sitePages.findIndex(([, , address]) => address === path);
  const steps = Object.assign(make('div', ''), { className: 'site-steps' });
  if (at > 0) steps.append(link(sitePages[at - 1], 'Previous: '));
  if (at + 1 < sitePages.length) steps.append(link(sitePages[at + 1], 'Next: '));
  document.querySelector('main').append(steps);

  // All words must be in the title, which counts more, or in the text.
  const score = ([title, , text], words) => words.reduce((sum, word) => {
    const name = title.toLowerCase();
    if (name.includes(word)) return sum + (name.endsWith(word) ? 3 : 2);
    return text.toLowerCase().includes(word) ? sum + 1 : -Infinity;
  }, 0);
  const input = document.querySelector('.site-bar input');
  input.addEventListener('input', () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? sitePages.flatMap(([, , , entries]) => entries).map((each) => [score(each, words), each]) : [];
    const best = found.filter(([each]) => each > 0).sort(([a], [b]) => b - a).slice(0, 12);
    document.querySelector('.site-hits').replaceChildren(...best.map(([, [title, address, text]]) => {
      const start = Math.max(0, text.toLowerCase().indexOf(words[0]) - 40);
      return make('li', '', link(['', title, address]), make('small', text.slice(start, start + 140)));
    }));
  });
})();
