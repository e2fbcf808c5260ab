"""Measured BF16/BF16 pairs, stored: what two BF16 stacks differ by, where one's own first steps are not at hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jetgraph.mismatch.alarms import Limit, limits_from_baseline
from jetgraph.mismatch.report import Mismatch


@dataclass(frozen=True)
class Baseline:
    """Some batches of one pair, and where they were measured; ``versions`` by library."""

    name: str
    model: str
    trainer: str
    engine: str
    device: str
    versions: dict[str, str]
    batches: tuple[Mismatch, ...]

    def limits(self) -> tuple[Limit, ...]:
        """Of `limits_from_baseline`.  They are of this model and device: larger models differ by less."""
        return limits_from_baseline(self.batches, source=f"the stored baseline {self.name}")

    def save(self, path: str | Path) -> None:
        plain = dataclasses.asdict(self) | {"batches": [m.to_plain() for m in self.batches]}
        Path(path).write_text(json.dumps(plain, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Baseline:
        return cls.parse(Path(path).read_text())

    @classmethod
    def parse(cls, text: str) -> Baseline:
        plain = json.loads(text)
        return cls(**plain | {"batches": tuple(Mismatch.from_plain(m) for m in plain["batches"])})


def stored_baselines() -> Sequence[str]:
    """Names that `stored_baseline` takes."""
    folder = resources.files("jetgraph.mismatch") / "measured"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def stored_baseline(name: str) -> Baseline:
    """One of the baselines that come with the package.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in stored_baselines():
        raise ValueError(f"no stored baseline {name!r}; there are: {', '.join(stored_baselines())}")
    return Baseline.parse((resources.files("jetgraph.mismatch") / "measured" / f"{name}.json").read_text())
