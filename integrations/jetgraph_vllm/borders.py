"""What a live engine computes at the border of every linear: hooks that keep one digest a token and no tensor.

    llm.apply_model(start_recording)
    llm.generate(one prompt)
    (found,) = llm.apply_model(finish_recording)     # plain data: {"steps": [...], "digests": {name: [...]}}

Both functions run where the model lives, in this process or in a worker.  Hooks fire in an engine that runs its modules
(``enforce_eager``); a compiled body or a CUDA graph passes them by, and then nothing is recorded and that is an error.
The names are those of `jetgraph.diverge.boundaries`: a merged module's output is cut into its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetgraph.digest import row_digests
from jetgraph_vllm.collect import linear_parts

FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")
"""What model definitions call the norm whose output the head reads."""


class Recorder:
    """The hooks on one model and what they have seen, row after row."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        self.steps: list[int] = []
        self.digests: dict[str, list[str]] = {}
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        for fqn, module in modules.items():
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                self._watch(module, self._embedding(fqn))
            if fqn.rpartition(".")[0] == "model" and fqn.rpartition(".")[2] in FINAL_NORMS:
                self._watch(module, self._final_norm())
        for fqn, parts in linear_parts(model).items():
            self._watch(modules[fqn], self._linear([(part.name, slice(*part.rows)) for part in parts]))

    def _watch(self, module: torch.nn.Module, hook: Callable[[Any, Any, Any], None]) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _embedding(self, fqn: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self.steps.append(_first(output).shape[0])
            self._keep(f"{fqn}:output", _first(output))

        return hook

    def _final_norm(self) -> Callable[[Any, Any, Any], None]:
        return lambda module, inputs, output: self._keep("lm_head:input", _first(output))

    def _linear(self, parts: list[tuple[str, slice]]) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            given = row_digests(_first(inputs))
            for name, columns in parts:
                self.digests.setdefault(f"{name}:input", []).extend(given)
                self._keep(f"{name}:output", _first(output)[:, columns])

        return hook

    def _keep(self, name: str, rows: Tensor) -> None:
        self.digests.setdefault(name, []).extend(row_digests(rows))

    def finish(self) -> dict[str, Any]:
        for handle in self._handles:
            handle.remove()
        return {"steps": self.steps, "digests": self.digests}


def _first(values: Any) -> Tensor:
    """vLLM's linears return (output, bias), its norms (normed, residual)."""
    return values[0] if isinstance(values, (tuple, list)) else values


def start_recording(model: torch.nn.Module) -> None:
    """For `vllm.LLM.apply_model`.  Tensor-parallel parts of a row are no row, so one rank only.

    Raises:
        ValueError: the engine has more than one rank.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size

    ranks = get_tensor_model_parallel_world_size()
    if ranks != 1:
        raise ValueError(f"the engine has {ranks} ranks, each with a part of every row: use tensor_parallel_size=1")
    model.jetgraph_borders = Recorder(model)


def finish_recording(model: torch.nn.Module) -> dict[str, Any]:
    """For `vllm.LLM.apply_model`: remove the hooks and return what they saw.

    Raises:
        RuntimeError: no hook fired.
    """
    recorder: Recorder = model.jetgraph_borders
    del model.jetgraph_borders
    found = recorder.finish()
    if not found["steps"]:
        raise RuntimeError("no module of the engine was called: a compiled engine passes hooks by, use enforce_eager")
    return found
