// The choices on the page, kept in the address: #layer=0&head=3&query=5&view=lines

const choice = {};
const fields = new Map(); // name -> {initial, read}

// Adds a choice. `read` makes a value of its text, or undefined of text that is none.
function declareChoice(name, initial, read) {
  choice[name] = initial;
  fields.set(name, { initial, read });
}

function declareWord(name, allowed, initial = allowed[0]) {
  declareChoice(name, initial, (text) => (allowed.includes(text) ? text : undefined));
}

const readCount = (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined);
const readWord = (text) => (text.length <= 80 ? text : undefined);

for (const name of ['set', 'example', 'layer', 'head']) declareChoice(name, 0, readCount);
// The chosen cell, by positions and not by bins.
for (const name of ['query', 'key']) declareChoice(name, 0, readCount);
declareChoice('view', 'map', readWord);
declareWord('direction', ['from', 'to']);
declareWord('range', ['shared', 'own']);
declareWord('scale', ['linear', 'root', 'log']);
declareWord('colors', ['viridis', 'cividis', 'grays']);
declareWord('special', ['with', 'without']); // tokens
// The partner in comparisons of the chosen map: "", "set:1", "example:2" or "head:0.3".
declareChoice('compare', '', (text) => (
  /^((set|example):\d{1,6}|head:\d{1,6}\.\d{1,6})?$/.test(text) ? text : undefined
));
declareWord('pair', ['side', 'difference']);
// The overview: the number next to a head, the order, and a role that is shown alone.
declareChoice('beside', 'all', readWord);
declareChoice('order', '', readWord);
declareChoice('role', '', readWord);

// Takes over the choices in the address; all others are as at the beginning.
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const [name, { initial, read }] of fields) {
    const text = wanted.get(name);
    choice[name] = (text === null ? undefined : read(text)) ?? initial;
  }
  return wanted;
}

let addressTimer = null;

// Browsers allow some hundred changes in half a minute, so quick ones become one.
function writeAddress() {
  if (addressTimer) return;
  addressTimer = setTimeout(() => { addressTimer = null; putAddress(); }, 150);
}

function putAddress() {
  const said = new URLSearchParams();
  const always = ['layer', 'head', 'example', 'query', 'key'];
  for (const [name, { initial }] of fields) {
    const value = String(choice[name]);
    if (always.includes(name) || value !== String(initial)) said.set(name, value);
  }
  // Inside a notebook's frame the page has no address, and forgets its choices.
  try { history.replaceState(null, '', `#${said}`); } catch { /* as said */ }
}

// Keeps every choice within the existing values.
function clampChoice() {
  const within = (value, count) => Math.max(0, Math.min(value, count - 1));
  choice.set = within(choice.set, page.sets.length);
  const set = page.sets[choice.set];
  choice.example = within(choice.example, set.examples.length);
  choice.layer = within(choice.layer, set.layers.length);
  choice.head = within(choice.head, set.layers[choice.layer]?.heads.length ?? 0);
  const { queries, keys } = exampleOf(choice);
  choice.query = within(choice.query, queries.tokens.length);
  choice.key = within(choice.key, (keys ?? queries).tokens.length);
}
