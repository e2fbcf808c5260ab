"""Launch a Triton kernel without asking Triton each time which of its compiled forms is meant.

Triton binds and inspects every argument at every launch: a fifth of the host's time for a training step of a decoder
block, which makes 29 launches (cProfile on an H200 machine).  Here the compiled kernel is found by everything that
Triton specialises on: dtypes, alignment to 16 bytes, whether a number is 1, a multiple of 16 or needs 64 bits, all
constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple, tuple[Any, tuple]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | int | float, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)`` on the current device.

    ``arguments`` are the kernel's first parameters; the rest, in ``constants``, are `tl.constexpr`, beside options of
    the compiler.
    """
    device = torch.cuda.current_device() if arguments[0].is_cuda else None  # type: ignore[union-attr]
    key = (kernel, device, *map(_kind, arguments), *constants.items())
    known = _compiled.get(key)
    if known is None:
        last = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        compiled = kernel[grid](*arguments, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            _compiled[key] = compiled, last
    else:
        compiled, last = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *last)


def _kind(argument: Tensor | int | float) -> object:
    """What of an argument Triton compiles for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument)
