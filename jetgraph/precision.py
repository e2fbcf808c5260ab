"""How a tensor is represented: the values that label every edge of a precision graph.

`Precision` is the λ of docs/spec.md.  Each type here has one normal form, is hashable, prints itself and parses
what it prints.  Nothing in this module imports torch; kernels live in `jetgraph.lowering`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

E4M3_MAX = 448.0
F32_TINY = 2.0**-126
"""FP32's smallest normal number."""


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
        match = re.fullmatch(r"(\*|[1-9]\d*)x(\*|[1-9]\d*)", text)
        if match is None:
            raise ValueError(f"granularity {text!r}: expected rows x columns, such as 1x128 or *x*")
        rows, cols = (None if axis == "*" else int(axis) for axis in match.groups())
        return cls(rows, cols)


class Division(str, Enum):
    """How a code is computed from a value.  The three differ in 0.05–0.12 % of codes on random BF16 data."""

    DIVIDE = "div"
    """code = x / scale, scale = amax / qmax"""
    RECIPROCAL_OF_SCALE = "mul1/s"
    """code = x * (1 / scale), scale = amax / qmax (DeepGEMM)"""
    RECIPROCAL_OF_AMAX = "mulq/a"
    """code = x * (qmax * (1 / amax)), scale = amax / qmax (VeRL's sync: torch's number / tensor)"""

    def __str__(self) -> str:
        return self.value


def _number(value: float) -> str:
    """The shortest text that parses back to the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


@dataclass(frozen=True)
class ScaleRule:
    """The arithmetic that turns one block of values into one scale and its codes, all in FP32.

    amax  = max(|x|, amax_floor); a block with a non-finite value gets a NaN scale and NaN codes: loud, never hidden
    scale = amax / qmax, rounded up to a power of two if ``power_of_two``
    code  = e4m3(clamp(x ∘ scale, -qmax, qmax)), ∘ by ``division`` (which is exact, hence one and the same, for a power
            of two), round to nearest even

    The rule is part of an edge's identity: libraries disagree on every field.

    Raises:
        ValueError: ``qmax`` is not in [2, 448] (scales may overflow FP32, codes e4m3), or ``amax_floor`` / ``qmax`` is
            below FP32's smallest normal number, so that the scale of a block of zeros could be 0 and its codes NaN.
    """

    qmax: float = E4M3_MAX
    amax_floor: float = 1e-12
    division: Division = Division.DIVIDE
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.qmax <= E4M3_MAX:
            raise ValueError(f"qmax {self.qmax:g}: expected a number from 2 to {E4M3_MAX:g}, the largest of e4m3")
        if not self.amax_floor / self.qmax >= F32_TINY or self.amax_floor == float("inf"):
            raise ValueError(
                f"amax_floor {self.amax_floor:g}: expected a finite number of at least {F32_TINY * self.qmax:.3g}, or "
                "a block of zeros has no finite, positive scale"
            )

    def __str__(self) -> str:
        text = f"{self.division} qmax={_number(self.qmax)} floor={_number(self.amax_floor)}"
        return text + (" pow2" if self.power_of_two else "")

    @classmethod
    def parse(cls, text: str) -> ScaleRule:
        match = re.fullmatch(r"(\S+) qmax=(\S+) floor=(\S+?)( pow2)?", text)
        if match is None:
            raise ValueError(f"scale rule {text!r}: expected e.g. div qmax=448 floor=1e-12, and perhaps pow2")
        return cls(float(match[2]), float(match[3]), Division(match[1]), match[4] is not None)


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
        match = re.fullmatch(r"(\S+) (\S+) (dyn|static) (.+)", text)
        if match is None:
            raise ValueError(f"scale {text!r}: expected e.g. 1x128 f32 dyn div qmax=448 floor=1e-12")
        return cls(Granularity.parse(match[1]), ScaleRule.parse(match[4]), Format(match[2]), match[3] == "dyn")


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
        return self._text

    @cached_property
    def _text(self) -> str:
        """Printed once: a graph's nodes share few precisions, and digests and tables are keyed by their print."""
        return str(self.format) if self.scale is None else f"{self.format}[{self.scale}]"

    def short(self) -> str:
        """Format and granularity only, for tables and pictures."""
        return str(self.format) if self.scale is None else f"{self.format}[{self.scale.granularity}]"

    @classmethod
    def parse(cls, text: str) -> Precision:
        match = re.fullmatch(r"(\w+)(?:\[(.+)\])?", text)
        if match is None:
            raise ValueError(f"precision {text!r}: expected a format such as bf16 or f8e4m3[1x128 f32 dyn …]")
        parsed = cls(Format(match[1]), Scale.parse(match[2]) if match[2] else None)
        if str(parsed) != text:
            raise ValueError(f"precision {text!r} is not in normal form: expected {parsed}")
        return parsed


BF16 = Precision(Format.BF16)
F32 = Precision(Format.F32)
I64 = Precision(Format.I64)
