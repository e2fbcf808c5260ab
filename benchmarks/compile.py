"""What compiling costs beside plain torch.compile, and how often shapes make it compile:  python -m benchmarks.compile

Both sides compile the decoder blocks of the same small model where they stand; plain is `torch.compile` with backend
``aot_eager``.  Its first graph serves one size; the second size that it meets makes it compile again, for every size
from then on.  Ours serves every size from the first graph on.  So two comparisons: compiling for the first size, and
for every size.  Times are CPU seconds of one thread (`time.process_time`), each side on a fresh model and an empty
compile cache, the sides taking turns, medians.

compile = first step with a size - median of the steps after it.  Those later steps do FP8 arithmetic in float64 under
`jet`, which is no overhead of the compiler; that is measured by `bf16` with torch's own kernels, which computes what
plain computes.

After a warm-up of two lengths, 50 random ones must compile nothing.  ``--inductor`` adds what Inductor's code costs:
the first step of 36 layers, block by block, under 60 s of wall time, on the GPU if there is one.

Exit status 1 if a figure misses its bar.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel

import jetgraph
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report
from tests.core.small_models import one_step, random_ids, random_model

RESULTS = Path(__file__).parent / "results" / "cpu" / "compile.json"
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LATER_STEPS = 4
RATIO, MAX_COMPILES = 1.2, 3
WARM_UP, INDUCTOR_SECONDS = (16, 33), 60.0


# ---------------------------------------------------------------------------------------------------- compile time


def plain(model: PreTrainedModel) -> None:
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)


SIDES: dict[str, Callable[[PreTrainedModel], object]] = {
    "eager": lambda model: None,
    "plain": plain,
    "bf16": lambda model: jetgraph.compile(model, "bf16", provider="stock"),
    "jet": lambda model: jetgraph.compile(model, "jet"),
}


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one side on a fresh model."""

    first_step: float
    later_step: float
    second_size: float
    """First step with another batch and length."""

    @property
    def one_size(self) -> float:
        return self.first_step - self.later_step

    @property
    def every_size(self) -> float:
        return self.one_size + max(self.second_size - self.later_step, 0.0)


def measure(side: str, layers: int) -> Cost:
    torch._dynamo.reset()
    model = random_model(layers=layers, sizes=SIZES)
    SIDES[side](model)
    seconds = []
    for shape in [(2, 16)] * (1 + LATER_STEPS) + [(4, 8)]:  # equally many tokens
        ids = random_ids(model, *shape)
        start = time.process_time()
        one_step(model, ids)
        seconds.append(time.process_time() - start)
    return Cost(seconds[0], median(seconds[1:-1]), seconds[-1])


def compile_rows(layers: int, repeats: int) -> list[Row]:
    costs: dict[str, list[Cost]] = {side: [] for side in SIDES}
    for turn in range(repeats):
        for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
            costs[side].append(measure(side, layers))

    def middle(side: str, figure: str) -> float:
        return median(getattr(cost, figure) for cost in costs[side])

    rows = []
    for figure in ("one_size", "every_size", "first_step", "later_step"):
        name = f"{layers} layers, {figure.replace('_', ' ')}"
        sides = list(SIDES) if figure == "later_step" else [side for side in SIDES if side != "eager"]
        rows += [Row.fact(f"{name}: {side}", middle(side, figure), "s") for side in sides]
        for side in ("bf16", "jet"):
            ratio, metric = middle(side, figure) / middle("plain", figure), f"{name}: {side} beside plain"
            is_arithmetic = side == "jet" and figure == "later_step"
            rows.append(Row.fact(metric, ratio, "x") if is_arithmetic else Row.below(metric, ratio, "x", RATIO))
    return rows


# -------------------------------------------------------------------------------------------------- dynamic shapes


def inputs(kind: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a caller passes for a kind of mask; ids [B, S]."""
    batch, length = ids.shape
    if kind == "left padding":
        pads = torch.arange(batch)[:, None] % (length - 1) + 1
        return {"attention_mask": (torch.arange(length) >= pads).long()}
    if kind == "right padding":
        return {"attention_mask": (torch.arange(length) < length - torch.arange(batch)[:, None] % (length - 1)).long()}
    if kind == "packed":
        return {"position_ids": (torch.arange(length) % (length // 2 + 1)).expand(batch, length)}
    return {}


def num_compiles(kind: str, grad: bool, shapes: list[tuple[int, int]]) -> int:
    torch._dynamo.reset()
    model = jetgraph.compile(random_model(layers=1, sizes=SIZES), "jet")
    for batch, length in shapes:
        ids = random_ids(model, batch, length)
        with torch.set_grad_enabled(grad):
            logits = model(input_ids=ids, use_cache=False, **inputs(kind, ids)).logits
        if grad:
            logits.float().square().mean().backward()
    return model.jetgraph.num_compiles


def shape_rows(num_shapes: int) -> list[Row]:
    """Random batches 1–4 and lengths 2–40, every model from its first compile on."""
    rows = []
    for kind in ("causal", "right padding", "left padding", "packed"):
        for grad in (True, False):
            rng = random.Random(f"{kind} {grad}")
            shapes = [(rng.randint(1, 4), rng.randint(2, 40)) for _ in range(num_shapes)]
            name = f"{num_shapes} shapes, {kind}, {'grad' if grad else 'no_grad'}: compiles"
            count = num_compiles(kind, grad, shapes)
            rows.append(Row(name, count, "", f"≤ {MAX_COMPILES}", count <= MAX_COMPILES))
    return rows


def length_rows(num_lengths: int, codegen: str = "fx", device: str = "cpu", longest: int = 96) -> list[Row]:
    """Sequences of random lengths, in training and under no_grad, after two lengths of each."""
    rng = random.Random("lengths")
    lengths = [rng.randint(2, longest) for _ in range(num_lengths)]
    rows = []
    for grad in (True, False):
        torch._dynamo.reset()
        model = jetgraph.compile(random_model(layers=1, sizes=SIZES).to(device), "jet", codegen=codegen, fused=True)
        after_warm_up = 0
        for i, length in enumerate([*WARM_UP, *lengths]):
            ids = random_ids(model, 2, length).to(device)
            with torch.set_grad_enabled(grad):
                loss = model(input_ids=ids, use_cache=False).logits.float().square().mean()
            if grad:
                loss.backward()
            if i < len(WARM_UP):
                after_warm_up = model.jetgraph.num_compiles
        mode = "grad" if grad else "no_grad"
        name = f"{num_lengths} lengths after {len(WARM_UP)}, {codegen} on {device}, {mode}: compiles"
        count = model.jetgraph.num_compiles - after_warm_up
        rows.append(Row(name, count, "", "= 0", count == 0))
    return rows


def inductor_rows(layers: int) -> list[Row]:
    """Wall seconds of the first forward+backward with Inductor's code, and of a later one.

    One layer runs operator by operator before: DeepGEMM's and Triton's kernels are compiled once a machine and size,
    and are a row of their own.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def steps(count: int, codegen: str) -> Iterator[float]:
        torch._dynamo.reset()
        model = random_model(layers=count, sizes=SIZES).to(device)
        ids = random_ids(model, 2, 64).to(device)
        jetgraph.compile(model, "jet", codegen=codegen, fused=True)
        while True:
            start = time.perf_counter()
            one_step(model, ids)[0].sum().item()  # waits for the device
            yield time.perf_counter() - start
            print(
                f"{count} layers, {codegen}: a step in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True
            )

    kernels = next(steps(1, "fx"))
    first, second = islice(steps(layers, "inductor"), 2)
    name = f"{layers} layers with Inductor on {device}"
    return [
        Row.fact(f"1 layer operator by operator on {device}, kernels compiled: first step", kernels, "s"),
        Row.below(f"{name}: first step", first, "s", INDUCTOR_SECONDS),
        Row.fact(f"{name}: second step", second, "s"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    parser.add_argument("--layers", type=int, action="append", help="4 and 36 by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", type=int, default=12)
    parser.add_argument("--lengths", type=int, default=50)
    parser.add_argument("--inductor", action="store_true", help="also time and count Inductor's compiles")
    parser.add_argument("--only-inductor", action="store_true", help="nothing else: what a GPU is asked for")
    options = parser.parse_args()
    if options.only_inductor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rows = [*inductor_rows(max(options.layers or (36,))), *length_rows(options.lengths, "inductor", device)]
        return report(rows, options.json, device_name() if device == "cuda" else device)
    torch.set_num_threads(1)
    for side in SIDES:  # whatever torch imports or builds once per process
        measure(side, 1)
    rows = [row for layers in options.layers or (4, 36) for row in compile_rows(layers, options.repeats)]
    rows += [*shape_rows(options.shapes), *length_rows(options.lengths)]
    if options.inductor:
        rows += [*length_rows(options.lengths, "inductor"), *inductor_rows(max(options.layers or (36,)))]
    return report(rows, options.json, "cpu, one thread")


if __name__ == "__main__":
    sys.exit(main())
