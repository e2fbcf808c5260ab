"""Draws docs/gallery: pages of four pairs of graphs, and pictures of them taken in a headless Chromium.

    make demo                                   # writes the SmolLM2 graphs that this reads
    .venv/bin/python examples/gallery.py        # about 6 minutes: captures a step at the width of Qwen3-8B

SmolLM2-135M under `jet`, and as people run it (BF16 training, FP8 rollout), from the folder of `make demo`; Qwen3 at
the width of its 8B model; stock vLLM as captured on an H200, against our training.  Pages go to out/gallery, pictures
to docs/gallery.
"""

from __future__ import annotations

import argparse
import gzip
import io
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from jetgraph.graph import PrecisionGraph
from jetgraph.verify import verify
from jetgraph.viz import from_faults, write_html, write_layer_svg, write_overview_svg

STOCK = Path("tests/data/stock_vllm")
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 16384,  # of 151936, and 4 layers of 36: what a machine without a GPU can hold
}
QWEN3_LAYERS = 4
COLOURS = 256
SCALE = 1.5


@dataclass(frozen=True)
class Shot:
    """One picture: what is done in which page before it is taken."""

    name: str
    page: str
    steps: str = ""
    size: tuple[int, int] = (1440, 900)
    dark: bool = False


OPEN_LAYERS = "sections[1].open = true; focusOn(1)"
FIRST_DIFFERENCE = "visit(0)"
SHOTS = (
    Shot("smollm2-overview", "smollm2"),
    Shot(
        "smollm2-layer",
        "smollm2",
        f"{OPEN_LAYERS}; selectBox(1, 0, 0, boxOf[1][0][0].get(home[0].get(gemm()).ordinal)[1])",
    ),
    Shot("smollm2-backward", "smollm2", "setPhase('backward')"),
    Shot("negative-overview", "negative"),
    Shot("negative-counterexample", "negative", FIRST_DIFFERENCE),
    Shot("negative-dark", "negative", FIRST_DIFFERENCE, dark=True),
    Shot("qwen3-8b-overview", "qwen3-8b", "setPhase('backward')"),
    Shot("qwen3-8b-layer", "qwen3-8b", OPEN_LAYERS),
    Shot("stock-vllm-overview", "stock-vllm"),
    Shot("stock-vllm-counterexample", "stock-vllm", f"setDetail(1); {FIRST_DIFFERENCE}"),
)
GEMM = "window.gemm = () => data.sides[0].op.findIndex((_, n) => op(0, n) === 'gemm');"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=Path, default=Path("out"), help="where `make demo` wrote its graphs")
    parser.add_argument("--pages", type=Path, default=Path("out/gallery"))
    parser.add_argument("--pictures", type=Path, default=Path("docs/gallery"))
    arguments = parser.parse_args()
    arguments.pages.mkdir(parents=True, exist_ok=True)
    pages = write_pages(arguments.graphs, arguments.pages, arguments.pictures)
    take(pages, arguments.pictures)
    return 0


def write_pages(graphs: Path, folder: Path, pictures: Path) -> dict[str, Path]:
    def demo(name: str) -> PrecisionGraph:
        if not (graphs / name).exists():
            sys.exit(f"{graphs / name} is not there: run `make demo` first, or name its folder with --graphs")
        return PrecisionGraph.load(graphs / name)

    jet = demo("train-jet.json"), demo("infer-jet.json")
    negative = demo("train-bf16-stock.json"), jet[1]
    qwen3 = (qwen3_8b(folder / "qwen3-8b.json"),)
    write_layer_svg(
        pictures / "smollm2-layer.svg", *jet, title="SmolLM2-135M, one of 30 equal layers: training and rollout"
    )
    write_layer_svg(pictures / "qwen3-8b-layer.svg", *qwen3, title="A layer of Qwen3 at the width of its 8B model")
    write_overview_svg(pictures / "qwen3-8b-overview.svg", *qwen3, title="Qwen3 at the width of its 8B model, 4 layers")
    return {
        "smollm2": page(folder, "smollm2", "SmolLM2-135M under jet", *jet),
        "negative": page(folder, "negative", "SmolLM2-135M as people run it: BF16 training, FP8 rollout", *negative),
        "qwen3-8b": page(folder, "qwen3-8b", "Qwen3 at the width of its 8B model, 4 of 36 layers", *qwen3),
        "stock-vllm": page(folder, "stock-vllm", "Stock vLLM, default settings, against training under jet", *stock()),
    }


def page(folder: Path, name: str, title: str, train: PrecisionGraph, infer: PrecisionGraph | None = None) -> Path:
    path = folder / f"{name}.html"
    if infer is None:
        return write_html(path, train, title=title)
    result = verify(train, infer)
    return write_html(path, train, infer, from_faults(result.faults), title, str(result.verdict))


def qwen3_8b(path: Path) -> PrecisionGraph:
    """One step of four layers of the right width, captured; read again if it is there."""
    if path.exists():
        return PrecisionGraph.load(path)
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    import jetgraph
    from jetgraph.trainer import capture_step

    torch.manual_seed(0)
    config = Qwen3Config(**QWEN3_8B, num_hidden_layers=QWEN3_LAYERS, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    jetgraph.compile(model, "jet")
    graph = capture_step(model.jetgraph, torch.arange(17)[None]).graph
    graph.save(path)
    return graph


def stock() -> tuple[PrecisionGraph, PrecisionGraph]:
    """What stock vLLM ran with its default settings, captured on an H200, and our training."""
    from jetgraph_vllm.lift_stock import lift_stock
    from jetgraph_vllm.stock_format import StockCapture

    train = PrecisionGraph.from_json(gzip.decompress((STOCK / "train_jet.json.gz").read_bytes()).decode())
    return train, lift_stock(StockCapture.load(STOCK / "default.json.gz"), train)


def take(pages: dict[str, Path], folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    executable = next(
        (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None
    )
    if executable is None:
        sys.exit("no Chromium on PATH (Debian: apt-get install chromium): the pages are written, the pictures are not")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for shot in SHOTS:
            size = {"width": shot.size[0], "height": shot.size[1]}
            theme = "dark" if shot.dark else "light"
            view = browser.new_page(viewport=size, color_scheme=theme, device_scale_factor=SCALE)
            view.goto(pages[shot.page].resolve().as_uri())
            view.wait_for_selector("html[data-ready]")
            view.evaluate(GEMM + shot.steps)
            view.wait_for_timeout(400)
            picture = Image.open(io.BytesIO(view.screenshot())).convert("RGB")
            with_few_colours(picture).save(folder / f"{shot.name}.png", optimize=True)
            view.close()
        browser.close()


def with_few_colours(picture: Image.Image) -> Image.Image:
    """A third of the bytes: the most frequent colours are kept exactly, shades of letters' edges go to the nearest."""
    counts = picture.getcolors(picture.width * picture.height) or []
    kept = [channel for _, colour in sorted(counts, reverse=True)[:COLOURS] for channel in colour]  # type: ignore[union-attr]
    palette = Image.new("P", (1, 1))
    palette.putpalette(kept)
    few = picture.quantize(palette=palette, dither=Image.Dither.NONE)
    ground = few.getpixel((0, 0))  # Pillow compares colours at 6 bits, which would make white grey
    table = few.getpalette() or []
    table[3 * ground : 3 * ground + 3] = picture.getpixel((0, 0))  # type: ignore[operator, call-overload]
    few.putpalette(table)
    return few


if __name__ == "__main__":
    sys.exit(main())
