const find = id => document.getElementById(id);
const data = parsed(JSON.parse(find('data').textContent));
const WIDTH = 360, HEIGHT = 170, LEFT = 44, RIGHT = 6, TOP = 8, BOTTOM = 20;
const state = {number: 0, at: data.steps.length - 1, head: null, timer: null};
const charts = [];

// From the lines of the CSV files to numbers by name, layer, head and record.
function parsed({table, alarms, meanings}) {
  const [[,,,, ...names], ...rows] = table.map(line => line.split(','));
  const steps = [...new Set(rows.map(row => Number(row[0])))];
  const places = new Map(steps.map((step, at) => [step, at]));
  const layers = [], numbers = names.map(name => ({name, label: meanings[name] || name, values: []}));
  for (const [step, layer, head, site, ...cells] of rows) {
    layers[layer] = {site, heads: Math.max(Number(head) + 1, layers[layer]?.heads || 0)};
    cells.forEach((cell, i) => {
      const value = Number(cell), heads = numbers[i].values[layer] ??= [];
      (heads[head] ??= Array(steps.length).fill(null))[places.get(Number(step))] = Number.isFinite(value) ? value : null;
    });
  }
  const said = alarms.map(line => [parseInt(line, 10), line.slice(line.indexOf(',') + 2, -1)]);
  return {steps, layers, alarms: said, numbers: numbers.filter(x => x.values.flat(2).some(y => y !== null))};
}

function element(name, parent, attributes = {}, text = '') {
  const made = name === 'svg' || parent instanceof SVGElement
    ? document.createElementNS('http://www.w3.org/2000/svg', name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

const color = (head, heads) => `hsl(${Math.round(360 * head / heads)} 65% 50%)`;
const words = x => x === null ? '' : Math.abs(x) >= 1e5 || (x && Math.abs(x) < 1e-3)
  ? x.toExponential(1) : String(Number(x.toPrecision(3)));
const step = at => data.steps[at].toLocaleString('en');

// --- From numbers to places

function scale(values) {
  const finite = values.flat(2).filter(x => x !== null);
  const isLog = find('log').checked;
  const drawn = isLog ? finite.filter(x => x > 0).map(Math.log) : finite;
  let low = isLog ? Infinity : 0, high = isLog ? -Infinity : 0;
  for (const x of drawn) { low = Math.min(low, x); high = Math.max(high, x); }
  if (!(high > low)) { low = Number.isFinite(low) ? low : 0; high = low + 1; }
  const back = share => isLog ? Math.exp(low + share * (high - low)) : low + share * (high - low);
  const share = x => x === null || (isLog && x <= 0) ? null
    : ((isLog ? Math.log(x) : x) - low) / (high - low);
  return {share, back};
}

const first = data.steps[0], last = data.steps[data.steps.length - 1];
const across = at => LEFT + (WIDTH - LEFT - RIGHT) * (last > first ? (data.steps[at] - first) / (last - first) : 0);
const down = share => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share);

// --- Drawing

function draw() {
  const number = data.numbers[state.number], {share, back} = scale(number.values);
  find('label').textContent = `${number.label}: a line per head, in the color of its column below; the same scale in all layers.`;
  find('charts').replaceChildren();
  charts.length = 0;
  data.layers.forEach((layer, i) => {
    const figure = element('figure', find('charts'));
    const caption = element('figcaption', figure);
    element('b', caption, {}, `layer ${i}`);
    element('span', caption, {title: layer.site}, layer.site);
    const svg = element('svg', figure, {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': `${number.name} of the heads of layer ${i} over steps`});
    for (const part of [0, .5, 1]) {
      element('line', svg, {class: 'axis', x1: LEFT, x2: WIDTH - RIGHT, y1: down(part), y2: down(part)});
      element('text', svg, {x: LEFT - 4, y: down(part) + 4, 'text-anchor': 'end'}, words(back(part)) || '0');
    }
    element('text', svg, {x: LEFT, y: HEIGHT - 4}, step(0));
    element('text', svg, {x: WIDTH - RIGHT, y: HEIGHT - 4, 'text-anchor': 'end'}, `step ${step(data.steps.length - 1)}`);
    for (let h = 0; h < layer.heads; h++) {
      // A gap where a number is missing begins another line.
      let points = [];
      const flush = () => {
        if (points.length === 1) points.push(points[0].replace(/^[^,]+/, x => Number(x) + 1));
        if (points.length) {
          const line = element('polyline', svg, {points: points.join(' '), stroke: color(h, layer.heads), 'data-head': h});
          element('title', line, {}, `layer ${i}, head ${h}`);
        }
        points = [];
      };
      number.values[i][h].forEach((x, at) => {
        const y = share(x);
        if (y === null) flush(); else points.push(`${across(at).toFixed(1)},${down(y).toFixed(1)}`);
      });
      flush();
    }
    const now = element('line', svg, {class: 'now', y1: TOP, y2: HEIGHT - BOTTOM});
    svg.addEventListener('click', event => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * WIDTH / box.width;
      const distances = data.steps.map((_, at) => Math.abs(across(at) - x));
      const head = event.target.dataset.head;
      go(distances.indexOf(Math.min(...distances)));
      choose(head === undefined ? null : [i, Number(head)]);
    });
    charts.push({svg, now});
  });
  choose(state.head);
}

function choose(head) {
  state.head = head;
  charts.forEach(({svg}, i) => {
    const isHere = head !== null && head[0] === i;
    svg.classList.toggle('chosen', isHere);
    for (const line of svg.querySelectorAll('polyline'))
      line.classList.toggle('chosen', isHere && Number(line.dataset.head) === head[1]);
  });
  cells();
}

function cells() {
  const number = data.numbers[state.number];
  for (const {now} of charts) { now.setAttribute('x1', across(state.at)); now.setAttribute('x2', across(state.at)); }
  find('at').textContent = step(state.at);
  find('now').textContent = `${number.name} at step ${step(state.at)}`;
  const table = find('cells'), most = Math.max(...data.layers.map(x => x.heads));
  table.replaceChildren();
  const top = element('tr', table);
  element('th', top, {}, 'layer / head');
  for (let h = 0; h < most; h++) element('th', top, {scope: 'col'}, String(h));
  data.layers.forEach((layer, i) => {
    const row = element('tr', table);
    element('th', row, {scope: 'row', title: layer.site}, String(i));
    for (let h = 0; h < layer.heads; h++) {
      const cell = element('td', row, {title: `layer ${i}, head ${h}`}, words(number.values[i][h][state.at]));
      cell.style.borderBottomColor = color(h, layer.heads);
      const isChosen = state.head !== null && state.head[0] === i && state.head[1] === h;
      cell.classList.toggle('chosen', isChosen);
      cell.addEventListener('click', () => choose(isChosen ? null : [i, h]));
    }
  });
}

function go(at) {
  state.at = Math.max(0, Math.min(data.steps.length - 1, at));
  find('step').value = state.at;
  cells();
}

function play() {
  const stop = () => { clearInterval(state.timer); state.timer = null; find('play').textContent = 'Play'; };
  if (state.timer !== null) return stop();
  if (state.at === data.steps.length - 1) go(0);
  find('play').textContent = 'Stop';
  state.timer = setInterval(() => { if (state.at === data.steps.length - 1) stop(); else go(state.at + 1); }, 60);
}

// --- The page

const heads = data.layers.reduce((sum, layer) => sum + layer.heads, 0);
find('summary').textContent = `${data.layers.length} layer${data.layers.length === 1 ? "" : "s"}, ${heads} head${heads === 1 ? "" : "s"}, ${data.steps.length} records up to step ${step(data.steps.length - 1)}. The exact numbers are in timeline.csv.`;
data.numbers.forEach((number, i) => element('option', find('number'), {value: i}, number.name));
find('step').max = data.steps.length - 1;
find('alarms').hidden = !data.alarms.length;
for (const [at, text] of data.alarms) {
  const button = element('button', element('li', find('alarms').querySelector('ul')), {type: 'button'}, text);
  const after = data.steps.findIndex(x => x >= at);
  button.addEventListener('click', () => go(after < 0 ? data.steps.length - 1 : after));
}
find('number').addEventListener('change', event => { state.number = Number(event.target.value); draw(); });
find('log').addEventListener('change', draw);
find('step').addEventListener('input', event => go(Number(event.target.value)));
find('play').addEventListener('click', play);
find('controls').addEventListener('submit', event => event.preventDefault());
find('step').value = state.at;
draw();
