// How things are made and said: elements, numbers and names in plain words.

const element = (id) => document.getElementById(id);

// An element with text (never with markup: token text may be anything) and properties.
function make(tag, text = '', properties = {}, ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return Object.assign(made, properties);
}

// The name space is read from a drawing of the page, so that the script has no address.
const drawingSpace = element('drawing').namespaceURI;

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(drawingSpace, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// At most so many characters; and no more than are needed are looked at.
function shorten(text, most) {
  const characters = [...text.slice(0, 4 * most)];
  return characters.length > most ? `${characters.slice(0, most - 1).join('')}…` : text;
}

const plural = (count, noun, many = `${noun}s`) => `${count} ${count === 1 ? noun : many}`;

function shownWeight(weight) {
  if (Number.isNaN(weight)) return 'not a number (NaN)';
  const digits = page.precision < 0.0001 ? 4 : 3;
  const text = Math.abs(weight).toFixed(digits);
  if (weight !== 0 && Number(text) === 0) {
    return weight < 0 ? `above −${10 ** -digits}` : `below ${10 ** -digits}`;
  }
  return weight < 0 ? `−${text}` : text;
}

// A number of a head, to three digits or fewer.
function shownNumber(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  const text = size === 0 || (size >= 1e-3 && size < 1e6)
    ? String(Number(value.toPrecision(digits))) : value.toExponential(Math.max(0, digits - 2));
  return text.replaceAll('-', '−');
}

// A bin with its text and its note: 12 “fox” (reads “brown”).
function place(axis, bin) {
  const [text, note] = [axis.text(bin), axis.note(bin)];
  return axis.positions(bin) + (text ? ` “${shorten(text, axis.pooled ? 40 : 24)}”` : '')
    + (note && ` (${shorten(note, 32)})`);
}

// Scrolls a part of the page, and never the page, until something in it is seen.
function reveal(box, inside) {
  const [outer, inner] = [box.getBoundingClientRect(), inside.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) {
    box.scrollTop += inner.top - outer.top - (outer.height - inner.height) / 2;
  }
  if (inner.left < outer.left || inner.right > outer.right) {
    box.scrollLeft += inner.left - outer.left - (outer.width - inner.width) / 2;
  }
}
