// What drawn views share: colours of heads and of signed numbers, a bin in words.

// Told apart by colour-blind eyes, with a contrast of 3 to white and to the dark page
// (after Paul Tol's "bright"). From the ninth head on they return darker, then lighter.
const headColours = [
  [68, 119, 170], [232, 94, 112], [34, 136, 51], [165, 140, 20],
  [0, 155, 195], [190, 60, 135], [215, 110, 25], [125, 125, 140],
];

function headColour(head) {
  const rounds = [0, -0.35, 0.4, -0.55];
  const towards = rounds[Math.floor(head / headColours.length) % rounds.length];
  const parts = headColours[head % headColours.length].map((part) => (
    Math.round(towards < 0 ? part * (1 + towards) : part + towards * (255 - part))
  ));
  return `rgb(${parts})`;
}

// Signed numbers, -1 to 1: blue below 0, nothing at 0, red above, as in differences of
// maps; told apart by colour-blind eyes. As [red, green, blue, alpha].
function signedColour(share) {
  const strength = Math.round(255 * Math.min(1, Math.abs(share)));
  return share < 0 ? [58, 122, 196, strength] : [205, 62, 58, strength];
}

const colourText = ([red, green, blue, alpha]) => (
  `rgba(${red},${green},${blue},${(alpha / 255).toFixed(3)})`
);

// A bin and its text, 12 “fox”, as nodes: text of any direction stays between its marks.
function placeNodes(axis, bin, most = 24) {
  const text = axis.text(bin);
  return text ? [`${axis.positions(bin)} “`, make('bdi', shorten(text, most)), '”'] : [axis.positions(bin)];
}

const shownInteger = (value) => value.toLocaleString('en').replace('-', '−');
