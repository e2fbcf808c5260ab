"""Which settings of stock vLLM are contained in which training: ``python -m jetgraph_vllm.judge_stock FOLDER``.

FOLDER holds captures (``NAME.json[.gz]``, by `jetgraph_vllm.stock_capture`) and training graphs
(``train_NAME.json[.gz]``).  Every capture is lifted and verified against every training; printed are the rules that
each pair breaks and, for the nearest training of each capture, what is left between them.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from jetgraph.graph import PrecisionGraph
from jetgraph.verify import Result, Severity, verify
from jetgraph_vllm.lift_stock import lift_stock
from jetgraph_vllm.stock_format import StockCapture

_NAME = re.compile(r"model\.\S+")


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    trainings = read_trainings(folder)
    captures = [StockCapture.load(p) for p in sorted(folder.glob("*.json*")) if not p.name.startswith("train_")]
    print(report({c.label: (c, judge(c, trainings)) for c in captures}, trainings))
    return 0


def read_trainings(folder: Path) -> dict[str, PrecisionGraph]:
    found = {}
    for path in sorted(folder.glob("train_*.json*")):
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        found[path.name.removeprefix("train_").split(".")[0]] = PrecisionGraph.from_json(text)
    return found


def judge(capture: StockCapture, trainings: Mapping[str, PrecisionGraph]) -> dict[str, Result]:
    """The verdict against each training, the engine meant to follow that training's policy."""
    found = {}
    for name, train in trainings.items():
        found[name] = verify(train, lift_stock(capture, train))
    return found


def report(judged: Mapping[str, tuple[StockCapture, Mapping[str, Result]]], trainings: Iterable[str]) -> str:
    lines = [f"{'stock vLLM':32} " + " ".join(f"{name:>22}" for name in trainings)]
    for label, (_, results) in judged.items():
        lines.append(f"{label:32} " + " ".join(f"{_short(r):>22}" for r in results.values()))
    for label, (capture, results) in judged.items():
        nearest = min(results, key=lambda name: _distance(results[name]))
        lines += ["", f"{label} ({_settings(capture)}): nearest training {nearest}, {results[nearest].verdict}"]
        lines += [f"    {line}" for line in _left(results[nearest])]
    return "\n".join(lines)


def _distance(result: Result) -> tuple[int, int]:
    violations = sum(f.severity is Severity.VIOLATION for f in result.faults)
    return violations, len(result.faults)


def _short(result: Result) -> str:
    return f"{result.verdict} {_distance(result)[0]}"


def _left(result: Result) -> list[str]:
    """Faults by rule and words; names of modules are left out, so that equal faults of all layers are one line."""
    counts = Counter((f.rule, _NAME.sub("…", f.expected), _NAME.sub("…", f.got)) for f in result.faults)
    return [f"{rule} ×{n}: expected {expected}, got {got}" for (rule, expected, got), n in counts.most_common()]


def _settings(capture: StockCapture) -> str:
    s = capture.settings
    fused = [k for k in ("fuse_norm_quant", "fuse_act_quant") if s["pass_config"].get(k) and s["mode"] == 3]
    e8m0 = s["environment"].get("VLLM_USE_DEEP_GEMM_E8M0", "1")
    kernel = {m["kernel"] for m in capture.linears.values() if m["kernel"]}
    return ", ".join(
        [
            f"mode {s['mode']}",
            f"custom_ops {' '.join(dict.fromkeys(s['custom_ops']))}",
            "fused: " + (" ".join(fused) or "none"),
            f"VLLM_USE_DEEP_GEMM_E8M0={e8m0}",
            *sorted(kernel),
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
