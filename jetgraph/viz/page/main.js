/* Switches, the walk through the differences, keys, theme and print. */
const lines = data.differences;
const at = { line: -1, member: 0 };

/* Jumps to a difference; a line stands for one in each of several layers. */
function visit(line, member = 0) {
  if (!lines.length) return;
  at.line = (line + lines.length) % lines.length;
  const members = lines[at.line];
  at.member = (member + members.length) % members.length;
  $$("[data-difference]").forEach((button, i) => button.setAttribute("aria-current", String(i === at.line)));
  showLine(document.querySelector(`[data-difference="${at.line}"]`));
  const which = members.length > 1 ? ` · ${at.member + 1} of ${members.length}` : "";
  $("counter").textContent = `${at.line + 1} / ${lines.length}${which}`;
  const [train, infer] = members[at.member];
  if (!(infer !== null && go(1, infer)) && train !== null) go(0, train);
}

function showLine(button) {
  const list = button.closest("ol");
  const top = button.offsetTop - list.offsetTop;
  if (top < list.scrollTop || top + button.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top - 8;
}

$$("[data-difference]").forEach((button, line) =>
  button.addEventListener("click", () => visit(line, line === at.line ? at.member + 1 : 0)));
if (lines.length) {
  $("counter").textContent = `– / ${lines.length}`;
  $("next").addEventListener("click", () => visit(at.line + 1));
  $("previous").addEventListener("click", () => visit(Math.max(at.line, 0) - 1));
}

function foldAll() {
  const open = sections.some((e) => !e.open);
  sections.forEach((e) => { e.open = open; });
  nameFold();
}
const nameFold = () => { $("fold-all").textContent = sections.some((e) => !e.open) ? "Unfold all" : "Fold all"; };
sections.forEach((e) => e.addEventListener("toggle", nameFold));
$("fold-all").addEventListener("click", foldAll);

/* One section alone, as large as the window allows. */
function focusOn(s) {
  sections.forEach((e, k) => e.classList.toggle("focused", k === s));
  document.body.classList.toggle("focus", s !== null);
  if (s === null) return;
  sections[s].open = true;
  scrollTo(0, 0);
  shownStages(s).forEach((stage) => { stage.prepare(); stage.fit(); });
}
const focused = () => (document.body.classList.contains("focus") ? sections.findIndex((e) => e.classList.contains("focused")) : null);
const toggleFocus = (s) => focusOn(focused() === s ? null : s);
$$("[data-focus]").forEach((button) => button.addEventListener("click", () => toggleFocus(sections.indexOf(button.closest(".section")))));

$$("[data-zoom]").forEach((button) => button.addEventListener("click", () => {
  zoomSection(sections.indexOf(button.closest(".section")), Number(button.dataset.zoom));
}));
function zoomSection(s, direction) {
  shownStages(s).forEach((stage) => (direction ? stage.zoom(direction > 0 ? STEP : 1 / STEP) : stage.fit()));
}

function togglePanel() {
  const wide = document.body.classList.toggle("wide");
  $("side-panel").setAttribute("aria-pressed", String(!wide));
  stages.forEach((stage) => stage.element.offsetParent && stage.scale && stage.fit());
}
$("side-panel").addEventListener("click", togglePanel);

/* -------------------------------------------------------------------------------------------------------- theme */
const dark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (on) => document.documentElement.setAttribute("data-theme", on ? "dark" : "light");
const isDark = () => document.documentElement.dataset.theme === "dark";
setTheme(dark.matches);
dark.addEventListener("change", (event) => setTheme(event.matches));
$("theme").addEventListener("click", () => setTheme(!isDark()));
let darkBefore = false;
addEventListener("beforeprint", () => { darkBefore = isDark(); setTheme(false); });
addEventListener("afterprint", () => setTheme(darkBefore));

/* --------------------------------------------------------------------------------------------------------- keys */
const sectionInUse = () => (chosen ? chosen.s : focused() ?? sections.findIndex((e) => e.open));
const onSection = (act) => { const s = sectionInUse(); if (s !== null && s >= 0) act(s); };
function enter() {
  const pane = document.activeElement.closest(".pane");
  const first = pane && pane.querySelector("[data-box]");
  if (first) selectBox(...placeOf(pane), Number(first.dataset.box));
}
const KEYS = {
  "/": () => { $("search").focus(); $("search").select(); },
  n: () => visit(at.line + 1),
  p: () => visit(Math.max(at.line, 0) - 1),
  N: () => visit(Math.max(at.line, 0), at.member + 1),
  P: () => visit(Math.max(at.line, 0), at.member - 1),
  b: () => setPhase(PHASES[(PHASES.indexOf(state.phase) + 1) % PHASES.length]),
  o: () => setDetail(1 - state.detail),
  e: foldAll,
  f: () => onSection(toggleFocus),
  t: () => setTheme(!isDark()),
  "[": togglePanel,
  "?": () => $("help").showModal(),
  "+": () => onSection((s) => zoomSection(s, 1)),
  "=": () => onSection((s) => zoomSection(s, 1)),
  "-": () => onSection((s) => zoomSection(s, -1)),
  0: () => onSection((s) => zoomSection(s, 0)),
  Escape: () => (focused() !== null && !chosen ? focusOn(null) : clearSelection()),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, dialog *")) return;
  if (event.key.startsWith("Arrow")) { if (move(event.key)) event.preventDefault(); return; }
  const act = event.key === "Enter" ? document.activeElement.matches(".viewport") && enter : KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
$("help-open").addEventListener("click", () => $("help").showModal());
document.documentElement.dataset.ready = "1";
