/* Selection and hover, on both sides at once, and jumps to a node wherever it is folded away. */
let chosen = null; /* { s, phase, side, item } or { s, phase, side, wire } */

const unmark = (...names) => names.forEach((name) => $$(`.${name}`).forEach((e) => e.classList.remove(name)));

function eachPane(s, phase, visit) {
  data.sides.forEach((_, side) => {
    const pane = paneOf(s, phase, side);
    if (pane) visit(pane, side);
  });
}

/* The item on the other side that stands for the same: the same place, or (drawn apart) the partner's box. */
function twinItem(s, phase, side, item) {
  const both = viewOf(s, phase).items[item];
  if (!PAIR || both[1 - side]) return item;
  const own = boxOf[s][state.detail][1 - side];
  const there = nodesOf(s, side, both[side][2]).map((n) => home[1 - side].get(partnerOf[side].get(n)));
  const found = there.find((at) => at && at.s === s && own.has(at.ordinal));
  return found ? own.get(found.ordinal)[1] : item;
}

/* A wire is two elements: its line, and its labels above all lines. */
const markWire = (pane, k, name) => $$(`[data-wire="${k}"]`, pane).forEach((e) => e.classList.add(name));

function markWires(s, phase, items, name) {
  eachPane(s, phase, (pane, side) => viewOf(s, phase).wires.forEach(([source, target], k) => {
    if (source !== items[side] && target !== items[side]) return;
    markWire(pane, k, name);
  }));
}

function selectBox(s, phase, side, item) {
  unmark("chosen", "twin", "lit");
  const box = viewOf(s, phase).items[item][side];
  if (!box) return null;
  chosen = { s, phase, side, item };
  const own = boxElement(s, phase, side, item);
  if (own) own.classList.add("chosen");
  const other = twinItem(s, phase, side, item);
  const twin = PAIR && boxElement(s, phase, 1 - side, other);
  if (twin) twin.classList.add("twin");
  markWires(s, phase, side ? [other, item] : [item, other], "lit");
  const nodes = nodesOf(s, side, box[2]);
  nodes.forEach((n) => markOrigin(side, n, s, own));
  const twinBox = PAIR && viewOf(s, phase).items[other][1 - side];
  describeBox(side, nodes, S[box[0]], twinBox ? nodesOf(s, 1 - side, twinBox[2]) : []);
  return own;
}

/* A port names a box elsewhere: mark that one too, so that "saved …" leads to where it was computed. */
function markOrigin(side, n, s, own) {
  const at = home[side].get(n);
  if (!at || at.s !== s) return;
  const where = boxOf[s][state.detail][side].get(at.ordinal);
  const e = where && boxElement(s, where[0], side, where[1]);
  if (e && e !== own) e.classList.add("twin");
}

function selectWire(s, phase, side, wire) {
  unmark("chosen", "twin", "lit");
  chosen = { s, phase, side, wire };
  eachPane(s, phase, (pane) => markWire(pane, wire, "lit"));
  const values = viewOf(s, phase).wires[wire].slice(2).map((o, k) => (o < 0 ? null : nodesOf(s, k, [o])[0]));
  describeWire(side, values);
}

function clearSelection() {
  chosen = null;
  unmark("chosen", "twin", "lit");
}

/* Opens what hides a node, selects its box and brings it into view.  False if no box shows it (a constant). */
function go(side, n) {
  const at = home[side].get(n);
  const where = at && boxOf[at.s][state.detail][side].get(at.ordinal);
  if (!where) return false;
  setLayer(at.s, at.k);
  if (where[0] === BACKWARD && state.phase === "forward") setPhase("backward");
  if (document.body.classList.contains("focus")) focusOn(at.s);
  sections[at.s].open = true;
  prepareSection(at.s);
  const element = selectBox(at.s, where[0], side, where[1]);
  if (element) stageOf(at.s, where[0]).reveal(element);
  return true;
}

function setLayer(s, k) {
  chosenLayer[s] = k;
  const pick = sections[s].querySelector("select");
  if (pick) pick.value = String(k);
}

/* Arrow keys: up and down along edges, left and right to the next box at the same height. */
function move(key) {
  if (!chosen || chosen.item === undefined) return false;
  const { s, phase, side, item } = chosen;
  const wires = viewOf(s, phase).wires.filter((wire) => wire[2 + side] >= 0);
  let next;
  if (key === "ArrowUp") next = wires.filter((w) => w[1] === item).map((w) => w[0]);
  if (key === "ArrowDown") next = wires.filter((w) => w[0] === item).map((w) => w[1]);
  if (next) next = next.filter((k) => viewOf(s, phase).items[k][side])[0];
  else next = beside(s, phase, side, item, key === "ArrowRight" ? 1 : -1);
  if (next === undefined) return true;
  const element = selectBox(s, phase, side, next);
  if (element) stageOf(s, phase).reveal(element);
  return true;
}

function beside(s, phase, side, item, direction) {
  const here = boxElement(s, phase, side, item).getBoundingClientRect();
  const middle = (r) => r.top + r.height / 2;
  let best, nearest = Infinity;
  $$("[data-box]", paneOf(s, phase, side)).forEach((e) => {
    const there = e.getBoundingClientRect();
    const distance = (there.left - here.left) * direction;
    if (Math.abs(middle(there) - middle(here)) < 12 && distance > 1 && distance < nearest)
      [best, nearest] = [Number(e.dataset.box), distance];
  });
  return best;
}

/* ---------------------------------------------------------------------------------------------------- listening */
const placeOf = (pane) => pane.dataset.pane.split(".").map(Number);

$$(".viewport").forEach((view) => {
  const pane = view.closest(".pane");
  const [s, phase, side] = placeOf(pane);
  view.addEventListener("click", (event) => {
    if (view.classList.contains("dragged")) return;
    const box = event.target.closest("[data-box]");
    const wire = event.target.closest("[data-wire]");
    if (box) selectBox(s, phase, side, Number(box.dataset.box));
    else if (wire) selectWire(s, phase, side, Number(wire.dataset.wire));
  });
  view.addEventListener("pointerover", (event) => {
    const box = event.target.closest("[data-box]");
    const wire = event.target.closest("[data-wire]");
    unmark("hot");
    if (box) {
      const item = Number(box.dataset.box), other = twinItem(s, phase, side, item);
      const items = side ? [other, item] : [item, other];
      eachPane(s, phase, (there, k) => {
        const e = there.querySelector(`[data-box="${items[k]}"]`);
        if (e) e.classList.add("hot");
      });
      markWires(s, phase, items, "hot");
    } else if (wire) {
      eachPane(s, phase, (there) => markWire(there, wire.dataset.wire, "hot"));
    }
  });
  view.addEventListener("pointerleave", () => unmark("hot"));
});
$$(".key[data-key]").forEach((key) => key.addEventListener("click", (event) => {
  event.preventDefault();
  go(...key.dataset.key.split(".").map(Number));
}));
sections.forEach((element, s) => {
  const pick = element.querySelector("select");
  if (!pick) return;
  data.sections[s].instances.forEach((instance, k) => pick.append(new Option(`layer ${instance.layer}`, k)));
  pick.addEventListener("change", () => {
    chosenLayer[s] = Number(pick.value);
    if (!chosen || chosen.s !== s) return;
    if (chosen.wire === undefined) selectBox(s, chosen.phase, chosen.side, chosen.item);
    else selectWire(s, chosen.phase, chosen.side, chosen.wire);
  });
});
