"""What the engine computes between logits and the logprobs that it returns, as a dispatch trace of one real step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jetgraph.fx_record import record_argument, record_value
from jetgraph.record import Op, Ref


class DispatchTrace(TorchDispatchMode):
    """Records each ATen call with its arguments.  A tensor that no call made is a placeholder, named by `name`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []  # an id names a tensor only while it lives

    def name(self, tensor: Tensor, name: str) -> None:
        """Declare an input before the traced call."""
        self.ops.append(Op(name, "placeholder", name, value=record_value(tensor)))
        self._remember(tensor, name)

    def finish(self, outputs: dict[str, Tensor]) -> list[Op]:
        names = tuple(self._ref(tensor) for tensor in outputs.values())
        values = tuple(record_value(tensor) for tensor in outputs.values())
        return [*self.ops, Op("output", "output", "output", (names,), value=values)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments, keywords = self._recorded(tuple(args)), self._recorded(kwargs)
        result = func(*args, **kwargs)
        name = f"{func.overloadpacket.__name__}_{len(self.ops)}"
        self.ops.append(Op(name, "call", str(func), arguments, keywords, record_value(result)))
        if isinstance(result, Tensor):
            self._remember(result, name)
        elif isinstance(result, (tuple, list)):
            self._record_items(name, result)
        return result

    def _record_items(self, name: str, results: Any) -> None:
        for index, part in enumerate(results):
            if isinstance(part, Tensor):
                item = f"{name}_{index}"
                self.ops.append(Op(item, "call", "getitem", (Ref(name), index), value=record_value(part)))
                self._remember(part, item)

    def _recorded(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._ref(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._recorded(v) for v in value)
        if isinstance(value, dict):
            return {k: self._recorded(v) for k, v in value.items()}
        return record_argument(value)

    def _ref(self, tensor: Tensor) -> Ref:
        if id(tensor) not in self._names:
            self.name(tensor, f"input_{len(self.ops)}")
        return Ref(self._names[id(tensor)])

    def _remember(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self._alive.append(tensor)


@contextlib.contextmanager
def tracing(sampler: Any) -> Iterator[list[Op]]:
    """Trace the first logprob computation of several rows inside the block into the list that is yielded.

    One row would not do: its axis of size 1 could be any axis.  Which requests share a step is a matter of their
    arrival in an engine that serves, so a first step may have one; a prompt's own logprobs always have several.
    `compute_logprobs` and `gather_logprobs` run as they are, except that the ranks, which vLLM compiles with inductor
    and which no logprob depends on, are computed by the same function uncompiled.
    """
    from vllm.v1.sample import sampler as module

    trace, record = DispatchTrace(), []
    compute, gather = sampler.compute_logprobs, sampler.gather_logprobs
    ranks = module.batched_count_greater_than

    def compute_traced(logits: Tensor) -> Tensor:
        if trace.ops or logits.shape[0] < 2:
            return compute(logits)
        trace.name(logits, "logits")
        with trace:
            return compute(logits)

    def gather_traced(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        if record or not trace.ops:
            return gather(logprobs, num_logprobs, token_ids)
        trace.name(token_ids, "token_ids")
        module.batched_count_greater_than = getattr(ranks, "_torchdynamo_orig_callable", ranks)
        try:
            with trace:
                gathered = gather(logprobs, num_logprobs, token_ids)
        finally:
            module.batched_count_greater_than = ranks
        record.extend(trace.finish({"logprobs": gathered.logprobs}))
        return gathered

    sampler.compute_logprobs, sampler.gather_logprobs = compute_traced, gather_traced
    try:
        yield record
    finally:
        del sampler.compute_logprobs, sampler.gather_logprobs
