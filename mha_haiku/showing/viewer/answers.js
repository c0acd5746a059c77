// The model's answers: the three likeliest ones, and the right one.

const longestAnswer = 40;

const isWrong = ([, , likeliest, target]) => Boolean(target) && likeliest[0]?.[0] !== target;

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;

function answerText([text, probability]) {
  const words = `“${shorten(text, longestAnswer) || '∅'}”`;
  return probability === null ? words : `${words} ${percent(probability)}`;
}

// The answer at a position, in a line: “x” 93%, “y” 4%, “z” 1%; right. Empty without one.
function answerAt(example, position) {
  const { answers } = example;
  const answer = answers?.shown.find(([at]) => answers.whole || at === position);
  if (!answer) return '';
  const [, , likeliest, target] = answer;
  return likeliest.map(answerText).join(', ')
    + (target ? `; ${isWrong(answer) ? `wrong, it is “${shorten(target, longestAnswer)}”` : 'right'}` : '');
}

// The model's answer after the chosen query, next to the map.
function showAnswer({ example, choice: { query } }) {
  const said = answerAt(example, query);
  const where = example.answers?.whole ? 'for the input' : `at position ${query}`;
  element('answer').textContent = said && `Prediction ${where}: ${said}`;
}

function answersPanel() {
  const summary = make('p');
  const table = make('table', '', { className: 'answers' });
  const scroll = make('div', '', { className: 'scroll', tabIndex: 0 }, table);
  scroll.setAttribute('role', 'region');
  scroll.setAttribute('aria-label', 'Predictions');
  const element = make('div', '', { className: 'answers-panel' }, summary, scroll);
  let context = null;
  let drawn = null; // the example whose answers stand there
  let seen = null; // the column that was chosen last: scrolled to only where that changes

  const ranks = ['prediction', 'second', 'third'];
  const line = (name, cells) => make('tr', '', {}, make('th', name, { scope: 'row' }), ...cells);

  function likeliestCell(answer, rank) {
    const [text, probability] = answer[2][rank] ?? ['', null];
    const cell = make('td', shorten(text, longestAnswer) + (rank === 0 && isWrong(answer) ? ' ✗' : ''));
    if (rank === 0 && isWrong(answer)) cell.className = 'wrong';
    if (probability !== null) cell.append(make('small', percent(probability)));
    return cell;
  }

  function build({ whole, right, counted, total, shown }) {
    summary.textContent = (counted ? `Right: ${shownInteger(right)} of ${shownInteger(counted)}.` : 'No targets are known here.')
      + (shown.length < total ? ` The first ${shownInteger(shown.length)} of ${shownInteger(total)} are listed.` : '');
    const most = Math.max(1, ...shown.map((answer) => answer[2].length));
    const lines = ranks.slice(0, most).map((name, rank) => (
      line(name, shown.map((answer) => likeliestCell(answer, rank)))
    ));
    if (shown.some((answer) => answer[3])) {
      lines.push(line('target', shown.map((answer) => make('td', shorten(answer[3], longestAnswer)))));
    }
    if (!whole) {
      lines.unshift(
        line('position', shown.map(([position]) => make('td', String(position), { className: 'position' }))),
        line('input', shown.map((answer) => make('td', shorten(answer[1], longestAnswer)))),
      );
    }
    table.replaceChildren(...lines);
  }

  // Scrolls no further than a column needs to be seen whole, and cuts none beside the names.
  function showColumn(column) {
    const [names, ...cells] = table.rows[0].cells;
    const starts = cells.map((cell) => cell.offsetLeft - names.offsetWidth);
    const end = starts[column] + cells[column].offsetWidth;
    const room = scroll.clientWidth - names.offsetWidth;
    if (starts[column] < scroll.scrollLeft) scroll.scrollLeft = starts[column];
    else if (end > scroll.scrollLeft + room) {
      scroll.scrollLeft = starts.find((start) => end - start <= room) ?? starts[column];
    }
  }

  table.addEventListener('click', (event) => {
    const cell = event.target.closest('td');
    if (!cell || context.example.answers.whole) return;
    const [query] = context.example.answers.shown[cell.cellIndex - 1];
    context.choose({ query, direction: 'from' }, true);
  });

  return {
    element,
    update(wanted) {
      context = wanted;
      const { answers } = context.example;
      if (drawn !== context.example) {
        build(answers);
        drawn = context.example;
        seen = null;
      }
      const chosen = answers.whole ? -1 : answers.shown.findIndex(([position]) => position === context.choice.query);
      for (const cell of table.querySelectorAll('.chosen-answer')) cell.classList.remove('chosen-answer');
      if (chosen < 0) return;
      for (const { cells } of table.rows) cells[chosen + 1].classList.add('chosen-answer');
      if (seen !== null && seen !== chosen) showColumn(chosen);
      seen = chosen;
    },
  };
}

addPanel({
  name: 'answers',
  label: 'Predictions',
  create: answersPanel,
  shows: ({ example }) => Boolean(example.answers?.total),
});
