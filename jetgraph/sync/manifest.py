"""What trainer and engine compare: every tensor of one weight version by name, format and digest.  No torch in here.

Names are the checkpoint's.  An FP8 weight is two tensors, its codes ``X.weight`` and their dequantising scales
``X.weight_scale_inv``; neither is of use without the other, so a manifest that has one has both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from jetgraph import typed_json

SCALE_SUFFIX = "_scale_inv"
CODES = "float8_e4m3fn"


class SyncRefused(ValueError):
    """A weight update was not taken; the engine serves the weights it had.  Names the tensor and what to do."""


class WeightsLost(RuntimeError):
    """The engine's weights are not those of any version: it must not generate before a complete update."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: torch's name of its dtype, shape, `jetgraph.digest.tensor_digest`, and its precision λ as printed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    precision: str


@dataclass(frozen=True)
class Manifest:
    """All tensors of one version.

    Raises:
        SyncRefused: two tensors have one name, or FP8 codes have no scales, or scales no codes.
    """

    version: int
    policy: str
    specs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) != len(self.specs):
            names = [spec.name for spec in self.specs]
            twice = next(name for name in names if names.count(name) > 1)
            raise SyncRefused(f"{twice} is twice in the manifest of version {self.version}: one tensor has one value")
        check_pairs({name: spec.dtype for name, spec in self.tensors.items()}, self.version)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def digest(self) -> str:
        """sha256 over names, formats and digests in the order of the names; neither version nor order enters it."""
        rows = sorted((s.name, s.dtype, list(s.shape), s.digest, s.precision) for s in self.specs)
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    def to_plain(self) -> dict[str, Any]:
        return {"version": self.version, "policy": self.policy, "tensors": [asdict(spec) for spec in self.specs]}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Manifest:
        """
        Raises:
            ValueError, KeyError, TypeError: ``data`` is not what `to_plain` gave, through JSON.
        """
        version, policy = data["version"], data["policy"]
        if type(version) is not int or type(policy) is not str:
            raise TypeError(f"version {version!r:.40} and policy {policy!r:.40}: expected a whole number and a string")
        rows = enumerate(data["tensors"])
        specs = tuple(typed_json.from_plain(TensorSpec, row, f"tensors[{i}]") for i, row in rows)
        return cls(version, policy, specs)


def check_pairs(dtypes: dict[str, str], version: int) -> None:
    """Codes and scales come together.

    Raises:
        SyncRefused: one came alone; names it and what is missing.
    """
    for name, dtype in dtypes.items():
        scales = f"{name}{SCALE_SUFFIX}"
        if dtype == CODES and scales not in dtypes:
            raise SyncRefused(
                f"{name} of version {version} came without {scales}: FP8 codes mean nothing without their scales, send "
                "both in one update"
            )
        codes = name.removesuffix(SCALE_SUFFIX)
        if codes != name and dtypes.get(codes) != CODES:
            got = f"which is {dtypes[codes]}" if codes in dtypes else "which is missing"
            raise SyncRefused(
                f"{name} of version {version} came without FP8 codes {codes}, {got}: send both in one update"
            )


def some(names: Iterable[str], count: int = 3) -> str:
    """The first names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more
