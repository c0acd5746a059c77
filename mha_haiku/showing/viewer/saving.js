// What is seen, as a file: SVG, PNG, and the weights as CSV.
//
// A view may be made of text, canvases and drawings. Its picture is drawn anew from
// where each of them stands on the page, with the style that it has there, so that the
// file needs no style sheet, no script and no other file.

const sharpness = 2; // pixels of a PNG for one of the page
const longestSide = 16000; // in pixels; browsers refuse larger ones

// What XML does not allow: half characters, and most controls.
const cleanText = (text) => String(text)
  .replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, '\ufffd')
  .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, '\ufffd');

// A colour as the page has it, as attributes that old programs read too.
function paint(name, colour) {
  const alpha = /^rgba\((.*), ([\d.]+)\)$/.exec(colour);
  if (!alpha) return { [name]: colour };
  return { [name]: `rgb(${alpha[1]})`, [`${name}-opacity`]: alpha[2] };
}

const isSeen = (colour) => !/^(transparent|rgba\(.*, 0\))$/.test(colour);

// Style that a drawing takes from the page's style sheet, as [attribute, its own default
// or null where it is inherited].
const drawnStyle = [
  ['fill', null], ['stroke', null], ['fill-opacity', null], ['stroke-opacity', null],
  ['stroke-width', null], ['stroke-linecap', null], ['stroke-dasharray', null],
  ['font-family', null], ['font-size', null], ['font-weight', null], ['text-anchor', null],
  ['visibility', null], ['image-rendering', null], ['opacity', '1'], ['paint-order', null],
  ['dominant-baseline', 'auto'], ['display', 'inline'],
];
const keptAttributes = new Set(['x', 'y', 'x1', 'x2', 'y1', 'y2', 'cx', 'cy', 'r', 'rx', 'ry', 'dx', 'dy',
  'd', 'width', 'height', 'viewBox', 'href', 'transform', 'preserveAspectRatio', 'points', 'shape-rendering']);

// A drawing of the page, copied with its style in its attributes.
function copyDrawing(drawing, inherited = {}) {
  const copy = svg(drawing.tagName);
  for (const { name, value } of drawing.attributes) {
    if (keptAttributes.has(name)) copy.setAttribute(name, cleanText(value));
  }
  const style = getComputedStyle(drawing);
  const own = { ...inherited };
  for (const [name, initial] of drawnStyle) {
    const value = style.getPropertyValue(name);
    if (value === (initial ?? inherited[name])) continue;
    if (initial === null) own[name] = value;
    const painted = /^(fill|stroke)$/.test(name) ? paint(name, value) : { [name]: value };
    for (const [attribute, text] of Object.entries(painted)) copy.setAttribute(attribute, text);
  }
  for (const child of drawing.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) copy.append(cleanText(child.data));
    else if (child.nodeType === Node.ELEMENT_NODE) copy.append(copyDrawing(child, own));
  }
  return copy;
}

// The lines of a text as they stand on the page: [text, box].
function textLines(node) {
  const range = document.createRange();
  range.selectNodeContents(node);
  const boxes = range.getClientRects();
  if (boxes.length === 0) return [];
  if (boxes.length === 1) return [[node.data, boxes[0]]];
  const lines = [];
  let start = 0;
  for (const character of node.data) {
    range.setStart(node, start);
    start += character.length;
    range.setEnd(node, start);
    const box = range.getBoundingClientRect();
    const line = lines[lines.length - 1];
    if (!box.width) { if (line) line[0] += character; continue; }
    if (line && Math.abs(box.top - line[1].top) < 2) line[0] += character;
    else if (!lines.length || character.trim()) lines.push([character, box]);
  }
  return lines;
}

// What is for the hand and not for the eye.
const unsaved = 'select, label, input, .hint, .unsaved, .head-toggle:not([aria-pressed="true"])';

const pen = document.createElement('canvas').getContext('2d');

function copyText(node, origin) {
  const style = getComputedStyle(node.parentElement);
  pen.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  const { fontBoundingBoxAscent: above, fontBoundingBoxDescent: below } = pen.measureText('x');
  return textLines(node).filter(([text]) => text.trim()).map(([text, box]) => svg('text', {
    x: (box.left - origin.left).toFixed(2),
    y: (box.top - origin.top + (box.height - above - below) / 2 + above).toFixed(2),
    'font-family': style.fontFamily, 'font-size': style.fontSize, 'font-weight': style.fontWeight,
    ...paint('fill', style.color),
    // Hard spaces: XML would drop those at the ends, and the text would be shifted.
  }, cleanText(text).replace(/\s/g, '\u00a0')));
}

// Background, frame and outline of an element of the page.
function copyBox(part, style, origin) {
  const box = part.getBoundingClientRect();
  const place = (grow) => ({
    x: (box.left - origin.left - grow).toFixed(2), y: (box.top - origin.top - grow).toFixed(2),
    width: Math.max(0, box.width + 2 * grow).toFixed(2), height: Math.max(0, box.height + 2 * grow).toFixed(2),
  });
  const copies = [];
  if (isSeen(style.backgroundColor)) {
    copies.push(svg('rect', { ...place(0), rx: parseFloat(style.borderRadius) || 0, ...paint('fill', style.backgroundColor) }));
  }
  const [border, outline] = [parseFloat(style.borderTopWidth), parseFloat(style.outlineWidth)];
  if (border && style.borderTopStyle !== 'none' && isSeen(style.borderTopColor)) {
    copies.push(svg('rect', {
      ...place(-border / 2), fill: 'none', 'stroke-width': border, rx: parseFloat(style.borderRadius) || 0,
      ...paint('stroke', style.borderTopColor),
    }));
  }
  const bar = parseFloat(style.borderLeftWidth);
  if (bar > border) {
    copies.push(svg('rect', { ...place(0), width: bar, ...paint('fill', style.borderLeftColor) }));
  }
  if (outline && style.outlineStyle === 'solid') {
    copies.push(svg('rect', {
      ...place(parseFloat(style.outlineOffset) + outline / 2), fill: 'none', 'stroke-width': outline,
      ...paint('stroke', style.outlineColor),
    }));
  }
  return copies;
}

// All that is seen of an element, as drawings in the coordinates of `origin`.
function copySeen(part, origin) {
  if (part.nodeType === Node.TEXT_NODE) return copyText(part, origin);
  if (part.nodeType !== Node.ELEMENT_NODE) return [];
  const style = getComputedStyle(part);
  const box = part.getBoundingClientRect();
  if (style.display === 'none' || style.visibility === 'hidden') return [];
  const place = {
    x: (box.left - origin.left).toFixed(2), y: (box.top - origin.top).toFixed(2), width: box.width, height: box.height,
  };
  if (part.tagName === 'svg') {
    const copy = copyDrawing(part);
    for (const [name, value] of Object.entries(place)) copy.setAttribute(name, value);
    return [copy];
  }
  const boxes = copyBox(part, style, origin);
  if (/^(canvas|img)$/i.test(part.tagName)) {
    if (!box.width || !box.height || part.width === 0 || part.height === 0) return boxes;
    const href = part.src ?? part.toDataURL();
    return [...boxes, svg('image', {
      ...place, href, preserveAspectRatio: 'none', 'image-rendering': style.imageRendering,
    })];
  }
  const copies = [...boxes, ...[...part.childNodes].flatMap((child) => copySeen(child, origin))];
  return style.opacity === '1' ? copies : [svg('g', { opacity: style.opacity }, ...copies)];
}

// The text of an SVG file that shows what is seen of `part`, below a line that names it.
function pictureFile(part, heading) {
  // All of what scrolls is drawn, and what is not saved leaves no gap: the page is changed
  // for the time that it is measured in, too short to be seen.
  const scrolling = [...part.querySelectorAll('*')].filter((inside) => (
    /auto|scroll/.test(getComputedStyle(inside).overflowY + getComputedStyle(inside).overflowX)
  ));
  const before = scrolling.map((inside) => [inside.scrollTop, inside.scrollLeft]);
  for (const inside of scrolling) {
    inside.style.maxHeight = 'none';
    inside.style.overflow = 'visible';
  }
  const left = [...part.querySelectorAll(unsaved)];
  for (const inside of left) inside.style.display = 'none';
  try {
    const style = getComputedStyle(document.body);
    const [margin, above] = [12, 34];
    const box = part.getBoundingClientRect();
    const seen = copySeen(part, { left: box.left - margin, top: box.top - above });
    const right = (each) => Number(each.getAttribute('x')) + Number(each.getAttribute('width'));
    const bottom = (each) => Number(each.getAttribute('y')) + Number(each.getAttribute('height'));
    // No wider and higher than what is drawn; a text's own width is not known here.
    const least = seen.some((each) => each.tagName === 'text') ? box.width : 400;
    const width = Math.ceil(Math.max(least + margin, ...seen.map(right)) + margin);
    const height = Math.ceil(Math.max(...seen.map(bottom)) + margin + 4);
    const font = { 'font-family': style.fontFamily, 'font-size': '14px' };
    const picture = svg(
      'svg', { width, height, viewBox: `0 0 ${width} ${height}`, ...font },
      svg('title', {}, cleanText(heading)),
      svg('rect', { width, height, fill: isSeen(style.backgroundColor) ? style.backgroundColor : 'white' }),
      svg('text', { x: margin, y: 22, 'font-weight': 600, fill: style.color }, cleanText(shorten(heading, Math.floor(width / 8)))),
      ...seen,
    );
    return { text: new XMLSerializer().serializeToString(picture), width, height };
  } finally {
    for (const inside of left) inside.style.display = '';
    scrolling.forEach((inside, index) => {
      inside.style.maxHeight = '';
      inside.style.overflow = '';
      [inside.scrollTop, inside.scrollLeft] = before[index];
    });
  }
}

async function pngOf({ text, width, height }) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const scale = Math.min(sharpness, longestSide / Math.max(width, height));
  const canvas = document.createElement('canvas');
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, 'image/png'); });
}

// The shown weights: a row per query, a column per key; masked cells are empty.
function csvOf({ map, queries, keys }) {
  const quoted = (text) => `"${cleanText(text).replaceAll('"', '""')}"`;
  const labels = (axis) => Array.from({ length: axis.count }, (_, bin) => quoted(`${axis.positions(bin)} ${shorten(axis.text(bin), 200)}`.trim()));
  const keyLabels = labels(keys);
  const rows = labels(queries).map((label, query) => [label, ...keyLabels.map((_, key) => (
    map.masked(query, key) ? '' : String(Number(map.at(query, key).toPrecision(6)))
  ))].join());
  return `${[quoted('query, below; key, to the right'), ...keyLabels].join()}\n${rows.join('\n')}\n`;
}

function download(name, blob) {
  const link = make('a', '', { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Names of the run, the layer and the head, of letters that every system takes.
function fileName({ page: { title }, layer, where, set, choice }, ending) {
  const parts = [title, set.name, layer.name, `head ${layer.heads[where.head]}`, choice.view];
  const words = parts.map((part) => (
    part.slice(0, 200).normalize('NFKD').replace(/[^\w.]+/g, '_').replace(/^[_.]+|[_.]+$/g, '').slice(0, 48)
  ));
  return `${words.filter(Boolean).join('-') || 'attention'}.${ending}`;
}

// Buttons that save what `seen()` returns; `now()` is the context of what is chosen.
function saveButtons(seen, now) {
  const said = make('span', '', { className: 'save-said' });
  said.setAttribute('role', 'status');
  const heading = ({ page: { title }, layer, where, example }) => (
    [title, layer.name, `head ${layer.heads[where.head]}`, example.name].map((part) => shorten(part, 60)).join(' · ')
  );
  const kinds = {
    SVG: ['svg', 'a picture to edit or to print', () => (
      new Blob([pictureFile(seen(), heading(now())).text], { type: 'image/svg+xml' })
    )],
    PNG: ['png', 'a picture of pixels', () => pngOf(pictureFile(seen(), heading(now())))],
    CSV: ['csv', 'the shown weights as numbers', () => new Blob([csvOf(now())], { type: 'text/csv' })],
  };
  const buttons = Object.entries(kinds).map(([label, [ending, title, made]]) => {
    const button = make('button', label, { type: 'button', title: `Save ${title}`, className: `save-${ending}` });
    button.addEventListener('click', async () => {
      try {
        const name = fileName(now(), ending);
        download(name, await made());
        said.textContent = `Saved ${name}`;
      } catch (error) {
        said.textContent = `Could not be saved: ${error.message}`;
      }
    });
    return button;
  });
  const group = make('div', '', { className: 'saving unsaved' }, make('span', 'Save'), ...buttons, said);
  group.setAttribute('role', 'group');
  group.setAttribute('aria-label', 'Save what is shown');
  return group;
}
