"""vLLM's operators against their definitions, in the engine's own process: ``python -m jetgraph_vllm.attest OUT.json``.

On CUDA these are the kernels that stock vLLM runs for a dense FP8 model (`attest_cuda`, `attest_fp8`); on a CPU vLLM's
own and this plugin's (`attest_cpu`).  The trainer's kernels follow, on the same device.  Where libraries disagree other
definitions are tried too, so a failure shows what holds instead.  What this build lacks is `not run`, never `holds`.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Callable

import torch

from jetgraph.attest import Attestation, Check, Outcome
from jetgraph.attest.trainer import trainer_checks
from jetgraph.versions import versions
from jetgraph_vllm import attest_cpu, attest_cuda, attest_fp8

Run = Callable[[str], list[Check]]

CUDA: dict[str, Run] = {
    "_C.rms_norm": attest_cuda.rms_norm,
    "_C.fused_add_rms_norm": attest_cuda.fused_add_rms_norm,
    "_C.silu_and_mul": attest_cuda.silu_and_mul,
    "_C.rotary_embedding": attest_cuda.rotary_embedding,
    "_C.per_token_group_fp8_quant": attest_fp8.per_token_group_fp8_quant,
    "vllm.fp8_gemm_nt_op": attest_fp8.fp8_gemm_nt_op,
    "_C.rms_norm_per_block_quant": attest_fp8.rms_norm_per_block_quant,
    "_C.silu_and_mul_per_block_quant": attest_fp8.silu_and_mul_per_block_quant,
    "vllm.compute_token_logprobs": attest_fp8.compute_token_logprobs,
    "vllm.requant_weight_ue8m0_inplace": attest_fp8.requantise_at_load,
    "jetgraph": trainer_checks,
}
CPU: dict[str, Run] = {
    "_C (cpu)": attest_cpu.stock_operators,
    "jetgraph_vllm": attest_cpu.plugin_operators,
    "jetgraph": trainer_checks,
}


def main(arguments: list[str]) -> int:
    """Write the attestation to the named file; what it says is in the file, not in the exit status."""
    attest_engine().save(arguments[0])
    return 0


def attest_engine() -> Attestation:
    """Every operator of this engine build that dense FP8 models use, on the device it serves with."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    capability = torch.backends.cpu.get_cpu_capability()
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu {platform.machine()} {capability}"
    attestation = Attestation("vllm", name, versions("vllm", "torch"))
    for op, run in (CUDA if device == "cuda" else CPU).items():
        print(f"jetgraph_vllm: attesting {op}", file=sys.stderr)
        try:
            attestation.checks += run(device)
        except Exception as error:  # one operator that a build lacks must not hide the others
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            attestation.checks.append(Check(op, "declared definition", "", Outcome.NOT_RUN, note=reason))
            print(traceback.format_exc(), file=sys.stderr)
    return attestation


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
