"""How the operators of `torch.ops.jetgraph` are made known to torch.

As by `torch.library.custom_op`, but for what that asks at every call: is something differentiated, mutated, aliased?  A
call of it costs the host 50 µs before anything runs, one of these 15 (CPU, five arguments), and a decoder block's step
makes 49 of them.  `torch.library.opcheck` asks the same questions in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "jetgraph"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class Operator:
    """``function``, which changes no argument and returns none, as ``jetgraph::<its name>`` on every device.

    Its annotations are the operator's schema.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(self._name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(self._name, function, "CompositeExplicitAutograd")

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """``fake``, which is returned, gives shapes, dtypes and strides of the result, without numbers."""
        torch.library.register_fake(f"{NAMESPACE}::{self._name}", fake, lib=LIBRARY)
        return fake

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None) -> None:
        name = f"{NAMESPACE}::{self._name}"
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=LIBRARY)

    def refuse_gradient(self) -> None:
        """Whoever differentiates a result gets an error; by default torch warns once and goes on with wrong numbers."""

        def refuse(ctx, *grads):
            raise NotImplementedError(f"{NAMESPACE}::{self._name} has no gradient: training is differentiated once")

        self.register_autograd(refuse)


def on_cuda(function: Callable[..., Any]) -> None:
    """``function``, whose first argument is a tensor, runs the operator of its name where tensors are on a GPU.

    It runs on that tensor's device: a kernel is launched on the current device, wherever its tensors are.
    """

    def run(first: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if first.get_device() == torch.cuda.current_device():
            return function(first, *arguments, **options)
        with torch.cuda.device(first.device):
            return function(first, *arguments, **options)

    LIBRARY.impl(function.__name__, run, "CUDA")
