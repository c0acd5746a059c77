// The views of the chosen head, and the panels below them. They register themselves here:
//
//   addView({name, label, shows(context) -> bool, create() -> {element, update(context)}})
//
// `create` is called once per place (twice where two maps stand side by side), `update`
// whenever the choice changes. `mark(cell)`, if there is one, is told the cell that is
// pointed at, {query, key} in bins of context.map, or null. Elements have no ids.

const views = [];
const panels = [];

function addView(view) { views.push(view); }

function addPanel(panel) { panels.push(panel); }
