"""The settings in which stock vLLM computes what training can follow (`jetgraph.followed`).

    VLLM_USE_DEEP_GEMM_E8M0=0 vllm serve FOLDER --compilation-config "$(python -m jetgraph_vllm.stock_settings)"

FOLDER is what ``export_checkpoint(…, engine="vllm-stock")`` wrote.  Nothing here needs our plugin.

    VLLM_USE_DEEP_GEMM_E8M0=0   else DeepGEMM's weights are quantised again at load, 67 to 87 % of codes change (F9)
    custom_ops all              vLLM's CUDA kernels for norms, rotary embedding and silu, whose roundings are known
    mode 2, backend eager       else Inductor computes in FP32 over those roundings (JG092), and vLLM's fusions replace
                                the quantisers by others (F6–F8)
    cudagraph_mode FULL         the same kernels, recorded once
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENVIRONMENT = {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
COMPILATION = {"mode": 2, "backend": "eager", "custom_ops": ["all"], "cudagraph_mode": "FULL"}
SMALL = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 4}
"""Of `vllm.LLM`, for a capture: sizes that no kernel's arithmetic depends on."""


def capture_job(model_dir: Path, record: Path, options: Mapping[str, Any], trainings: Path) -> dict[str, Any]:
    """A job of `jetgraph_vllm.stock_capture` in these settings, but for the backend and the CUDA graphs.

    There is our recorder in place of ``eager``: it too calls the recorded graph operator by operator.
    """
    return {
        "model": str(model_dir),
        "out": str(record),
        "label": "vllm-stock",
        "mode": COMPILATION["mode"],
        "custom_ops": COMPILATION["custom_ops"],
        "llm": SMALL | dict(options),
        "trainings": str(trainings),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(COMPILATION) + "\n")
