"""How vLLM compiles an exact model unless somebody says otherwise: through our backend, on a GPU in full CUDA graphs.

vLLM's default hands the model to Inductor (in mode 3, on a CPU in mode 2), which computes a chain of BF16 operators in
FP32 and rounds once at its end: other numbers than the trainer's.  So a model that declares ``ops: exact`` gets mode 2
and the backend that `jetgraph_vllm.capture` records, whose kernels keep every rounding (`jetgraph_vllm.pieces`).  Eager
engines, and a backend that the user names, stay as they are: both run operators one by one.

Its logprobs are to be training's as well: vLLM's second model runner, 0.26's default, sums a log-softmax by a kernel of
its own, so the first one serves an exact model.  Both choices reach spawned workers through the environment.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode

from jetgraph_vllm.capture import BACKEND
from jetgraph_vllm.quantization import declares_exact

INDUCTOR = ("", "inductor")
"""What vLLM calls its default backend before and after it has filled in defaults."""


def adopt(vllm_config: Any, *, graphs: bool) -> None:
    """Change the compilation of an exact model in ``vllm_config`` as above; leave every other as it is.

    ``graphs``: the platform has CUDA graphs.  Piecewise ones need mode 3; an exact model gets full ones in their place,
    prompts and decoding alike.
    """
    if not declares_exact(vllm_config.quant_config):
        return
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    compilation = vllm_config.compilation_config
    if compilation.mode in (None, CompilationMode.VLLM_COMPILE) and compilation.backend in INDUCTOR:
        compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
        compilation.backend = BACKEND
        given = compilation.cudagraph_mode
        if graphs and (given is None or given.requires_piecewise_compilation()):
            compilation.cudagraph_mode = CUDAGraphMode.FULL
    if compilation.backend == BACKEND:
        os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # it stores what a backend returns, and ours is a live object


def register() -> None:
    """Adopt whenever vLLM asks its platform for defaults, which is before it decides how to compile."""
    from vllm.platforms import current_platform

    defaults = current_platform.apply_config_platform_defaults

    @functools.wraps(defaults)
    def with_exact_models(vllm_config: Any) -> None:
        defaults(vllm_config)
        adopt(vllm_config, graphs=current_platform.is_cuda())

    current_platform.apply_config_platform_defaults = with_exact_models  # type: ignore[method-assign]
