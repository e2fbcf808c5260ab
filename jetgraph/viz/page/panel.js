/* The panel: everything the graphs say about the selected box or edge, both sides beside each other. */
const LONG = 16; /* characters above which the two sides stand below each other */
const STATUS = { e: "equal on both sides", p: "the same op; something before it differs", a: "only on this side" };

function describeBox(side, nodes, title, twins) {
  const last = nodes[nodes.length - 1];
  const sidesNodes = PAIR ? (side ? [twins, nodes] : [nodes, twins]) : [nodes];
  const panel = startPanel(nameOf(side, last) || title, statusOf(side, nodes));
  const rows = [
    ["λ", (k, own) => precision(k, own[own.length - 1])],
    ["shape", (k, own) => shape(k, own[own.length - 1])],
    ["operands", (k, own) => (op(k, own[own.length - 1]) === "gemm" ? inputsOf(k, own[own.length - 1]).map((i) => short(k, i)).join(" × ") : "")],
    ["rounds to", (k, own) => own.filter((n) => ["round", "quantize"].includes(op(k, n))).map((n) => short(k, n)).join(" → ")],
    ["role", (k, own) => all(k, own, "role")],
    ["kernel", (k, own) => all(k, own, "kernel")],
    ["policy rule", (k, own) => all(k, own, "reason")],
    ["source", (k, own) => sources(all(k, own, "source"))],
    ["kept for backward", (k, own) => own.filter((n) => kept[k].has(n)).map((n) => `${short(k, n)}: ${S[kept[k].get(n)]}`).join(", ")],
    ["outputs", (k, own) => outputs[k].filter(([n]) => own.includes(n)).map(([, name]) => name).join(", ")],
  ];
  panel.append(table(rows, sidesNodes));
  sidesNodes.forEach((own, k) => {
    if (!own.length) return;
    const count = `${own.length} op${own.length > 1 ? "s" : ""}`;
    panel.append(make("h3", "", PAIR ? `${data.sides[k].name} · ${count}` : count));
    const list = make("ol", "ops");
    own.forEach((n) => list.append(opLine(k, n)));
    panel.append(list);
  });
}

function describeWire(side, values) {
  const known = values.map((n) => (n === null ? [] : [n]));
  const n = values[side];
  const panel = startPanel(nameOf(side, n), statusOf(side, [n]), "Edge");
  panel.append(table([
    ["λ", (k, own) => precision(k, own[0])],
    ["shape", (k, own) => shape(k, own[0])],
    ["made by", (k, own) => `${op(k, own[0])} ${nameOf(k, own[0])}`],
    ["policy rule", (k, own) => text(k, own[0], "reason")],
    ["source", (k, own) => text(k, own[0], "source")],
    ["kept for backward", (k, own) => (kept[k].has(own[0]) ? S[kept[k].get(own[0])] : "")],
    ["outputs", (k, own) => outputs[k].filter(([m]) => m === own[0]).map(([, name]) => name).join(", ")],
  ], known));
  known.forEach((own, k) => {
    if (!own.length) return;
    panel.append(make("h3", "", PAIR ? `${data.sides[k].name} · made and read by` : "made and read by"));
    const list = make("ol", "ops");
    [own[0], ...readersOf(k, own[0])].forEach((m) => list.append(opLine(k, m)));
    panel.append(list);
  });
}

function startPanel(name, status, what = "Selection") {
  const panel = $("detail");
  panel.replaceChildren(make("h2", "", what), make("p", "fqn", name));
  if (status) panel.append(status);
  return panel;
}

/* One row a property and one column a side, or one line if they are long; where both sides have it and differ, the row is marked. */
function table(rows, sidesNodes) {
  const list = make("table");
  let columns = false;
  rows.forEach(([name, value]) => {
    const cells = sidesNodes.map((own, k) => (own.length ? value(k, own) : ""));
    if (!cells.some(Boolean)) return;
    const both = cells.length > 1 && sidesNodes.every((own) => own.length);
    const same = both && cells[0] === cells[1];
    const row = make("tr", both && !same && ["λ", "operands", "rounds to", "shape"].includes(name) ? "differs" : "");
    row.append(make("th", "", name));
    if (same || (both && Math.max(...cells.map((words) => words.length)) > LONG)) {
      const cell = make("td");
      cell.colSpan = 2;
      if (same) cell.textContent = cells[0];
      else cells.forEach((words, k) => {
        const line = make("div");
        line.append(make("span", "dim", `${data.sides[k].name}: `), words || "–");
        cell.append(line);
      });
      row.append(cell);
    } else {
      columns = PAIR;
      cells.forEach((words, k) => row.append(make("td", sidesNodes[k].length ? "" : "none", sidesNodes[k].length ? words || "–" : "·")));
    }
    list.append(row);
  });
  if (columns) {
    const head = make("tr", "head");
    head.append(make("td"), ...data.sides.map((side) => make("th", "", side.name)));
    list.prepend(head);
  }
  return list;
}

const all = (side, nodes, column) => [...new Set(nodes.map((n) => text(side, n, column)).filter(Boolean))].join(", ");

/* "a.py:65, a.py:66" → "a.py:65, 66" */
function sources(words) {
  let file = "";
  return words.split(", ").map((place) => {
    const [, path, line] = place.match(/^(.*):(\d+)$/) || [null, place, ""];
    const same = path === file && line;
    file = path;
    return same ? line : place;
  }).join(", ");
}

function statusOf(side, nodes) {
  if (!PAIR) return null;
  const status = data.sides[side].status;
  const differs = nodes.some((n) => marked[side].has(n));
  const worst = ["a", "p", "e"].find((w) => nodes.some((n) => status[n] === w));
  const line = make("p", "status");
  line.append(make("span", `badge ${differs ? "differs" : { e: "equal", p: "", a: "alone" }[worst]}`, differs ? "differs" : STATUS[worst] || ""));
  return line;
}

function opLine(side, n) {
  const li = make("li", formatClass(side, n) + (marked[side].has(n) ? " differs" : ""));
  const jump = (m) => {
    if (op(side, m) === "const") return make("span", "dim", `${text(side, m, "attrs").replace("value=", "")}:${short(side, m)}`);
    const words = inputsOf(side, m).length ? `%${m}` : nameOf(side, m).split(".").slice(-2).join(".");
    if (!home[side].has(m)) return make("span", "", words);
    const button = make("button", "link", words);
    button.type = "button";
    button.title = nameOf(side, m);
    button.addEventListener("click", () => go(side, m));
    return button;
  };
  li.append(jump(n), ` = ${op(side, n)}(`);
  inputsOf(side, n).forEach((m, i) => li.append(i ? ", " : "", jump(m)));
  li.append(")");
  const attrs = text(side, n, "attrs");
  if (attrs) li.append(make("span", "dim", ` {${attrs}}`));
  li.append(make("span", "dim", ` : ${short(side, n)} ${shape(side, n)}`));
  return li;
}
