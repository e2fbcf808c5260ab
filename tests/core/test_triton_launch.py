"""A kernel is found again by all that Triton compiles it for, and launched with all of its arguments."""

from __future__ import annotations

import pytest
import torch

from jetgraph.lowering import triton_launch

X = torch.zeros(64, dtype=torch.bfloat16)


class Compiled:
    def __init__(self, launched: list) -> None:
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


class Kernel:
    """As Triton's: ``kernel[grid](...)`` compiles if it must, launches and returns what it compiled."""

    arg_names = ("x", "n", "eps", "ROWS", "EVEN")

    def __init__(self) -> None:
        self.asked, self.launched = [], []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.asked.append((grid, arguments, constants))
            return Compiled(self.launched)

        return run


def call(kernel, *, x=X, n=7, eps=1e-6, grid=(3,), **constants):
    triton_launch.launch(kernel, grid, x, n, eps, **({"EVEN": True, "ROWS": 4, "num_warps": 8} | constants))


def test_the_second_launch_goes_to_the_compiled_kernel_with_all_arguments_in_order():
    kernel = Kernel()
    call(kernel)
    call(kernel, n=9, eps=0.5, grid=(5, 2))
    assert kernel.asked == [((3,), (X, 7, 1e-6), {"EVEN": True, "ROWS": 4, "num_warps": 8})]
    assert kernel.launched == [((5, 2, 1), (X, 9, 0.5, 4, True))]


@pytest.mark.parametrize(
    "other",
    [
        {"n": 1}, {"n": 16}, {"n": 1 << 31}, {"x": X.float()}, {"x": X[1:]}, {"eps": 1}, {"ROWS": 8}, {"EVEN": False},
        {"num_warps": 4}, {"maxnreg": 80},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_triton_compiles_for_is_asked_again(other):
    kernel = Kernel()
    call(kernel)
    call(kernel, **other)
    assert len(kernel.asked) == 2
    assert kernel.launched == []
    call(kernel, **other)
    assert len(kernel.launched) == 1


def test_kernels_do_not_share():
    one, other = Kernel(), Kernel()
    call(one)
    call(other)
    assert (len(one.asked), len(other.asked)) == (1, 1)


def test_a_constant_that_is_left_out_is_named():
    with pytest.raises(KeyError, match="EVEN"):
        triton_launch.launch(Kernel(), (1,), X, 7, 1e-6, ROWS=4)
