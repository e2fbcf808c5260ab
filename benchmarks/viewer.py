"""How fast the HTML page of an 80-layer model is written, opened, panned and zoomed:  python -m benchmarks.viewer

The pair is what the page is worst at: training under `jet`, forward and backward, beside a forward in BF16 with torch's
own kernels, so that every linear of every layer differs.  Both are captured from small Llamas of 80 layers, which takes
minutes; ``--graphs FOLDER`` keeps them there and reads them again.

Writing is CPU seconds of one core, median of three.  The rest is measured in a headless Chromium that paints in
software (no GPU): first contentful paint after navigation, median of five fresh pages; and frames per second while a
layer is open and every animation frame pans by 12 pixels or zooms by 1 %, for two seconds each, at most 60.

Exit status 1 if a figure misses its bar.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Row, report
from jetgraph.graph import PrecisionGraph
from jetgraph.viz import Difference, render_html

RESULTS = Path(__file__).parent / "results" / "cpu" / "viewer.json"
NUM_LAYERS = 80
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 2.0
GESTURE = """async ([act, seconds]) => {
  const stage = stages.find((s) => s.section === 1 && s.phase === 0);
  const view = stage.views[0];
  const start = performance.now();
  let frames = 0, worst = 0, last = start, direction = 1;
  for (;;) {
    const now = await new Promise(requestAnimationFrame);
    if (frames++) worst = Math.max(worst, now - last);
    last = now;
    if (now - start > seconds * 1000) return [frames / ((now - start) / 1000), worst];
    if (act === "pan") {
      if (view.scrollTop + view.clientHeight >= view.scrollHeight - 1) direction = -1;
      if (view.scrollTop <= 0) direction = 1;
      view.scrollTop += 12 * direction;
    } else {
      if (stage.scale > 1.4) direction = -1;
      if (stage.scale < 0.6) direction = 1;
      stage.zoom(direction > 0 ? 1.01 : 1 / 1.01);
    }
  }
}"""


def captured(folder: Path) -> tuple[PrecisionGraph, PrecisionGraph]:
    """(training, forward alone in BF16), read from ``folder`` or captured into it."""
    paths = {"jet": folder / "jet.json", "bf16": folder / "bf16.json"}
    for policy, path in paths.items():
        if not path.exists():
            _capture(policy).save(path)
    train, other = (PrecisionGraph.load(path) for path in paths.values())
    return train, other.restrict({k: i for k, i in other.outputs.items() if not k.startswith("grad.")})


def _capture(policy: str) -> PrecisionGraph:
    import jetgraph
    from benchmarks.compile import SIZES
    from jetgraph.trainer import capture_step
    from tests.core.small_models import random_model

    model = random_model("llama", layers=NUM_LAYERS, sizes=SIZES)
    jetgraph.compile(model, policy, provider="stock" if policy == "bf16" else "reference")
    return capture_step(model.jetgraph, backward=policy == "jet").graph


def differences(train: PrecisionGraph, infer: PrecisionGraph) -> list[Difference]:
    """One at every linear: its FPROP has other operands."""
    ends = []
    for graph in (train, infer):
        gemms = ((n.fqn, i) for i, n in enumerate(graph.nodes) if n.op == "gemm" and n.role.value == "FPROP")
        ends.append(dict(gemms))
    return [Difference(i, ends[1].get(fqn), "JG014", "expected f8e4m3; got bf16", fqn) for fqn, i in ends[0].items()]


def written(train: PrecisionGraph, infer: PrecisionGraph, path: Path) -> float:
    found, seconds = differences(train, infer), []
    for _ in range(3):
        start = time.process_time()
        text = render_html(train, infer, found, "80 layers")
        seconds.append(time.process_time() - start)
    path.write_text(text, encoding="utf-8")
    return median(seconds)


def browsed(path: Path, executable: str) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        paints, found = [], {"browser": browser.version}
        for attempt in range(5):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]")
            page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000)
            if attempt == 4:
                page.evaluate("sections[1].open = true; sections[1].scrollIntoView()")
                for detail, name in ((0, "boxes"), (1, "every op")):
                    page.evaluate(f"setDetail({detail})")
                    page.wait_for_timeout(500)
                    for act in ("pan", "zoom"):
                        found[f"{act}, {name}"] = page.evaluate(GESTURE, [act, SECONDS])
                        page.wait_for_timeout(400)
            page.close()
        browser.close()
    return found | {"paint": median(paints)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    parser.add_argument("--graphs", type=Path, help="a folder that keeps the captured graphs")
    arguments = parser.parse_args()
    executable = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if executable is None:
        sys.exit(f"no Chromium: none of {', '.join(BROWSERS)} is on PATH (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        kept = arguments.graphs or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        train, infer = captured(kept)
        page = Path(folder) / "page.html"
        seconds = written(train, infer, page)
        size = page.stat().st_size
        seen = browsed(page, executable)
    rows = [
        Row.fact("nodes of both graphs", len(train.nodes) + len(infer.nodes)),
        Row.below("written", seconds, "s", 5.0),
        Row.below("size", size / 1e6, "MB", 5.0),
        Row.below("first paint", seen["paint"], "s", 1.0),
    ]
    for name in ("pan, boxes", "zoom, boxes", "pan, every op", "zoom, every op"):
        rate, worst = seen[name]
        rows.append(Row.above(f"{name}, a layer open", rate, "frames/s", 50.0))
        rows.append(Row.fact(f"{name}: longest frame", worst, "ms"))
    where = f"cpu, {platform.machine()}, Chromium {seen['browser']} headless, software rendering"
    return report(rows, arguments.json, where)


if __name__ == "__main__":
    sys.exit(main())
