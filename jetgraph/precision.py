"""How a tensor is represented: the values that label every edge of a precision graph.

`Precision` is the λ of docs/spec.md.  Each type here has one normal form, is hashable, prints itself and parses
what it prints.  Nothing in this module imports torch; kernels live in `jetgraph.lowering`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Format(str, Enum):
    """A number format.  Widening (bf16 → f32, i32 → i64) keeps every value, so only narrowing is ever a node."""

    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    I64 = "i64"
    E4M3 = "f8e4m3"
    E8M0 = "e8m0"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Granularity:
    """The block of a matrix [rows, cols] that shares one scale.  ``None`` means the whole axis.

    >>> str(Granularity.per_group(128)), str(Granularity.per_block(128, 128)), str(Granularity.per_tensor())
    ('1x128', '128x128', '*x*')
    >>> Granularity.per_block(128, 128).scale_shape((576, 1536))
    (5, 12)
    """

    rows: int | None
    cols: int | None

    def __post_init__(self) -> None:
        for axis in (self.rows, self.cols):
            if axis is not None and axis < 1:
                raise ValueError(f"granularity {self.rows}x{self.cols}: a block has at least one row and one column")

    @classmethod
    def per_tensor(cls) -> Granularity:
        return cls(None, None)

    @classmethod
    def per_token(cls) -> Granularity:
        return cls(1, None)

    @classmethod
    def per_group(cls, size: int) -> Granularity:
        """1 x size: groups along the features of one token (the contraction axis of FPROP and DGRAD)."""
        return cls(1, size)

    @classmethod
    def per_token_group(cls, size: int) -> Granularity:
        """size x 1: groups along the tokens of one feature (the contraction axis of WGRAD)."""
        return cls(size, 1)

    @classmethod
    def per_block(cls, rows: int, cols: int) -> Granularity:
        return cls(rows, cols)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scale grid of a matrix [rows, cols]; the last block of an axis may be ragged."""
        return tuple(1 if b is None else -(-n // b) for n, b in zip(shape, (self.rows, self.cols), strict=True))  # type: ignore[return-value]

    def __str__(self) -> str:
        return "x".join("*" if axis is None else str(axis) for axis in (self.rows, self.cols))

    @classmethod
    def parse(cls, text: str) -> Granularity:
        rows, cols = (None if axis == "*" else int(axis) for axis in text.split("x"))
        return cls(rows, cols)


class Division(str, Enum):
    """How a code is computed from a value.  The three differ in 0.05–0.12 % of codes on random BF16 data."""

    DIVIDE = "div"
    """code = x / scale, scale = amax / qmax"""
    RECIPROCAL_OF_SCALE = "mul1/s"
    """code = x * (1 / scale), scale = amax / qmax (DeepGEMM)"""
    RECIPROCAL_OF_AMAX = "mulq/a"
    """code = x * (qmax / amax), scale = amax / qmax (VeRL's weight sync)"""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ScaleRule:
    """The arithmetic that turns one block of values into one scale and its codes, all in FP32.

    amax  = max(|x|, amax_floor); a block with a non-finite value gets a NaN scale and NaN codes: loud, never hidden
    scale = amax / qmax, rounded up to a power of two if ``power_of_two``
    code  = e4m3(clamp(x ∘ scale, -qmax, qmax)), ∘ by ``division``, round to nearest even

    The rule is part of an edge's identity: libraries disagree on every field.
    """

    qmax: float = 448.0
    amax_floor: float = 1e-12
    division: Division = Division.DIVIDE
    power_of_two: bool = False

    def __str__(self) -> str:
        text = f"{self.division} qmax={self.qmax:g} floor={self.amax_floor:g}"
        return text + (" pow2" if self.power_of_two else "")

    @classmethod
    def parse(cls, text: str) -> ScaleRule:
        division, qmax, floor, *pow2 = text.split()
        return cls(float(qmax[5:]), float(floor[6:]), Division(division), pow2 == ["pow2"])


@dataclass(frozen=True)
class Scale:
    """The scales that go with FP8 codes: x ≈ code * scale ("scale" is always the dequantising multiplier)."""

    granularity: Granularity
    rule: ScaleRule = ScaleRule()
    format: Format = Format.F32
    dynamic: bool = True

    def __str__(self) -> str:
        return f"{self.granularity} {self.format} {'dyn' if self.dynamic else 'static'} {self.rule}"

    @classmethod
    def parse(cls, text: str) -> Scale:
        granularity, fmt, mode, rule = text.split(" ", 3)
        return cls(Granularity.parse(granularity), ScaleRule.parse(rule), Format(fmt), mode == "dyn")


@dataclass(frozen=True)
class Precision:
    """λ: a format, and for quantised tensors how their scales are laid out and computed.

    >>> str(Precision(Format.BF16))
    'bf16'
    >>> p = Precision(Format.E4M3, Scale(Granularity.per_group(128)))
    >>> str(p), p.short()
    ('f8e4m3[1x128 f32 dyn div qmax=448 floor=1e-12]', 'f8e4m3[1x128]')
    >>> Precision.parse(str(p)) == p
    True
    """

    format: Format
    scale: Scale | None = None

    def __str__(self) -> str:
        return str(self.format) if self.scale is None else f"{self.format}[{self.scale}]"

    def short(self) -> str:
        """Format and granularity only, for tables and pictures."""
        return str(self.format) if self.scale is None else f"{self.format}[{self.scale.granularity}]"

    @classmethod
    def parse(cls, text: str) -> Precision:
        match = re.fullmatch(r"(\w+)(?:\[(.+)\])?", text)
        if match is None:
            raise ValueError(f"precision {text!r}: expected a format such as bf16 or f8e4m3[1x128 f32 dyn …]")
        return cls(Format(match[1]), Scale.parse(match[2]) if match[2] else None)


BF16 = Precision(Format.BF16)
F32 = Precision(Format.F32)
I64 = Precision(Format.I64)
