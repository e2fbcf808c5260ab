"""The facts of one linear as plain data, read from the live module or from a stored capture.

A tensor shows its dtype, shape and strides; its scales show their grid and whether all are powers of two; its codes
show the largest one.  What these say of the precision is `jetgraph_vllm.audit_precision`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetgraph.precision import Division, Format, Granularity, Precision, Scale, ScaleRule
from jetgraph_vllm.collect import linear_parts


@dataclass(frozen=True)
class LinearFacts:
    """One checkpoint part of one linear, as plain data; None where a value could not be read."""

    name: str
    module: str
    method: str
    kernel: str
    weight: tuple[tuple[int, ...], str, tuple[int, ...] | None]
    """Of the part, or of the whole packed tensor: shape, dtype, strides."""
    scales: tuple[tuple[int, ...], str, tuple[int, ...] | None] | None = None
    block: tuple[int, int] | None = None
    packed: bool = False
    powers_of_two: bool | None = None
    largest_code: float | None = None
    quantiser: tuple[str, bool, bool] | None = None
    """The kernel's own activation quantiser: granularity, static, powers of two."""
    changed: bool | None = None
    """Are stored codes other than the checkpoint's?"""
    declared: tuple[str, str] | None = None
    """(activation, weight) λ by which our methods run, read from the live method."""


# ------------------------------------------------------------------------------------------------------ live modules


def read_linears(model: torch.nn.Module) -> list[LinearFacts]:
    modules = dict(model.named_modules())
    return [
        facts for fqn, parts in linear_parts(model).items() for facts in _parts(fqn, modules[fqn], parts)
    ]  # fmt: skip


def _parts(fqn: str, module: torch.nn.Module, parts: list[Any]) -> Iterator[LinearFacts]:
    method = module.quant_method
    kernel = getattr(method, "fp8_linear", None) or getattr(method, "kernel", None)
    weight = getattr(module, "weight", None)
    scales = next(
        (s for n in ("weight_scale_inv", "weight_scale") if (s := getattr(module, n, None)) is not None), None
    )
    block = tuple(getattr(module, "weight_block_size", None) or ()) or _declared_block(method)
    num_rows = parts[-1].rows[1]
    packed = weight is None or weight.ndim != 2 or weight.shape[0] != num_rows
    scale_row = 0
    for part in parts:
        own_weight, own_scales = weight, scales
        if not packed:
            own_weight = weight.data[slice(*part.rows)]
            if scales is not None and scales.ndim == 2 and block:
                rows = -(-(part.rows[1] - part.rows[0]) // block[0])
                own_scales, scale_row = scales.data[scale_row : scale_row + rows], scale_row + rows
        yield LinearFacts(
            part.name,
            fqn,
            type(method).__name__,
            type(kernel).__name__ if kernel is not None else _handle(module, method),
            _described(own_weight, packed, module),
            None if own_scales is None else _described(own_scales),
            block or None,
            packed,
            _powers_of_two(own_scales) if own_scales is not None else None,
            None if packed else _largest_code(own_weight),
            _activation_quantiser(kernel),
            None,
            _declared(method),
        )


def _declared_block(method: Any) -> tuple[int, ...]:
    return (method.block_rows, method.group) if hasattr(method, "block_rows") else ()


def _handle(module: Any, method: Any) -> str:
    """On the CPU stock methods leave the product to a function of the layer: torch's own, or one of a packed copy."""
    handle = getattr(module, "cpu_linear", None)
    if handle is None:
        return type(method).__name__
    held = getattr(getattr(handle, "__code__", None), "co_freevars", ())
    return f"packed copy ({', '.join(held)})" if held else "torch.nn.functional.linear"


def _described(tensor: Tensor | None, packed: bool = False, module: Any = None) -> tuple[Any, str, Any]:
    if tensor is None or tensor.numel() == 0:  # vLLM dropped it: the kernel's handle holds what was packed
        return (), _short(getattr(module, "params_dtype", torch.bfloat16)), None
    return tuple(tensor.shape), _short(tensor.dtype), tuple(tensor.stride())


def _powers_of_two(scales: Tensor) -> bool | None:
    if not scales.is_floating_point() or not scales.numel():
        return None
    return bool((torch.frexp(scales.float())[0] == 0.5).all())


def _largest_code(codes: Tensor) -> float | None:
    """By bits without the sign, in which e4m3 numbers have their order; NaN is the largest."""
    if codes.dtype != torch.float8_e4m3fn:
        return None
    return float(codes.view(torch.uint8).bitwise_and(0x7F).max().view(torch.float8_e4m3fn).float())


def _activation_quantiser(kernel: Any) -> tuple[str, bool, bool] | None:
    quantiser = getattr(kernel, "quant_fp8", None)
    shape = getattr(quantiser, "group_shape", None)
    if shape is None:
        return None
    granularity = "x".join("*" if n == -1 else str(n) for n in (shape.row, shape.col))
    return granularity, bool(quantiser.static), bool(quantiser.use_ue8m0)


def _declared(method: Any) -> tuple[str, str] | None:
    weight = getattr(method, "weight_precision", None)
    if weight is None:
        return None
    if weight.scale is None:
        return str(weight), str(weight)
    rows, cols, qmax, floor, division, power_of_two = method.activation_arguments  # what `apply` passes to its operator
    rule = ScaleRule(qmax, floor, Division(division), power_of_two)
    return str(Precision(Format.E4M3, Scale(Granularity(rows or None, cols or None), rule))), str(weight)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ----------------------------------------------------------------------------------------------------- stored captures


def captured_linears(linears: Mapping[str, Mapping[str, Any]]) -> list[LinearFacts]:
    """From the ``linears`` of a `jetgraph_vllm.stock_format.StockCapture`: real facts of engines on an H200."""
    found = []
    for fqn, module in linears.items():
        shape, dtype = module["weight"]
        scales = module["scales"] and (
            tuple(module["scales"][0]),
            _bare(module["scales"][1]),
            tuple(module["scales"][2]),
        )
        for part in module["parts"]:
            packed = "digest" not in part
            rows = part["rows"][1] - part["rows"][0]
            facts = LinearFacts(
                part["name"],
                fqn,
                module["method"],
                module["kernel"],
                ((tuple(shape) if packed else (rows, shape[1])), _bare(dtype), None),
                scales,
                tuple(module["block"]) or None,
                packed,
                part.get("powers_of_two"),
                changed=bool(part["codes_changed"]) if "codes_changed" in part else None,
            )
            found.append(facts)
    return found


def _bare(dtype: str) -> str:
    return dtype.removeprefix("torch.")
