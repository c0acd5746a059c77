// The embedded data, and how its packed weights are read.
//
// A weight is stored as a code: largest * (code / levels) ** 2; where weights may be
// negative, 0 is the code in the middle. Two codes above the levels say that a weight is
// not a number, and that the query may not attend to the key.

const page = JSON.parse(document.getElementById('data').textContent);
const codeOfNaN = page.levels + 1;
const codeOfMasked = page.levels + 2;

// The weight's share of the largest for every code there is; a masked weight is 0.
const shareOfCode = Float32Array.from({ length: page.levels + 3 }, (_, code) => {
  if (code > page.levels) return code === codeOfNaN ? NaN : 0;
  const middle = page.signed ? Math.floor(page.levels / 2) : 0;
  const root = page.signed ? code / middle - 1 : code / page.levels;
  return Math.sign(root) * root ** 2;
});

async function unpackBytes(text) {
  const packed = atob(text);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i += 1) bytes[i] = packed.charCodeAt(i);
  const inflate = new DecompressionStream('deflate');
  const stream = new Blob([bytes]).stream().pipeThrough(inflate);
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpackCodes(text) {
  const bytes = await unpackBytes(text);
  return page.bytes_per_cell === 1 ? bytes : new Uint16Array(bytes.buffer);
}

// The positions along a side of a map, in bins: bin i is positions start(i) to stop(i) - 1.
class Axis {
  constructor(texts, edges) {
    this.texts = texts; // {tokens, label, notes}
    this.tokens = texts.tokens;
    this.label = texts.label ?? '';
    this.edges = edges;
    this.count = edges.length - 1;
    const span = edges[this.count] - edges[0];
    this.pooled = span > this.count;
    // All bins are of one length.
    this.even = edges.every((edge, bin) => (edge - edges[0]) * this.count === span * bin);
  }

  static of(texts) {
    const { tokens, edges } = texts;
    return new Axis(texts, edges ?? Array.from({ length: tokens.length + 1 }, (_, i) => i));
  }

  get first() { return this.edges[0]; }

  get last() { return this.edges[this.count]; }

  start(bin) { return this.edges[bin]; }

  stop(bin) { return this.edges[bin + 1]; }

  // The bin that a position lies in, or the nearest one.
  bin(position) {
    let low = 0;
    let high = this.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.edges[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // "12" or, of a pooled map, "64–127".
  positions(bin) {
    const [start, stop] = [this.start(bin), this.stop(bin)];
    return stop - start === 1 ? String(start) : `${start}–${stop - 1}`;
  }

  // The text that stands there; of a long bin its beginning.
  text(bin) {
    let text = '';
    for (let i = this.start(bin); i < this.stop(bin) && text.length < 400; i += 1) {
      text += this.tokens[i] ?? '';
    }
    return text;
  }

  // What is said of a single position beside its text: reads “v”.
  note(bin) {
    return this.stop(bin) - this.start(bin) === 1 ? this.texts.notes?.[this.start(bin)] ?? '' : '';
  }
}

// What the weights of a head, and of a difference, have in common.
class CellMap {
  constructor(queries, keys, signed) {
    Object.assign(this, { queries, keys, signed, rows: queries.count, columns: keys.count });
  }

  get numMasked() { return this.counted().masked; }

  get numNaN() { return this.counted().nan; }

  counted() {
    if (this.counts) return this.counts;
    this.counts = { masked: 0, nan: 0, largest: 0 };
    for (let query = 0; query < this.rows; query += 1) {
      for (let key = 0; key < this.columns; key += 1) {
        const weight = this.at(query, key);
        if (this.masked(query, key)) this.counts.masked += 1;
        else if (Number.isNaN(weight)) this.counts.nan += 1;
        else this.counts.largest = Math.max(this.counts.largest, Math.abs(weight));
      }
    }
    return this.counts;
  }
}

// The weights of one head, still as codes.
class HeadMap extends CellMap {
  constructor(codes, largest, queries, keys) {
    super(queries, keys, page.signed);
    Object.assign(this, { codes, largest });
  }

  at(query, key) {
    return this.largest * shareOfCode[this.codes[query * this.columns + key]];
  }

  masked(query, key) {
    return this.codes[query * this.columns + key] === codeOfMasked;
  }
}

// One map less another of the same positions; masked where both are.
class Difference extends CellMap {
  constructor(first, second) {
    super(first.queries, first.keys, true);
    const bins = (axis, other) => Array.from({ length: axis.count }, (_, bin) => other.bin(axis.start(bin)));
    const [rows, columns] = [bins(first.queries, second.queries), bins(first.keys, second.keys)];
    this.at = (query, key) => first.at(query, key) - second.at(rows[query], columns[key]);
    this.masked = (query, key) => first.masked(query, key) && second.masked(rows[query], columns[key]);
    this.largest = this.counted().largest;
  }
}

// An example as the layers of a kind have it: with the axes, the answers and the alignment
// of that kind. `where`: {set, example, layer}.
function exampleOf({ set, example, layer }) {
  const { layers, examples } = page.sets[set];
  const whole = examples[example];
  const kind = layers[layer]?.kind;
  if (!whole.kinds?.[kind]) return whole;
  whole.ofKind ??= {};
  whole.ofKind[kind] ??= { ...whole, ...whole.kinds[kind] };
  return whole.ofKind[kind];
}

const kindsOf = ({ layers }) => [...new Set(layers.map(({ kind }) => kind).filter(Boolean))];

// Long lists of texts are packed: they are read once, before anything is shown.
async function unpackTokens() {
  const axes = page.sets.flatMap(({ examples }) => examples.flatMap((example) => (
    [example, ...Object.values(example.kinds ?? {})]
      .flatMap(({ queries, keys }) => [queries, keys].filter(Boolean))
  )));
  await Promise.all(axes.flatMap((axis) => ['tokens', 'notes'].map(async (name) => {
    if (typeof axis[name] === 'string') {
      axis[name] = JSON.parse(new TextDecoder().decode(await unpackBytes(axis[name])));
    }
  })));
}

const decoded = new Map(); // "set.example" -> {axes, layers}
const decoding = new Map(); // the same, as promises

// All maps of an example, once they are unpacked: layers[layer][head] is a HeadMap, and
// axes[layer] are the {queries, keys} of a layer.
function unpacked(set, example) {
  return decoded.get(`${set}.${example}`);
}

// The same, with the axes of one layer: {queries, keys, axes, layers}.
function mapsAt({ set, example, layer }) {
  const maps = unpacked(set, example);
  return maps && { ...maps, ...maps.axes[layer] };
}

function unpack(set, example) {
  const name = `${set}.${example}`;
  if (!decoding.has(name)) {
    decoding.set(name, unpackExample(set, example).then((maps) => {
      decoded.set(name, maps);
      return maps;
    }));
  }
  return decoding.get(name);
}

async function unpackExample(set, number) {
  const example = page.sets[set].examples[number];
  const made = new Map(); // axes that several layers share are one
  const axesOf = (layer) => {
    const own = exampleOf({ set, example: number, layer });
    if (!made.has(own)) {
      const queries = Axis.of(own.queries);
      made.set(own, { queries, keys: own.keys ? Axis.of(own.keys) : queries });
    }
    return made.get(own);
  };
  const axes = example.layers.map((_, layer) => axesOf(layer));
  const layers = await Promise.all(example.layers.map(async ({ codes, largest }, layer) => {
    const { queries, keys } = axes[layer];
    const cells = queries.count * keys.count;
    const all = await unpackCodes(codes);
    return largest.map((top, head) => (
      new HeadMap(all.subarray(head * cells, (head + 1) * cells), top, queries, keys)
    ));
  }));
  await readPictures(example);
  return { axes, layers };
}
