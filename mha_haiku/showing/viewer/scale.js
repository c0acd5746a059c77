// From weights to shares of the color scale: its end, and linear, root or log.

const decades = 4; // of a log scale: what is smaller has the color of 0

// The weight at the end of the scale: the largest of a map, or of all maps of its example that
// are shown without special tokens, or of all on the page.
const scaleEnd = (map, all) => (choice.range === 'own' || map.signed ? map.largest : all.largest) || 1;

// The share, 0 to 1 (a difference: -1 to 1), that a weight has of the scale.
function shareOf(weight, end) {
  const share = Math.min(1, Math.abs(weight) / end);
  const sign = weight < 0 ? -1 : 1;
  if (choice.scale === 'root') return sign * Math.sqrt(share);
  if (choice.scale === 'log') return sign * Math.max(0, 1 + Math.log10(share || 1e-30) / decades);
  return sign * share;
}

// The weight of a share, for a legend below its bar.
function weightOf(share, end) {
  if (choice.scale === 'root') return end * share ** 2;
  if (choice.scale === 'log') return share > 0 ? end * 10 ** (decades * (share - 1)) : 0;
  return end * share;
}
