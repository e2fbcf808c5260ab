"""An audit as a value: its table folded over equal layers, its differences, JSON, and an exit status."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jetgraph.audit.compare import Difference
from jetgraph.audit.rows import Quantiser, Row
from jetgraph.viz.layers import layer_of, relative, spans


@dataclass(frozen=True)
class Audit:
    """``policy`` is the name of the one compared with, or empty; ``settings`` what the engine was configured with."""

    engine: str
    rows: tuple[Row, ...]
    settings: dict[str, Any]
    policy: str = ""
    differences: tuple[Difference, ...] = ()

    @property
    def equal(self) -> bool:
        return bool(self.policy) and not self.differences

    @property
    def exit_status(self) -> int:
        """0 equal (or nothing to compare with), 1 different, 3 nothing differs but something could not be read."""
        if all(difference.unknown for difference in self.differences):
            return 3 if self.differences else 0
        return 1

    def to_plain(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "policy": self.policy,
            "equal": self.equal if self.policy else None,
            "differences": [{**asdict(d), "unknown": d.unknown} for d in self.differences],
            "rows": [row.to_plain() for row in self.rows],
            "settings": self.settings,
        }

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Audit:
        differences = tuple(
            Difference(**{k: v for k, v in d.items() if k not in ("unknown", "layers")}, layers=tuple(d["layers"]))
            for d in data["differences"]
        )
        rows = tuple(Row.from_plain(row) for row in data["rows"])
        return cls(data["engine"], rows, data["settings"], data["policy"], differences)

    def view(self) -> Group:
        """What `jetgraph audit` prints: formats and kernels, what FP8 a, b … mean, memory, and the differences."""
        legend: dict[str, str] = {}
        formats, memory = _table("layer", "weight", "activation", "kernel"), _table("layer", "what else is known")
        for row, name in fold(self.rows):
            _add(formats, name, _brief(row.weight, legend), _brief(row.activation, legend), row.kernel)
            known = (row.layout, row.stored, row.kv_cache and f"KV cache {row.kv_cache}", row.source,
                     row.arithmetic and f"arithmetic: {row.arithmetic}")  # fmt: skip
            _add(memory, name, "; ".join(filter(None, known)))
        lines = [f"{letter} = {text}" for text, letter in legend.items()]
        parts: list[RenderableType] = [Text(f"{self.engine}: {len(self.rows)} layers", style="bold"), formats]
        parts += [Text("\n".join(["", *lines, ""])), memory]
        if self.policy:
            parts.append(Text(f"\n{self.verdict()}", style="bold"))
        for d in self.differences:
            parts.append(Text(f"{d.operand} {d.field}: the policy says {d.expected}, the engine has {d.got}"))
            parts.append(Padding(Text(f"in {fold_names(d.layers)}"), (0, 0, 0, 4)))
            parts.append(Padding(Text(f"to remove it: {d.remedy or 'no setting is known'}"), (0, 0, 0, 4)))
        return Group(*parts)

    def verdict(self) -> str:
        if self.equal:
            return f"equal to policy {self.policy} as a set of facts ({sum(1 for r in self.rows for _ in r.facts())})"
        different = sum(not d.unknown for d in self.differences)
        unknown = len(self.differences) - different
        return f"not equal to policy {self.policy}: {different} different, {unknown} that could not be read"


def fold(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """One row for equal layers, and the name that stands for all of them."""
    alike: dict[tuple[str, Row], list[str]] = {}
    for row in rows:
        same = replace(row, name="", module="", layout=row.layout)
        alike.setdefault((relative(row.name), same), []).append(row.name)
    return [(row, fold_names(names)) for (_, row), names in alike.items()]


def fold_names(names: Iterable[str]) -> str:
    """
    >>> fold_names(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"])
    'model.layers.0–1.mlp.up_proj; lm_head'
    >>> fold_names(["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"])
    'model.layers.0.{mlp.up_proj, mlp.down_proj}'
    """
    numbers: dict[str, list[int]] = {}
    for name in names:
        numbers.setdefault(relative(name), []).append(-1 if (i := layer_of(name)) is None else i)
    grouped: dict[str, list[str]] = {}
    for path, layers in numbers.items():
        stem, star, leaf = path.partition("*.")
        if star:
            grouped.setdefault(f"{stem}{spans(layers)}.", []).append(leaf)
        else:
            grouped.setdefault(path, [])
    folded = {
        stem: leaves[0] if len(leaves) == 1 else "{" + ", ".join(leaves) + "}" for stem, leaves in grouped.items()
    }
    return "; ".join(stem + leaves if grouped[stem] else stem for stem, leaves in folded.items())


def _braced(leaves: list[str]) -> str:
    return "".join(leaves) if len(leaves) < 2 else "{" + ", ".join(leaves) + "}"


def _brief(precision: Quantiser | None, legend: dict[str, str]) -> str:
    """A quantised precision by a letter that ``legend`` explains: few stand in many rows."""
    if precision is None or not precision.quantised:
        return str(precision or "")
    letter = legend.setdefault(str(precision), f"FP8 {chr(ord('a') + len(legend) % 26)}")
    return letter if precision.format == "f8e4m3" else precision.format


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))
