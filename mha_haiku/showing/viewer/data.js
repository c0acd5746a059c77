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

// The positions along a side of a map, in bins: bin i is positions start(i) to stop(i) - 1,
// and lies from edges[i] to edges[i + 1] of a drawing. Both are the same numbers unless only
// some positions are `kept`.
class Axis {
  constructor(texts, kept = null) {
    this.texts = texts; // {tokens, label, notes, special}
    this.tokens = texts.tokens;
    this.label = texts.label ?? '';
    const upTo = (count) => Array.from({ length: count + 1 }, (_, i) => i);
    this.edges = kept ? upTo(kept.length) : texts.edges ?? upTo(this.tokens.length);
    this.kept = kept;
    this.count = this.edges.length - 1;
    this.last = this.edges[this.count];
    this.pooled = this.last > this.count;
    // All bins are of one length.
    this.even = this.edges.every((edge, bin) => edge * this.count === this.last * bin);
    this.special = new Set(this.pooled ? [] : texts.special);
  }

  // The same without special tokens, unless all are special.
  plain() {
    const kept = this.edges.slice(0, this.count).filter((position) => !this.special.has(position));
    return this.special.size && kept.length ? new Axis(this.texts, kept) : this;
  }

  start(bin) { return (this.kept ?? this.edges)[bin]; }

  stop(bin) { return this.kept ? this.kept[bin] + 1 : this.edges[bin + 1]; }

  // The bin that a position lies in, or the nearest one before it.
  bin(position) { return this.lastUpTo(this.kept ?? this.edges, position); }

  // The bin that is drawn at a share of the way along the axis.
  binAt(share) { return this.lastUpTo(this.edges, share * this.last); }

  lastUpTo(numbers, wanted) {
    let low = 0;
    let high = this.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (numbers[middle] <= wanted) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  isSpecial(bin) { return this.special.has(this.start(bin)); }

  // "12" or, of a pooled map, "64–127".
  positions(bin) {
    const [start, stop] = [this.start(bin), this.stop(bin)];
    return stop - start === 1 ? String(start) : `${start}–${stop - 1}`;
  }

  // A position, or its time in a sound.
  timeAt(position) {
    const text = this.tokens[position];
    return /^[\d.]+s$/.test(text) ? text : String(position);
  }

  // The text of a position, or the beginning of a long bin.
  text(bin) {
    const [from, to] = [this.start(bin), this.stop(bin) - 1].map((position) => this.timeAt(position));
    if (this.pooled && from.endsWith('s')) return from === to ? from : `${from}–${to}`;
    let text = '';
    for (let i = this.start(bin); i < this.stop(bin) && text.length < 400; i += 1) {
      text += this.tokens[i] ?? '';
    }
    return text.trim();
  }

  // The note on a single position next to its text: reads “v”.
  note(bin) {
    return this.stop(bin) - this.start(bin) === 1 ? this.texts.notes?.[this.start(bin)] ?? '' : '';
  }
}

// The common part of the weights of a head and of a difference.
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

// Of each bin of an axis the bin of another at the same position.
const binsIn = (axis, other) => Array.from({ length: axis.count }, (_, bin) => other.bin(axis.start(bin)));

// A map without the special tokens of its axes.
class PlainMap extends CellMap {
  constructor(whole, queries, keys) {
    super(queries, keys, whole.signed);
    const [rows, columns] = [binsIn(queries, whole.queries), binsIn(keys, whole.keys)];
    this.at = (query, key) => whole.at(rows[query], columns[key]);
    this.masked = (query, key) => whole.masked(rows[query], columns[key]);
    this.largest = this.counted().largest;
  }
}

// The mean of several heads; masked where all of them are.
class MeanMap extends CellMap {
  constructor(maps) {
    super(maps[0].queries, maps[0].keys, maps[0].signed);
    this.at = (query, key) => maps.reduce((sum, map) => sum + map.at(query, key), 0) / maps.length;
    this.masked = (query, key) => maps.every((map) => map.masked(query, key));
  }
}

// One map less another of the same positions; masked where one of them is or lacks the position.
class Difference extends CellMap {
  constructor(first, second) {
    super(first.queries, first.keys, true);
    const [rows, columns] = [binsIn(first.queries, second.queries), binsIn(first.keys, second.keys)];
    const lacks = (axis, other, bins) => bins.map((bin, own) => (
      Boolean(other.kept) && other.start(bin) !== axis.start(own)
    ));
    const noRow = lacks(first.queries, second.queries, rows);
    const noColumn = lacks(first.keys, second.keys, columns);
    this.at = (query, key) => first.at(query, key) - second.at(rows[query], columns[key]);
    this.masked = (query, key) => noRow[query] || noColumn[key]
      || first.masked(query, key) || second.masked(rows[query], columns[key]);
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

// Long lists of texts are packed: they are unpacked once, before anything is shown.
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

// All maps of an example, once they are unpacked: layers[layer][head] is a HeadMap, axes[layer]
// are the {queries, keys} of a layer, and `largest` is the largest weight; all of them without
// special tokens where that was chosen.
function unpacked(set, example) {
  const whole = decoded.get(`${set}.${example}`);
  if (!whole || choice.special === 'with') return whole;
  whole.plain ??= plainMaps(whole);
  return whole.plain;
}

function plainMaps({ axes, layers }) {
  const made = new Map();
  const plain = (axis) => {
    if (!made.has(axis)) made.set(axis, axis.plain());
    return made.get(axis);
  };
  const plainAxes = axes.map(({ queries, keys }) => ({ queries: plain(queries), keys: plain(keys) }));
  const maps = layers.map((heads, layer) => heads.map((map) => (
    new PlainMap(map, plainAxes[layer].queries, plainAxes[layer].keys)
  )));
  return { axes: plainAxes, layers: maps, largest: Math.max(0, ...maps.flat().map(({ largest }) => largest)) };
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
      const queries = new Axis(own.queries);
      made.set(own, { queries, keys: own.keys ? new Axis(own.keys) : queries });
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
  await Promise.all([example, ...Object.values(example.kinds ?? {})].map(readPictures));
  return { axes, layers, largest: page.largest };
}
