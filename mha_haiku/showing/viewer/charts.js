// Shared by drawn views: colors of heads and of signed numbers, a bin in words.

// Distinguishable by color-blind eyes, with a contrast of 3 to white and to the dark page
// (after Paul Tol's "bright"). From the ninth head on they return darker, then lighter.
const headColors = [
  [68, 119, 170], [232, 94, 112], [34, 136, 51], [165, 140, 20],
  [0, 155, 195], [190, 60, 135], [215, 110, 25], [125, 125, 140],
];

function headColor(head) {
  const rounds = [0, -0.35, 0.4, -0.55];
  const toward = rounds[Math.floor(head / headColors.length) % rounds.length];
  const parts = headColors[head % headColors.length].map((part) => (
    Math.round(toward < 0 ? part * (1 + toward) : part + toward * (255 - part))
  ));
  return `rgb(${parts})`;
}

// Signed numbers, -1 to 1: blue below 0, nothing at 0, red above, as in differences of
// maps; distinguishable by color-blind eyes. As [red, green, blue, alpha].
function signedColor(share) {
  const strength = Math.round(255 * Math.min(1, Math.abs(share)));
  return share < 0 ? [58, 122, 196, strength] : [205, 62, 58, strength];
}

const colorText = ([red, green, blue, alpha]) => (
  `rgba(${red},${green},${blue},${(alpha / 255).toFixed(3)})`
);

// A bin and its text, 12 “fox”, as nodes: text of any direction stays between its marks.
function placeNodes(axis, bin, most = 24) {
  const text = axis.text(bin);
  return text ? [`${axis.positions(bin)} “`, make('bdi', shorten(text, most)), '”'] : [axis.positions(bin)];
}

const shownInteger = (value) => value.toLocaleString('en').replace('-', '−');
