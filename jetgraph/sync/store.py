"""What an engine integration provides to weight sync, and what it gets back: the live tensors, and two reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from jetgraph.sync.manifest import WeightsLost, some


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor lives: a view of the engine's own storage, and the precision it is read with."""

    name: str
    live: Tensor
    precision: str

    @property
    def dtype(self) -> str:
        return str(self.live.dtype).removeprefix("torch.")


class WeightStore(Protocol):
    """The live weights of one engine.

    ``slots`` by checkpoint name; ``aliases`` gives the slot of further names (a tied head).  `stop` is called when all
    checks passed: it makes sure that no step is running and that no KV entry of the old version can be read again, or
    raises `SyncRefused`.  `refresh` renews what the engine derived from weights; it is called after each flip, also
    one that takes a flip back.
    """

    slots: Mapping[str, Slot]
    aliases: Mapping[str, str]

    def stop(self) -> None: ...
    def refresh(self) -> None: ...


@dataclass(frozen=True)
class CommitReport:
    """What one update did.  ``changed`` counts elements that differ from the version before, by dtype: (changed, all).

    ``stall_seconds`` is how long the engine could not step: stop, write, read back, refresh.  Staging, digests and
    these counts lie outside of it.
    """

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    stall_seconds: float
    changed: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class ValueReport:
    """The engine's bytes as they are now, read again: digest and address of every tensor.

    ``differing`` lists tensors whose digest is not the manifest's, ``moved`` those whose address is not the first one.
    """

    version: int
    manifest: str
    digests: dict[str, str]
    addresses: dict[str, int]
    differing: tuple[str, ...]
    moved: tuple[str, ...]

    def require(self) -> ValueReport:
        """This report, if every byte is that of its version, where it always was.

        Raises:
            WeightsLost: it is not; names the tensors.
        """
        if self.differing:
            raise WeightsLost(
                f"{some(self.differing)}: not the bytes of version {self.version} any more; something else wrote them, "
                "sync again before generating"
            )
        if self.moved:
            raise WeightsLost(f"{some(self.moved)}: moved in memory; CUDA graphs read the old address, restart")
        return self
