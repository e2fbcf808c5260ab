/* Selection, search, jumps and switches.  Every picture is already in the page; this file draws nothing and writes
   text only by textContent.  Data (see jetgraph/viz/html.py): columns per side, and per section which box holds which
   ordinals and, per layer, which node each ordinal is. */
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const S = data.strings;
const $ = (id) => document.getElementById(id);
const make = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
};
const sections = [...document.querySelectorAll(".section")];
const chosenLayer = data.sections.map(() => 0);

/* node → {section, instance, ordinal} per side, and (view, item) of an ordinal per section and side */
const home = data.sides.map(() => new Map());
const boxOf = data.sections.map(() => data.sides.map(() => new Map()));
data.sections.forEach((section, s) => {
  section.instances.forEach((instance, k) => instance.nodes.forEach((nodes, side) =>
    nodes.slice(0, section.owned[side]).forEach((n, ordinal) => home[side].set(n, { s, k, ordinal }))));
  section.views.forEach((view, v) => view.forEach((item, i) => item.forEach((box, side) => {
    if (box && box.own) box.ordinals.forEach((o) => boxOf[s][side].set(o, [v, i]));
  })));
});

const type = (side, n) => S[side.type[n]];
const formatClass = (text) => ({ bf: "bf16", f3: "f32", f6: "f32", f8: "f8" })[text.slice(0, 2)] || "int";
const short = (text) => text.replace(/ \[[^\]]*\]$/, "").replace(/\[(\S+) [^\]]*\]/, "[$1]");
const nameOf = (side, n) => (side.ins[n].length ? S[side.fqn[n]] : S[side.path[n]] || S[side.op[n]]);

function operand(side, n) {
  const op = S[side.op[n]];
  if (op === "const") return S[side.attrs[n]].replace("value=", "");
  return side.ins[n].length ? "%" + n : S[side.path[n]].split(".").slice(-2).join(".");
}

function clearMarks() {
  document.querySelectorAll(".chosen, .twin").forEach((e) => e.classList.remove("chosen", "twin"));
}

function boxElement(side, s, view, item) {
  return document.querySelector(`[data-pane="${s}.${view}.${side}"] [data-box="${item}"]`);
}

/* Shows a box in the panel and marks it, and its partner on the other side. */
function select(side, s, view, item) {
  clearMarks();
  const section = data.sections[s];
  const box = section.views[view][item][side];
  const nodes = box.ordinals.map((o) => section.instances[chosenLayer[s]].nodes[side][o]);
  const own = boxElement(side, s, view, item);
  if (own) own.classList.add("chosen");
  const twin = data.sides.length > 1 && boxElement(1 - side, s, view, item);
  if (twin) twin.classList.add("twin");
  nodes.forEach((n) => markPort(side, n, s, own));
  describe(side, nodes, box);
  return own;
}

/* A port names a box elsewhere: mark that one too, so that "saved …" leads to where it was computed. */
function markPort(side, n, s, own) {
  const at = home[side].get(n);
  if (!at || at.s !== s) return;
  const where = boxOf[s][side].get(at.ordinal);
  const e = where && boxElement(side, s, ...where);
  if (e && e !== own) e.classList.add("twin");
}

function describe(sideIndex, nodes, box) {
  const side = data.sides[sideIndex];
  const panel = $("detail");
  panel.replaceChildren(make("h2", "", data.sides.length > 1 ? `Selection in ${side.name}` : "Selection"));
  const last = nodes[nodes.length - 1];
  panel.append(make("p", "fqn", nameOf(side, last) || box.title));
  const list = make("dl");
  const row = (name, value) => { if (value) list.append(make("dt", "", name), make("dd", "", value)); };
  const all = (column) => [...new Set(nodes.map((n) => S[side[column][n]]).filter(Boolean))].join(", ");
  row("λ", type(side, last));
  if (S[side.op[last]] === "gemm")
    row("operands", side.ins[last].map((i) => short(type(side, i))).join(" × "));
  const rounds = nodes.filter((n) => ["round", "quantize"].includes(S[side.op[n]])).map((n) => short(type(side, n)));
  row("rounds to", rounds.join(" → "));
  row("role", all("role"));
  row("kernel", all("kernel"));
  row("policy rule", all("reason"));
  row("source", sources(all("source")));
  const out = side.outputs.filter(([n]) => nodes.includes(n)).map(([, name]) => name);
  row("outputs", out.join(", "));
  panel.append(list);
  if (data.sides.length > 1) panel.append(statusLine(sideIndex, nodes));
  panel.append(make("h2", "", nodes.length > 1 ? `${nodes.length} ops` : "op"));
  const ops = make("ol", "ops");
  nodes.forEach((n) => ops.append(opLine(sideIndex, n)));
  panel.append(ops);
}

/* "a.py:65, a.py:66" → "a.py:65, 66" */
function sources(text) {
  let file = "";
  return text.split(", ").map((place) => {
    const [, path, line] = place.match(/^(.*):(\d+)$/) || [null, place, ""];
    const same = path === file && line;
    file = path;
    return same ? line : place;
  }).join(", ");
}

function statusLine(sideIndex, nodes) {
  const side = data.sides[sideIndex];
  const words = { e: "equal on both sides", p: "same op; something before it differs", a: "only on this side" };
  const line = make("p", "hint");
  const marked = nodes.some((n) => data.marked[sideIndex].includes(n));
  const worst = ["a", "p", "e"].find((w) => nodes.some((n) => side.status[n] === w));
  const cls = marked ? "differs" : { e: "equal", p: "", a: "alone" }[worst];
  line.append(make("span", `badge ${cls}`, marked ? "differs" : words[worst] || ""));
  line.style.marginBottom = "10px";
  return line;
}

function opLine(sideIndex, n) {
  const side = data.sides[sideIndex];
  const t = type(side, n);
  const marked = data.marked[sideIndex].includes(n);
  const li = make("li", formatClass(t) + (marked ? " differs" : ""));
  const inputs = side.ins[n].map((i) => operand(side, i)).join(", ");
  const attrs = S[side.attrs[n]];
  li.append(`%${n} = ${S[side.op[n]]}(${inputs})`);
  if (attrs) li.append(make("span", "dim", ` {${attrs}}`));
  li.append(make("span", "dim", ` : ${short(t)} ${(t.match(/\[[^\]]*\]$/) || [""])[0]}`));
  return li;
}

/* Opens the section and layer of a node, selects its box and scrolls there. */
function go(side, n) {
  const at = home[side].get(n);
  if (!at) return false;
  const where = boxOf[at.s][side].get(at.ordinal);
  if (!where) return false;
  setLayer(at.s, at.k);
  sections[at.s].open = true;
  if (data.views[where[0]] === "backward") setBackward(true);
  const element = select(side, at.s, ...where);
  if (element) element.scrollIntoView({ block: "center", inline: "center" });
  return true;
}

function setLayer(s, k) {
  chosenLayer[s] = k;
  const pick = sections[s].querySelector("select");
  if (pick) pick.value = String(k);
}

function setBackward(on) {
  $("backward").checked = on;
  document.body.classList.toggle("backward", on);
}

/* ------------------------------------------------------------------------------------------------------- wiring */
document.querySelectorAll("[data-pane]").forEach((pane) => {
  const [s, view, side] = pane.dataset.pane.split(".").map(Number);
  pane.addEventListener("click", (event) => {
    const box = event.target.closest("[data-box]");
    if (box) select(side, s, view, Number(box.dataset.box));
  });
});
sections.forEach((element, s) => {
  const pick = element.querySelector("select");
  if (!pick) return;
  data.sections[s].instances.forEach((instance, k) => pick.append(new Option(`layer ${instance.layer}`, k)));
  pick.addEventListener("change", () => {
    chosenLayer[s] = Number(pick.value);
    const chosen = element.querySelector(".chosen");
    if (!chosen) return;
    const [section, view, side] = chosen.closest("[data-pane]").dataset.pane.split(".").map(Number);
    select(side, section, view, Number(chosen.dataset.box));
  });
});
document.querySelectorAll("#differences button").forEach((button) => {
  const members = data.differences[Number(button.dataset.difference)];
  let next = 0;
  button.addEventListener("click", () => {
    const [train, infer] = members[next++ % members.length];
    if (!(infer !== null && go(1, infer))) if (train !== null) go(0, train);
  });
});
$("backward").addEventListener("change", (event) => setBackward(event.target.checked));
$("fold-all").addEventListener("click", () => {
  const open = sections.some((e) => !e.open);
  sections.forEach((e) => { e.open = open; });
  $("fold-all").textContent = open ? "Fold all" : "Unfold all";
});
const dark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (on) => document.documentElement.setAttribute("data-theme", on ? "dark" : "light");
setTheme(dark.matches);
dark.addEventListener("change", (event) => setTheme(event.matches));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
let before;
addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; setTheme(false); });
addEventListener("afterprint", () => setTheme(before === "dark"));

/* ------------------------------------------------------------------------------------------------------- search */
const index = new Map();
data.sides.forEach((side, k) => side.op.forEach((op, n) => {
  const name = nameOf(side, n);
  if (!name || !home[k].has(n)) return;
  const key = `${name} ${S[op]}`;
  if (!index.has(key)) index.set(key, { name, op: S[op], key: key.toLowerCase(), at: [] });
  index.get(key).at.push([k, n]);
}));
const LIMIT = 40;

function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const list = $("found");
  list.replaceChildren();
  list.hidden = !words.length;
  if (!words.length) return;
  const hits = [...index.values()].filter((hit) => words.every((w) => hit.key.includes(w)));
  hits.slice(0, LIMIT).forEach((hit) => {
    const button = make("button");
    button.type = "button";
    button.append(make("span", "", hit.name), make("span", "what", `${hit.op}${hit.at.length > 1 ? " ×" + hit.at.length : ""}`));
    button.addEventListener("click", () => { list.hidden = true; hit.at.some(([k, n]) => go(k, n)); });
    const item = make("li");
    item.append(button);
    list.append(item);
  });
  const rest = hits.length - LIMIT;
  if (!hits.length || rest > 0) list.append(make("p", "", hits.length ? `and ${rest} more` : "Nothing has this name."));
}
$("search").addEventListener("input", (event) => search(event.target.value));
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") { const first = $("found").querySelector("button"); if (first) first.click(); }
  if (event.key === "Escape") { event.target.value = ""; search(""); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target.tagName !== "INPUT") { event.preventDefault(); $("search").focus(); }
});
document.documentElement.dataset.ready = "1";
