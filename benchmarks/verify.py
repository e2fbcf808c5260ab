"""How fast `verify` is, without and with reading the files, up to a million edges:  python -m benchmarks.verify

Times are CPU seconds of one core (`time.process_time`), finder, evidence, certificate and checker together; each size
runs in a process of its own, which also gives its peak memory.  Sizes count the edges of both graphs: for each edge of
the rollout training has 3.2, as in 355,000 and 110,000.

The graphs are the tests' toy transformer (FP8 linears, rotary, GQA attention) with as many layers as it takes, and
backward nodes in training.  Exit status 1 if a figure misses its bar.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Row, report
from jetgraph.graph import Node, Phase, PrecisionGraph
from jetgraph.verify import Source, Verdict, verify
from tests.verify.toy_transformer import build

RESULTS = Path(__file__).parent / "results" / "cpu" / "verify.json"
TRAIN_PER_INFER = 355 / 110
SIZES = {"36 layers": 0, "10^4 edges": 10_000, "355,000 + 110,000 edges": 465_000, "10^6 edges": 1_000_000}


def stacked(side: str, num_layers: int) -> PrecisionGraph:
    """The toy transformer with many layers: its third layer repeated, which is faster than building each."""
    two, three = build(side, layers=2), build(side, layers=3)
    first = next(i for i, (a, b) in enumerate(zip(build(side, layers=1).nodes, two.nodes, strict=False)) if a != b)
    size = len(three.nodes) - len(two.nodes)
    start, end, extra = first + size, first + 2 * size, num_layers - 3

    def moved(node: Node, layer: int, offset: int) -> Node:
        attrs = tuple((k, _at(v, layer)) for k, v in node.attrs) if node.op == "parameter" else node.attrs
        inputs = tuple(i + offset if i >= first else i for i in node.inputs)
        return replace(node, inputs=inputs, attrs=attrs, fqn=_at(node.fqn, layer))

    nodes = list(three.nodes[:end])
    for layer in range(3, num_layers):
        nodes += [moved(node, layer, (layer - 2) * size) for node in three.nodes[start:end]]
    tail = [
        replace(n, inputs=tuple(i + extra * size if i >= start else i for i in n.inputs)) for n in three.nodes[end:]
    ]
    outputs = {k: i + extra * size if i >= end else i for k, i in three.outputs.items()}
    for layer in range(3, num_layers):
        outputs |= {f"{kv}.{layer}": three.outputs[f"{kv}.2"] + (layer - 2) * size for kv in "kv"}
    meta = dict(three.meta)
    for key in ("parameters", "operands", "scope"):
        copies = {_at(k, n): v for k, v in meta[key].items() if ".layers.2." in k for n in range(3, num_layers)}
        meta[key] = {**meta[key], **copies}
    return PrecisionGraph(three.name, (*nodes, *tail), outputs, meta)


def _at(text: Any, layer: int) -> Any:
    """A path of the third layer, or of the norm that comes after it, as it is for another layer."""
    return re.sub(r"\.layers\.([23])(?=\.|$)", lambda match: f".layers.{int(match[1]) + layer - 2}", text)


def with_backward(graph: PrecisionGraph, num_edges: int) -> PrecisionGraph:
    """Products of gradients and forward values appended until the graph has ``num_edges`` edges."""
    forward, nodes = len(graph.nodes), list(graph.nodes)
    product = next(node for node in nodes if node.op == "mul")
    product = replace(product, role=product.role, phase=Phase.BACKWARD, fqn="backward")
    for i in range((num_edges - graph.num_edges) // 2):
        nodes.append(replace(product, inputs=(len(nodes) - 1, (7 * i) % forward)))
    return PrecisionGraph(graph.name, tuple(nodes), {**graph.outputs, "grad.x": len(nodes) - 1}, graph.meta)


def pair(num_edges: int) -> tuple[PrecisionGraph, PrecisionGraph]:
    """Training and rollout of ``num_edges`` edges together; 36 layers for 0."""
    per_layer = stacked("infer", 4).num_edges - build("infer", layers=3).num_edges
    layers = round(num_edges / (1 + TRAIN_PER_INFER) / per_layer) if num_edges else 36
    infer = stacked("infer", layers)
    return with_backward(stacked("train", layers), round(infer.num_edges * TRAIN_PER_INFER)), infer


def measure(num_edges: int, repeats: int) -> dict[str, float]:
    """Median CPU seconds of reading and of verifying one pair, its edges, and this process's peak memory in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        files = [
            graph.save(Path(folder, side)) for side, graph in zip(("train", "infer"), pair(num_edges), strict=True)
        ]
        program = [sys.executable, "-m", "benchmarks.verify", "--measure", *map(str, files), str(repeats)]
        return json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


def measure_files(train: str, infer: str, repeats: str) -> dict[str, float]:
    reading, verifying = [], []
    for _ in range(int(repeats)):
        start = time.process_time()
        sources = Source.load(train, "train"), Source.load(infer, "infer")
        middle = time.process_time()
        result = verify(*sources)
        reading.append(middle - start)
        verifying.append(time.process_time() - middle)
        assert result.verdict is Verdict.CONTAINED, result.text()
        assert result.certificate is not None
    edges = sum(source.graph.num_edges for source in sources)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"edges": edges, "read": median(reading), "verify": median(verifying), "peak": peak}


def rows(measured: dict[str, dict[str, float]]) -> list[Row]:
    bars = {"36 layers": 1.0, "355,000 + 110,000 edges": 3.0, "10^6 edges": 10.0}
    table = []
    for name, m in measured.items():
        table.append(Row.fact(f"{name}: edges", m["edges"]))
        for what, seconds in (("verify", m["verify"]), ("read and verify", m["read"] + m["verify"])):
            metric = f"{name}: {what}"
            table.append(
                Row.below(metric, seconds, "s", bars[name]) if name in bars else Row.fact(metric, seconds, "s")
            )
        table.append(Row.fact(f"{name}: per edge", 1e6 * m["verify"] / m["edges"], "µs"))
    if {"10^4 edges", "10^6 edges"} <= set(measured):
        small, large = measured["10^4 edges"], measured["10^6 edges"]
        table.append(Row.below("10^6 edges: peak memory", large["peak"] / 1e9, "GB", 4.0))
        growth = (large["verify"] / large["edges"]) / (small["verify"] / small["edges"])
        table.append(Row.below("per edge, 10^6 beside 10^4", growth, "x", 2.5))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    parser.add_argument("--only", choices=list(SIZES), action="append", help="a size; all of them by default")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_files(*arguments.measure)))
        return 0
    repeats = {"36 layers": 9, "10^4 edges": 9}
    sizes = arguments.only or list(SIZES)
    measured = {name: measure(SIZES[name], repeats.get(name, 1)) for name in sizes}
    return report(rows(measured), arguments.json, f"cpu, {platform.machine()}, one core")


if __name__ == "__main__":
    sys.exit(main())
