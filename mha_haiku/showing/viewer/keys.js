// Keys of the whole page: the number of a head, n and p for inputs; and the map as a file.

// "16.0", "cross.3.0": the address of a head in tables.
const addressOf = ({ name, heads }, head) => `${name.replace(/^layer /, '')}.${heads[head]}`.replaceAll(' ', '.');

function jump(input) {
  const { layers } = page.sets[choice.set];
  const wanted = input.value.trim().replaceAll(' ', '.');
  const heads = layers.flatMap((layer, at) => layer.heads.map((_, head) => [at, head]));
  const place = heads.find(([layer, head]) => addressOf(layers[layer], head) === wanted);
  input.setCustomValidity(place || !wanted ? '' : `No such head; the last is ${addressOf(layers[heads.at(-1)[0]], heads.at(-1)[1])}.`);
  if (!input.reportValidity() || !place) return;
  chooseHead(...place);
  headButton().focus();
}

function buildKeys() {
  const input = element('jump');
  input.addEventListener('input', () => input.setCustomValidity(''));
  input.addEventListener('keydown', ({ key }) => { if (key === 'Enter') jump(input); });
  element('save').hidden = window.parent !== window; // a notebook's frame may not download
  element('save').addEventListener('click', saveMaps);
  document.addEventListener('keydown', ({ key, target, ctrlKey, metaKey, altKey }) => {
    if (ctrlKey || metaKey || altKey || target.closest('input, select')) return;
    const step = { n: 1, p: -1 }[key];
    if (step) choose({ example: choice.example + step }, true);
    if (!/^\d$/.test(key)) return;
    input.value = ''; // the digit itself comes next
    input.focus();
  });
}

// Each shown map as a file without the marks of what was chosen.
function saveMaps() {
  const { color } = getComputedStyle(document.body);
  for (const { element: drawing, context } of shown) {
    const copy = drawing.cloneNode(true);
    copy.lastElementChild.remove();
    copy.setAttribute('color', color);
    const link = make('a', '', {
      download: `${nameOf(context.where).replaceAll(/[^\w.-]+/g, '_')}.svg`,
      href: `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`,
    });
    link.click();
  }
}
