"""A trainer and an engine on one device, captured and verified:  python -m benchmarks.jobs.pair MODEL WORK OUT

`jetgraph verify MODEL --trainer jet --engine ENGINE`, with a K/V cache of a few megabytes where the command's engine
takes the GPU.  WORK gets the exported checkpoint; OUT train.json, infer.json, report.txt and, if it is contained,
certificate.json, checked once more.  The exit status is `jetgraph verify`'s: 0 contained, 1 violated, 3 unknown.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch

from benchmarks.arms import cache_options
from jetgraph.pair import verify_model
from jetgraph.verify import checker

TOKENS = 2048
"""That the engine's cache holds; a capture needs a few dozen."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--policy", default="jet")
    parser.add_argument("--engine", default="vllm", help="vllm: our plugin; vllm-stock: training follows it")
    options = parser.parse_args()
    device, cache = "cpu", {}
    if torch.cuda.is_available():
        device, cache = "cuda", cache_options(options.model, TOKENS)
    result = verify_model(options.model, options.policy, options.engine, options.work, device=device, options=cache)
    print(result.text(), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.txt").write_text(result.text() + "\n")
    graphs = [shutil.copy(options.work / name, options.out) for name in ("train.json", "infer.json")]
    if result.certificate is None:
        return result.exit_status
    certificate = options.out / "certificate.json"
    result.certificate.save(certificate)
    return result.exit_status or checker.main([str(certificate), *map(str, graphs)])


if __name__ == "__main__":
    sys.exit(main())
