"""jetgraph inside vLLM: a rollout engine that computes what the trainer computes, and says so.

    import jetgraph_vllm
    jetgraph_vllm.register()      # vLLM does this itself through the entry point vllm.general_plugins

The folder in the order of the data: `declaration` is what a checkpoint says, `quantization` picks each layer's method
by it; `parts` and `linear` load and run the weights; `formulas` and `layers`, `paged_cache` and `attention` (on a GPU
`attention_cuda`) are the trainer's arithmetic inside vLLM; `sampling` makes seeded requests reproducible.  `capture`
and `sampler_trace` record what the engine executes, `collect` puts it into the `capture_format`; on a GPU `pieces` is
what executes it, `exact_compilation` makes that vLLM's choice.  `engine` wraps vLLM for offline use, and
``python -m jetgraph_vllm JOB.json`` runs it in its own process.

A model whose checkpoint does not declare ``jetgraph`` stays stock vLLM, also in a process that serves both.
"""

from __future__ import annotations

import os
import re

SUPPORTED_VLLM = ("0.24", "0.25", "0.26", "0.27")
"""Minor versions whose extension points this plugin knows; 0.27 is the one that the tests run."""

_registered = False


class UnsupportedEngine(RuntimeError):
    """The installed vLLM is one whose internals this plugin has not been checked against."""


def register() -> None:
    """Register the ``jetgraph`` quantisation, layers, attention and sampling with vLLM; a second call does nothing."""
    global _registered
    if _registered:
        return
    import vllm
    from vllm.platforms import current_platform

    check_version(vllm.__version__)
    from jetgraph_vllm import attention, exact_compilation, layers, linear, quantization, sampling

    quantization.register()
    layers.register()
    attention.register()
    exact_compilation.register()
    if current_platform.is_cuda():
        from jetgraph_vllm import attention_cuda

        attention_cuda.register()
    else:
        sampling.register()  # a GPU's generators can take a draw back themselves
    if os.environ.get("JETGRAPH_PLAIN_LINEAR") == "1":
        linear.keep_plain_linears()
    _registered = True


def check_version(version: str) -> None:
    """Raise `UnsupportedEngine` unless ``version`` (``"0.27.1+cpu"``) is a supported minor version."""
    match = re.match(r"(\d+\.\d+)(?=\.|$)", version)
    if match is None or match[1] not in SUPPORTED_VLLM:
        supported = ", ".join(SUPPORTED_VLLM)
        raise UnsupportedEngine(f"jetgraph_vllm does not know vLLM {version}: install one of {supported}")
