"""Many tensors copied, or summed, by one launch: a model has hundreds, and a launch for each costs more than its bytes.

What to do stands in a table: int64 [chunks, 4], of each chunk the addresses it comes from and goes to, its words of 8
bytes, and the tensor that it is of.  Addresses are multiples of 8.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.triton_launch import launch

CHUNK = 1 << 16
"""Words of a chunk: 512 KB, of which one program takes care."""
BLOCK = 2048


@triton.jit
def copy_kernel(table, BLOCK: tl.constexpr):
    row = table + tl.program_id(0).to(tl.int64) * 4
    source = tl.load(row).to(tl.pointer_type(tl.int64))
    target = tl.load(row + 1).to(tl.pointer_type(tl.int64))
    num_words = tl.load(row + 2)
    lane = tl.arange(0, BLOCK)
    for start in range(0, num_words, BLOCK):
        inside = start + lane < num_words
        tl.store(target + start + lane, tl.load(source + start + lane, mask=inside), mask=inside)


@triton.jit
def sum_kernel(table, sums, BLOCK: tl.constexpr):
    row = table + tl.program_id(0).to(tl.int64) * 4
    words = tl.load(row + 1).to(tl.pointer_type(tl.int64))
    num_words = tl.load(row + 2)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_words, BLOCK):
        total += tl.load(words + start + lane, mask=start + lane < num_words, other=0)
    tl.atomic_add(sums + tl.load(row + 3), tl.sum(total, 0))


def copy_chunks(table: Tensor) -> None:
    """The words of every chunk of ``table`` from where they are to where they go."""
    launch(copy_kernel, (table.shape[0],), table, BLOCK=BLOCK)


def add_chunks(table: Tensor, sums: Tensor) -> None:
    """Adds to int64 ``sums`` [tensors] the words that each chunk's *target* holds, modulo 2^64."""
    launch(sum_kernel, (table.shape[0],), table, sums, BLOCK=BLOCK)
