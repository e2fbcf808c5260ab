/* The data as the other scripts read it: nodes by column, and which box of which drawing shows a node.  Everything is
   in the page; the scripts draw nothing and write text only by textContent. */
const data = JSON.parse(document.getElementById("data").textContent);
const S = data.strings;
const FORWARD = 0, BACKWARD = 1, EVERY_OP = 2; /* views: FORWARD or BACKWARD, plus EVERY_OP */
const PAIR = data.sides.length > 1;

const $ = (id) => document.getElementById(id);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
};

const sections = $$(".section");
const chosenLayer = data.sections.map(() => 0);
const state = { detail: 0, phase: "forward" };

/* node → section, layer and ordinal, per side */
const home = data.sides.map(() => new Map());
data.sections.forEach((section, s) => section.instances.forEach((instance, k) => instance.nodes.forEach((nodes, side) => {
  for (let o = 0; o < section.owned[side]; o++) home[side].set(nodes[o], { s, k, ordinal: o });
})));

/* ordinal → [view, item], per section, detail and side; only boxes that compute it */
const boxOf = data.sections.map((section) => [0, EVERY_OP].map((detail) => data.sides.map((_, side) => {
  const found = new Map();
  [FORWARD, BACKWARD].forEach((phase) => section.views[phase + detail].items.forEach((item, i) => {
    const box = item[side];
    if (box && box[1]) box[2].forEach((o) => found.set(o, [phase, i]));
  }));
  return found;
})));

const partnerOf = [new Map(), new Map()]; /* per side: node → its partner on the other side */
data.partner.forEach((train, infer) => {
  if (train < 0) return;
  partnerOf[1].set(infer, train);
  if (!partnerOf[0].has(train)) partnerOf[0].set(train, infer);
});
const kept = data.sides.map((side) => new Map(side.kept));
const marked = data.marked.map((nodes) => new Set(nodes));
const outputs = data.sides.map((side) => side.outputs);

const op = (side, n) => S[data.sides[side].op[n]];
const inputsOf = (side, n) => data.sides[side].ins[n];
const type = (side, n) => S[data.sides[side].type[n]];
const text = (side, n, column) => S[data.sides[side][column][n]];
const formatClass = (side, n) => text(side, n, "format");
const precision = (side, n) => type(side, n).replace(/ \[[^\]]*\]$/, "");
const shape = (side, n) => (type(side, n).match(/\[[^\]]*\]$/) || [""])[0];
const shorten = (words) => words.replace(/\[(\S+) [^\]]*\]/, "[$1]");
const short = (side, n) => shorten(precision(side, n));
const nameOf = (side, n) => text(side, n, inputsOf(side, n).length ? "fqn" : "path") || text(side, n, "path") || op(side, n);

const nodesOf = (s, side, ordinals) => ordinals.map((o) => data.sections[s].instances[chosenLayer[s]].nodes[side][o]);

/* The drawn view of a phase at the present level of detail. */
const viewOf = (s, phase) => data.sections[s].views[phase + state.detail * EVERY_OP];
const paneOf = (s, phase, side) => document.querySelector(`[data-pane="${s}.${phase}.${side}"]`);
const boxElement = (s, phase, side, item) => {
  const pane = paneOf(s, phase, side);
  return pane && pane.querySelector(`[data-box="${item}"]`);
};

const readers = data.sides.map(() => null);
function readersOf(side, n) {
  if (!readers[side]) {
    readers[side] = data.sides[side].ins.map(() => []);
    data.sides[side].ins.forEach((ins, reader) => new Set(ins).forEach((i) => readers[side][i].push(reader)));
  }
  return readers[side][n];
}
