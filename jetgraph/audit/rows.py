"""One row a layer, and the facts in it.  A fact that could not be read is `UNKNOWN`, never a guess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import NamedTuple

from jetgraph.precision import Precision

UNKNOWN = "?"
TRAINING = "training's"
"""The arithmetic of a layer whose formula and roundings are Hugging Face's, as training runs them."""


class Role(str, Enum):
    LINEAR = "linear"
    HEAD = "head"
    EMBEDDING = "embedding"
    NORM = "norm"
    ACTIVATION = "activation"
    ROTARY = "rotary"
    ATTENTION = "attention"

    def __str__(self) -> str:
        return self.value


class Fact(NamedTuple):
    """One statement about one layer: of ``operand`` (weight, activation, kv cache, result), ``field`` is ``value``."""

    layer: str
    operand: str
    field: str
    value: str


@dataclass(frozen=True)
class Quantiser:
    """A precision λ taken apart, each part readable or not; for BF16 only ``format`` is there.

    >>> from jetgraph.precision import BF16, Precision
    >>> str(Quantiser.of(BF16)), str(Quantiser("f8e4m3", "128x128", "f32"))
    ('bf16', 'f8e4m3[128x128 f32 ? ? qmax=? floor=? pow2=?]')
    """

    format: str
    granularity: str = UNKNOWN
    scale: str = UNKNOWN
    dynamic: str = UNKNOWN
    division: str = UNKNOWN
    qmax: str = UNKNOWN
    floor: str = UNKNOWN
    power_of_two: str = UNKNOWN

    @classmethod
    def of(cls, precision: Precision) -> Quantiser:
        scale = precision.scale
        if scale is None:
            return cls(str(precision.format))
        rule = scale.rule
        return cls(
            str(precision.format),
            str(scale.granularity),
            str(scale.format),
            "dynamic" if scale.dynamic else "static",
            "exact" if rule.power_of_two else str(rule.division),
            f"{rule.qmax:g}",
            f"{rule.amax_floor:g}",
            "yes" if rule.power_of_two else "no",
        )

    @property
    def quantised(self) -> bool:
        return self.format not in ("bf16", "f16", "f32")

    def parts(self) -> dict[str, str]:
        """Field → value; of an unquantised tensor its format alone."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return named if self.quantised else {"format": self.format}

    def __str__(self) -> str:
        if not self.quantised:
            return self.format
        return (
            f"{self.format}[{self.granularity} {self.scale} {self.dynamic} {self.division} qmax={self.qmax} "
            f"floor={self.floor} pow2={self.power_of_two}]"
        )


@dataclass(frozen=True)
class Row:
    """One layer as loaded: a part of a merged linear has a row of its own, under its checkpoint name.

    ``layout`` is how codes and scales lie in memory; ``kernel`` what runs it; ``stored`` whether the bytes are those of
    the checkpoint; ``source`` how the activation's precision is known, if not from the live method itself.
    """

    name: str
    role: Role
    module: str
    kernel: str
    weight: Quantiser | None = None
    activation: Quantiser | None = None
    kv_cache: str = ""
    arithmetic: str = ""
    layout: str = ""
    stored: str = ""
    source: str = ""

    def facts(self) -> Iterator[Fact]:
        for operand, quantiser in (("weight", self.weight), ("activation", self.activation)):
            if quantiser is not None:
                yield from (Fact(self.name, operand, field, value) for field, value in quantiser.parts().items())
        if self.kv_cache:
            yield Fact(self.name, "kv cache", "format", self.kv_cache)
        if self.arithmetic:
            yield Fact(self.name, "result", "arithmetic", self.arithmetic)

    def to_plain(self) -> dict[str, object]:
        return {**asdict(self), "role": str(self.role)}

    @classmethod
    def from_plain(cls, data: dict) -> Row:
        operands = {k: data[k] and Quantiser(**data[k]) for k in ("weight", "activation")}
        return cls(**{**data, **operands, "role": Role(data["role"])})
