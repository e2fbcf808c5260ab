/* Filters: phase, level of detail, format and role.  What does not match is dimmed, never removed: the flow stays. */
const active = { format: new Set(), role: new Set() };
const PHASES = ["forward", "dimmed", "backward"];

function press(group, chosenButton) {
  $$("button", group).forEach((button) => button.setAttribute("aria-pressed", String(button === chosenButton)));
}

/* forward: backward hidden; dimmed: backward shown pale; backward: both in full. */
function setPhase(phase) {
  state.phase = phase;
  document.body.classList.toggle("with-backward", phase !== "forward");
  document.body.classList.toggle("dim-backward", phase === "dimmed");
  press($("phase"), document.querySelector(`[data-phase="${phase}"]`));
  sections.forEach((_, s) => prepareSection(s));
  applyFilters();
}

function setDetail(detail) {
  state.detail = detail;
  press($("detail-switch"), document.querySelector(`[data-detail="${detail}"]`));
  const node = chosen && chosenNode();
  clearSelection();
  sections.forEach((_, s) => prepareSection(s));
  applyFilters();
  if (node) go(...node);
}

/* A node of the selection as it was drawn before the detail changed. */
function chosenNode() {
  const view = data.sections[chosen.s].views[chosen.phase + (1 - state.detail) * EVERY_OP];
  const ordinals = chosen.item === undefined ? [view.wires[chosen.wire][2 + chosen.side]] : view.items[chosen.item][chosen.side][2];
  return [chosen.side, nodesOf(chosen.s, chosen.side, ordinals.slice(-1))[0]];
}

/* A node matches a format that it makes or reads. */
function matches(side, n) {
  return (!active.format.size || [n, ...inputsOf(side, n)].some((m) => active.format.has(formatClass(side, m)))) &&
    (!active.role.size || active.role.has(text(side, n, "role")));
}

function applyFilters() {
  const filtering = active.format.size + active.role.size > 0;
  $("clear").hidden = !filtering;
  stages.forEach((stage) => {
    if (!stage.element.offsetParent || !stage.scale) return;
    stage.panes.forEach((pane) => dimPane(pane, filtering));
  });
  $$(".key[data-key]").forEach((key) => {
    const [side, n] = key.dataset.key.split(".").map(Number);
    const formats = inputsOf(side, n).map((i) => formatClass(side, i));
    const fits = (!active.format.size || formats.some((f) => active.format.has(f))) &&
      (!active.role.size || active.role.has(text(side, n, "role")));
    key.classList.toggle("dim", filtering && !fits);
  });
}

function dimPane(pane, filtering) {
  const [s, phase, side] = placeOf(pane);
  const view = viewOf(s, phase);
  $$("[data-box]", pane).forEach((e) => {
    const box = view.items[Number(e.dataset.box)][side];
    e.classList.toggle("dim", filtering && !nodesOf(s, side, box[2]).some((n) => matches(side, n)));
  });
  $$(".ghost", pane).forEach((e) => e.classList.toggle("dim", filtering));
  $$("[data-wire]", pane).forEach((e) => {
    const [, target, ...values] = view.wires[Number(e.dataset.wire)];
    const value = nodesOf(s, side, [values[side]])[0];
    const format = !active.format.size || active.format.has(formatClass(side, value));
    const reader = view.items[target][side];
    const ends = [value, ...(reader ? nodesOf(s, side, reader[2]) : [])];
    const role = !active.role.size || ends.some((n) => active.role.has(text(side, n, "role")));
    e.classList.toggle("dim", filtering && !(format && role));
  });
}

$$("[data-phase]").forEach((button) => button.addEventListener("click", () => setPhase(button.dataset.phase)));
$$("[data-detail]").forEach((button) => button.addEventListener("click", () => setDetail(Number(button.dataset.detail))));
$$(".filter").forEach((button) => button.addEventListener("click", () => {
  const kind = button.dataset.format ? "format" : "role";
  const value = button.dataset[kind];
  const on = !active[kind].has(value);
  on ? active[kind].add(value) : active[kind].delete(value);
  button.setAttribute("aria-pressed", String(on));
  if (kind === "role" && on && value !== "FPROP" && state.phase === "forward") setPhase("backward");
  applyFilters();
}));
$("clear").addEventListener("click", () => {
  active.format.clear();
  active.role.clear();
  $$(".filter").forEach((button) => button.setAttribute("aria-pressed", "false"));
  applyFilters();
});
sections.forEach((element) => element.addEventListener("toggle", applyFilters));
