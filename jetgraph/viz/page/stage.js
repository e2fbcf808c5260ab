/* Stages: the drawings of one section and phase, panned and zoomed together.  Panning is native scrolling.  While a zoom
   moves, a sheet is only transformed, which the compositor does alone; when it rests, the drawing gets its new size and
   is painted sharp. */
const MIN_SCALE = 0.25, MAX_SCALE = 3, STEP = 1.2;
const READABLE = 0.72; /* fitting the width goes no lower than this */
const RESTING = 140; /* ms after the last movement until the drawing is painted sharp */
const TELLING = 100; /* ms between two updates of the scale in words: each makes the page lay itself out */
const SVG_NS = "http://www.w3.org/2000/svg";

class Stage {
  constructor(element) {
    this.element = element;
    [this.section, this.phase] = element.dataset.stage.split(".").map(Number);
    this.panes = $$(".pane", element);
    this.views = this.panes.map((pane) => pane.querySelector(".viewport"));
    this.sheets = this.panes.map((pane) => pane.querySelector(".sheet"));
    this.scale = 0; /* as seen: of the painted size times that of the transform */
    this.moved = null; /* while zooming: factor, offset and where the panes stood */
    this.pictures = [new Map(), new Map()]; /* per detail: pane → svg */
    this.detail = 0;
    this.panes.forEach((pane) => this.pictures[0].set(pane, pane.querySelector("svg")));
    this.views.forEach((view) => this.listen(view));
  }

  get output() { return sections[this.section].querySelector(".scale"); }

  /* Puts in the drawings of the present detail, and what a drawing needs to be used. */
  prepare() {
    this.panes.forEach((pane) => {
      const known = this.pictures[state.detail];
      if (!known.has(pane)) {
        const [s, phase, side] = pane.dataset.pane.split(".").map(Number);
        const template = document.querySelector(`[data-picture="${s}.${phase + EVERY_OP}.${side}"]`);
        if (template) known.set(pane, template.content.firstElementChild.cloneNode(true));
      }
      const picture = known.get(pane);
      const sheet = pane.querySelector(".sheet");
      if (picture && sheet.firstElementChild !== picture) sheet.replaceChildren(picture);
      if (picture && !picture.dataset.ready) widen(picture);
    });
    const changed = this.detail !== state.detail;
    this.detail = state.detail;
    if (!this.scale || changed) this.fit();
  }

  get size() {
    const picture = this.pictures[this.detail].get(this.panes[0]) || this.pictures[0].get(this.panes[0]);
    return [Number(picture.getAttribute("width")), Number(picture.getAttribute("height"))];
  }

  fit() {
    this.settle();
    const room = this.views[0].clientWidth;
    if (!room) return;
    const [width] = this.size;
    this.paint(Math.min(1, Math.max(room / width, READABLE)));
    this.scrollTo(Math.max(0, (width * this.scale - room) / 2), 0);
  }

  paint(scale) {
    this.scale = scale;
    const [width, height] = this.size;
    this.sheets.forEach((sheet) => {
      sheet.style.transform = "";
      [sheet.parentElement, sheet, sheet.firstElementChild].forEach((e) => { e.style.width = `${width * scale}px`; e.style.height = `${height * scale}px`; });
    });
    this.tell();
  }

  tell() {
    this.told = performance.now();
    this.output.textContent = `${Math.round(this.scale * 100)}%`;
  }

  /* Zooms by a factor about a point of a viewport; the middle by default. */
  zoom(factor, view = this.views[0], x = view.clientWidth / 2, y = view.clientHeight / 2) {
    const scale = Math.min(MAX_SCALE, Math.max(MIN_SCALE, this.scale * factor));
    const grown = scale / this.scale;
    if (!this.moved) {
      const margin = Math.max(0, (view.clientWidth - this.size[0] * this.scale) / 2);
      this.moved = { k: 1, dx: 0, dy: 0, left: view.scrollLeft, top: view.scrollTop, margin };
    }
    const m = this.moved;
    const [px, py] = [x + m.left - m.margin, y + m.top];
    m.dx = px - (px - m.dx) * grown;
    m.dy = py - (py - m.dy) * grown;
    m.k *= grown;
    this.scale = scale;
    this.sheets.forEach((sheet) => { sheet.style.transform = `translate(${m.dx}px, ${m.dy}px) scale(${m.k})`; });
    if (performance.now() - this.told > TELLING) this.tell();
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.settle(), RESTING);
  }

  /* Ends a zoom: the drawing is painted at the size that it has. */
  settle() {
    if (!this.moved) return;
    clearTimeout(this.rest);
    const { dx, dy, left, top, margin } = this.moved;
    this.moved = null;
    this.paint(this.scale);
    const room = this.views[0].clientWidth;
    const now = Math.max(0, (room - this.size[0] * this.scale) / 2);
    this.scrollTo(left + now - margin - dx, top - dy);
  }

  scrollTo(left, top) { this.views.forEach((view) => { view.scrollLeft = left; view.scrollTop = top; }); }

  /* Brings a box into view in every pane; the page scrolls so that the stage is seen. */
  reveal(box) {
    this.settle();
    const view = box.closest(".viewport");
    const a = box.getBoundingClientRect(), b = view.getBoundingClientRect();
    this.scrollTo(
      view.scrollLeft + a.left + a.width / 2 - b.left - view.clientWidth / 2,
      view.scrollTop + a.top + a.height / 2 - b.top - view.clientHeight / 2,
    );
    const header = document.querySelector("header").getBoundingClientRect().bottom;
    const now = box.getBoundingClientRect();
    if (now.top < header + 40 || now.bottom > innerHeight - 40 || b.top < header || b.bottom > innerHeight)
      scrollBy(0, b.top - header - (innerHeight - header - Math.min(b.height, innerHeight - header)) / 2);
  }

  listen(view) {
    view.addEventListener("scroll", () => this.views.forEach((other) => {
      if (other === view) return;
      if (other.scrollLeft !== view.scrollLeft) other.scrollLeft = view.scrollLeft;
      if (other.scrollTop !== view.scrollTop) other.scrollTop = view.scrollTop;
    }), { passive: true });
    view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const at = view.getBoundingClientRect();
      this.zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) / 250), view, event.clientX - at.left, event.clientY - at.top);
    }, { passive: false });
    let from = null;
    view.addEventListener("pointerdown", (event) => {
      if (event.button === 0 && event.pointerType === "mouse")
        from = { x: event.clientX, y: event.clientY, left: view.scrollLeft, top: view.scrollTop, dragged: false };
    });
    view.addEventListener("pointermove", (event) => {
      if (!from) return;
      const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
      if (!from.dragged && Math.hypot(dx, dy) < 5) return;
      if (!from.dragged) { from.dragged = true; view.setPointerCapture(event.pointerId); view.classList.add("dragged"); }
      view.scrollLeft = from.left - dx;
      view.scrollTop = from.top - dy;
    });
    const end = () => { from = null; setTimeout(() => view.classList.remove("dragged")); };
    view.addEventListener("pointerup", end);
    view.addEventListener("pointercancel", end);
  }
}

/* A wide unseen line over each edge, so that a pointer finds it. */
function widen(picture) {
  picture.dataset.ready = "1";
  $$(".wire > path", picture).forEach((path) => {
    const hit = document.createElementNS(SVG_NS, "path");
    hit.setAttribute("d", path.getAttribute("d"));
    hit.setAttribute("class", "hit");
    path.after(hit);
  });
}

const stages = $$(".stage").map((element) => new Stage(element));
const stageOf = (s, phase) => stages.find((stage) => stage.section === s && stage.phase === phase);
const stageWith = (element) => stages.find((stage) => stage.element === element.closest(".stage"));
const shownStages = (s) => stages.filter((stage) => stage.section === s && stage.element.offsetParent);

function prepareSection(s) {
  if (sections[s].open) shownStages(s).forEach((stage) => stage.prepare());
}
sections.forEach((element, s) => element.addEventListener("toggle", () => prepareSection(s)));
let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => stages.forEach((stage) => stage.element.offsetParent && stage.scale && stage.fit()), 150);
});
