// The slider over the steps of a training, which can play.

const millisecondsPerStep = 600;
let playing = null;

const hasSteps = () => page.sets.length > 1 && page.sets.every(({ step }) => step !== null);

function buildSteps() {
  element('steps').hidden = !hasSteps();
  if (!hasSteps()) return;
  const slider = element('step');
  slider.max = page.sets.length - 1;
  slider.addEventListener('input', () => { pause(); choose({ set: Number(slider.value) }); });
  element('play').addEventListener('click', () => (playing ? pause() : play()));
}

function updateSteps() {
  if (!hasSteps()) return;
  const words = `step ${page.sets[choice.set].step}`;
  element('step').value = choice.set;
  element('step').setAttribute('aria-valuetext', words);
  element('step-now').textContent = `${words} (${choice.set + 1} of ${page.sets.length})`;
}

async function play() {
  showPlaying(true);
  if (choice.set === page.sets.length - 1) choose({ set: 0 });
  // All at once, or the first round would stumble.
  await Promise.all(page.sets.map((_, set) => unpack(set, choice.example)));
  if (!element('play').classList.contains('playing')) return;
  clearInterval(playing);
  playing = setInterval(() => {
    if (choice.set + 1 < page.sets.length) choose({ set: choice.set + 1 });
    if (choice.set + 1 >= page.sets.length) pause();
  }, millisecondsPerStep);
}

function pause() {
  clearInterval(playing);
  playing = null;
  showPlaying(false);
}

function showPlaying(now) {
  element('play').classList.toggle('playing', now);
  element('play').textContent = now ? 'Pause' : 'Play';
}
