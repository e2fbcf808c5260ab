"""Random programs that only arrange and multiply, lifted and interpreted against eager torch.

The token axis is T, or B and S, with sizes that features have too: nothing may be recognised by its size.  Earlier bugs
that neither model showed: one axis in two dimensions taken for a diagonal, an axis cut to size 1 that no longer
broadcast, a permutation without a token axis.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import jetgraph.lift.all  # noqa: F401  (registers the handlers)
from jetgraph.fx_record import record_graph
from jetgraph.interpret import interpret
from jetgraph.layout import Value
from jetgraph.lift.lifter import Lifter
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import F32

NUM_PROGRAMS = 75
TOKEN_SHAPES = [(6,), (2, 3), (3, 2), (4, 6), (1, 6)]
FEATURES = 24
MOST_FEATURES = 400


class Program:
    """Draws one operation after the other and runs each at once; ``axes`` names every dimension (b, s, t or f)."""

    def __init__(self, seed: int, token_shape: tuple[int, ...]) -> None:
        self.draw = random.Random(seed)
        self.tokens = "t" if len(token_shape) == 1 else "bs"
        self.steps: list = []

    def run(self, x: Tensor, w: Tensor) -> Tensor:
        """The same program for every call with the same seed: first on data, then under `make_fx`."""
        value, axes = x, self.tokens + "f"
        arranging = [
            self.split,
            self.merge,
            self.merge,
            self.permute,
            self.flatten,
            self.unsqueeze,
            self.cut,
            self.rotate,
        ]
        steps = [*arranging, self.times_part, self.times_weight, self.outer]
        for _ in range(self.draw.randint(3, 9)):
            value, axes = self.draw.choice(steps)(value, axes, w)
        order = [axes.index(a) for a in axes if a != "f"] + [i for i, a in enumerate(axes) if a == "f"]
        return value.permute(order).reshape(x.shape[: len(self.tokens)].numel(), -1)

    def feature(self, axes: str) -> int:
        return self.draw.choice([i for i, a in enumerate(axes) if a == "f"])

    def split(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        i = self.feature(axes)
        first = self.draw.choice([d for d in range(1, x.shape[i] + 1) if x.shape[i] % d == 0])
        shape = (*x.shape[:i], first, x.shape[i] // first, *x.shape[i + 1 :])
        return x.reshape(shape), axes[:i] + "f" + axes[i:]

    def merge(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        pairs = [i for i, (a, b) in enumerate(itertools.pairwise(axes)) if a == b == "f"]
        if not pairs:
            return x, axes
        i = self.draw.choice(pairs)
        return x.reshape(*x.shape[:i], -1, *x.shape[i + 2 :]), axes[:i] + axes[i + 1 :]

    def permute(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        order = list(range(len(axes)))
        self.draw.shuffle(order)
        if self.tokens == "bs":  # tokens stay in the batch's order, apart or together
            held = [k for k, i in enumerate(order) if axes[i] != "f"]
            for k, i in zip(held, sorted(order[k] for k in held), strict=True):
                order[k] = i
        return x.permute(order), "".join(axes[i] for i in order)

    def cut(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        i = self.feature(axes)
        start = self.draw.randrange(x.shape[i])
        return x.narrow(i, start, self.draw.randint(1, x.shape[i] - start)), axes

    def rotate(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        i = self.feature(axes)
        k = self.draw.randint(0, x.shape[i])
        head, tail = x.narrow(i, 0, k), x.narrow(i, k, x.shape[i] - k)
        return torch.cat((-tail, head), i), axes

    def times_part(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        return x * x.narrow(self.feature(axes), 0, 1), axes

    def times_weight(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        return (x * w[: x.shape[-1]], axes) if axes[-1] == "f" and x.shape[-1] <= FEATURES else (x, axes)

    def outer(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        i = self.feature(axes)
        if x.numel() * x.shape[i] > MOST_FEATURES * 24:
            return x, axes
        return x.unsqueeze(i) * x.unsqueeze(i + 1), axes[:i] + "f" + axes[i:]

    def unsqueeze(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        i = self.draw.randint(0, len(axes))
        repeats = self.draw.choice([1, 2, 3, 6]) if x.numel() < MOST_FEATURES * 24 else 1
        shape = [*x.shape[:i], repeats, *x.shape[i:]]
        return x.unsqueeze(i).expand(shape), axes[:i] + "f" + axes[i:]

    def flatten(self, x: Tensor, axes: str, w: Tensor) -> tuple[Tensor, str]:
        """[.., B, S, ..] to [.., T, ..] and back: what linears and blocks do all the time."""
        i = axes.find("bs")
        if i < 0:
            return x, axes
        flat = x.reshape(*x.shape[:i], -1, *x.shape[i + 2 :])
        return (flat * 1.0).reshape(x.shape), axes


def drawn(seed: int, token_shape: tuple[int, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: Program(seed, token_shape).run(x, w)


@pytest.mark.parametrize("token_shape", TOKEN_SHAPES, ids=str)
def test_random_layout_programs_equal_eager(token_shape):
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(1, 3, (FEATURES,), generator=generator).float()
    x = torch.randint(-2, 3, (*token_shape, FEATURES), generator=generator).float()  # whole numbers: every sum is exact
    num_nodes = 0
    for seed in range(NUM_PROGRAMS // len(TOKEN_SHAPES)):
        want = drawn(seed, token_shape)(x, w)
        builder = TermBuilder()
        lifter = Lifter(builder, token_shape)
        ops = record_graph(make_fx(drawn(seed, token_shape))(x, w))
        leaf = lifter.layouts.token_matrix(builder.intern("input", (), {"name": "x"}, ("T", FEATURES), F32))
        bound = {
            ops[0].name: lifter.layouts.view(leaf, x.shape),
            ops[1].name: lifter.parameter("w", w.shape, "float32"),
        }
        value = lifter.outputs(ops, lifter.run(ops, bound))[0]
        assert isinstance(value, Value)
        assert lifter.unknown == [], seed
        graph = builder.graph("g", {"out": lifter.layouts.read(value)}, {})
        got = interpret(graph, {"x": x.flatten(0, -2), "w": w})["out"]
        assert torch.equal(got, want), (seed, token_shape)
        num_nodes += len(graph.nodes)
    assert num_nodes > NUM_PROGRAMS  # the programs are not empty


def test_a_feature_axis_as_long_as_the_token_axis_stays_a_feature():
    x = torch.arange(6.0 * FEATURES).view(6, FEATURES)

    def program(x: Tensor) -> Tensor:
        repeated = x.view(6, 6, 4).transpose(0, 1).unsqueeze(3).expand(6, 6, 4, 2)  # [feature, token, …]
        written = repeated.reshape(6, 6, 8).narrow(2, 1, 5)  # cutting a repeated axis writes it out first
        return written.permute(1, 0, 2) * x.view(6, 6, 4)[:, :, :1]

    builder = TermBuilder()
    lifter = Lifter(builder, 6)
    ops = record_graph(make_fx(program)(x))
    leaf = lifter.layouts.token_matrix(builder.intern("input", (), {"name": "x"}, ("T", FEATURES), F32))
    value = lifter.outputs(ops, lifter.run(ops, {ops[0].name: leaf}))[0]
    assert lifter.unknown == []
    got = interpret(builder.graph("g", {"out": lifter.layouts.read(value)}, {}), {"x": x})["out"]
    assert torch.equal(got, program(x).flatten(1))
