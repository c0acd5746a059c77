// What the page shows: the embedded data, the packed weights, and the choices made.

const page = JSON.parse(document.getElementById('data').textContent);

// This viewer knows one set of maps, and bins as pairs of positions and text.
{
  const [{ layers, examples }] = page.sets;
  const bins = ({ tokens, edges }) => (
    edges === null ? tokens.map((text, i) => [String(i), text])
      : edges.slice(1).map((end, i) => [
        end - edges[i] === 1 ? String(edges[i]) : `${edges[i]}–${end - 1}`,
        typeof tokens === 'string' ? '' : shorten(tokens.slice(edges[i], end).join(''), 40),
      ]));
  const shown = (answers) => answers && {
    ...answers,
    shown: answers.shown.map(([position, input, [first], target]) => (
      [position, input, first ? first[0] : '', target])),
  };
  page.layers = layers;
  page.pooled = examples[0].queries.edges !== null;
  page.num_examples = examples.length;
  page.examples = examples.map((example) => ({
    ...example,
    queries: bins(example.queries),
    keys: bins(example.keys ?? example.queries),
    answers: shown(example.answers),
  }));
}

// The chosen layer, head and example; the cell last pointed at; how to colour.
const choice = {
  layer: Math.max(0, page.layers.findIndex((layer) => layer.heads.length)),
  head: 0, example: 0, query: 0, key: 0,
  direction: 'from', range: 'shared', scale: 'linear',
};

const words = {
  direction: ['from', 'to'], range: ['shared', 'own'], scale: ['linear', 'root'],
};

const unpacked = new Map();

// The maps of an example: for each layer, for each head, {rows, columns, at(q, k)}.
function maps(example) {
  if (!unpacked.has(example)) {
    const { queries, keys, layers } = page.examples[example];
    const rows = queries.length;
    const columns = keys.length;
    unpacked.set(example, Promise.all(layers.map(async ({ codes, largest }) => {
      const all = await unpack(codes);
      return largest.map((top, head) => {
        const start = head * rows * columns;
        const at = (query, key) => (
          top * ((all[start + query * columns + key] % (page.levels + 2)) / page.levels) ** 2
        );
        return { rows, columns, largest: top, at };
      });
    })));
  }
  return unpacked.get(example);
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const inflate = new DecompressionStream('deflate');
  const buffer = await new Response(
    new Blob([bytes]).stream().pipeThrough(inflate),
  ).arrayBuffer();
  return page.bytes_per_cell === 1 ? new Uint8Array(buffer) : new Uint16Array(buffer);
}

// "12" or, of a pooled map, "64–127"; and the same with the text that stands there.
function place(bins, index) {
  const [positions, text] = bins[index];
  return text ? `${positions} “${shorten(text, 24)}”` : positions;
}

function shownWeight(weight) {
  const digits = page.precision < 0.0001 ? 4 : 3;
  const text = weight.toFixed(digits);
  return weight > 0 && Number(text) === 0 ? `below ${10 ** -digits}` : text;
}

// The address remembers the choices: #layer=0&head=3&example=1&query=5&key=7
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const name of ['layer', 'head', 'example', 'query', 'key']) {
    if (/^\d{1,9}$/.test(wanted.get(name) ?? '')) choice[name] = Number(wanted.get(name));
  }
  for (const [name, allowed] of Object.entries(words)) {
    if (allowed.includes(wanted.get(name))) choice[name] = wanted.get(name);
  }
  return wanted;
}

function writeAddress() {
  history.replaceState(null, '', `#${new URLSearchParams(choice)}`);
}

// Keeps every choice inside what there is.
function clampChoice() {
  const within = (value, count) => Math.min(value, Math.max(0, count - 1));
  choice.layer = within(choice.layer, page.layers.length);
  choice.head = within(choice.head, page.layers[choice.layer].heads.length);
  choice.example = within(choice.example, page.examples.length);
  choice.query = within(choice.query, page.examples[choice.example].queries.length);
  choice.key = within(choice.key, page.examples[choice.example].keys.length);
}
