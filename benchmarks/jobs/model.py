"""Random BF16 model folders and their export, made once:  python -m benchmarks.jobs.model FOLDER LAYERS [--tiny]

Writes FOLDER/bf16-LAYERS, of Qwen3-8B's sizes, and FOLDER/jet-LAYERS, what `jetgraph export` makes of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.arms import write_model
from jetgraph.export import export_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("layers", type=int)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = write_model(options.folder / f"bf16-{options.layers}", options.layers, tiny=options.tiny, device=device)
    exported = options.folder / f"jet-{options.layers}"
    if not (exported / "config.json").is_file():
        export_checkpoint(model, exported, "jet", device=device)


if __name__ == "__main__":
    main()
