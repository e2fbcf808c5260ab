/* Search by FQN, op and role.  Hits of both sides are one line, and so are many hits that differ in a layer's number:
   choosing such a line again goes to the next layer. */
const LIMIT = 40, FOLD_ABOVE = 12;
let index = null;

function buildIndex() {
  const found = new Map();
  data.sides.forEach((side, k) => side.op.forEach((_, n) => {
    if (!home[k].has(n)) return;
    const name = nameOf(k, n), what = [op(k, n), text(k, n, "role")].filter(Boolean).join(" ");
    const key = `${name} ${what}`;
    if (!found.has(key)) found.set(key, { name, what, key: key.toLowerCase(), at: [], layers: 1 });
    found.get(key).at.push([k, n]);
  }));
  index = [...found.values()];
}

function foldLayers(hits) {
  const found = new Map();
  hits.forEach((hit) => {
    const name = hit.name.replace(/\.\d+(?=\.|$)/, ".*"), key = `${name} ${hit.what}`;
    if (!found.has(key)) found.set(key, { ...hit, at: [], layers: 0 });
    const folded = found.get(key);
    if (++folded.layers > 1) folded.name = name;
    folded.at.push(hit.at[0]);
  });
  return [...found.values()];
}

function search(words) {
  if (!index) buildIndex();
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  const list = $("found");
  list.replaceChildren();
  list.hidden = !parts.length;
  if (!parts.length) return;
  let hits = index.filter((hit) => parts.every((part) => hit.key.includes(part)));
  if (hits.length > FOLD_ABOVE) hits = foldLayers(hits);
  hits.slice(0, LIMIT).forEach((hit) => list.append(line(hit)));
  const rest = hits.length - LIMIT;
  if (!hits.length || rest > 0) list.append(make("p", "", hits.length ? `and ${rest} more` : "Nothing has this name."));
}

function line(hit) {
  const button = make("button");
  button.type = "button";
  const count = hit.layers > 1 ? ` · ${hit.layers} layers` : hit.at.length > 1 ? ` ×${hit.at.length}` : "";
  button.append(make("span", "name", hit.name), " ", make("span", "what", hit.what + count));
  let next = 0;
  button.addEventListener("click", () => {
    $("found").hidden = hit.layers === 1;
    for (let tried = 0; tried < hit.at.length; tried++) if (go(...hit.at[next++ % hit.at.length])) return;
  });
  const item = make("li");
  item.append(button);
  return item;
}

$("search").addEventListener("input", (event) => search(event.target.value));
document.querySelector(".search").addEventListener("keydown", (event) => {
  const buttons = $$("button", $("found"));
  const at = buttons.indexOf(document.activeElement);
  if (event.key === "Enter" && at < 0 && buttons.length) buttons[0].click();
  else if (event.key === "ArrowDown" && buttons.length) buttons[Math.min(at + 1, buttons.length - 1)].focus();
  else if (event.key === "ArrowUp" && at >= 0) (buttons[at - 1] || $("search")).focus();
  else if (event.key === "Escape") { $("search").value = ""; search(""); $("search").blur(); }
  else return;
  event.preventDefault();
  event.stopPropagation();
});
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest(".search")) $("found").hidden = true;
});
