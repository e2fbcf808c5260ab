"""Which setting of vLLM removes a difference, as far as stored captures and the attestation show one.

Where every known setting keeps the difference, the advice says so and names the side on which it can be removed; where
nothing is known it is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetgraph.audit import Difference, Row
from jetgraph.audit.compare import ABSENT, Advice
from jetgraph_vllm.audit_precision import FUSED_FLOOR, GROUP_QUANT

FUSIONS_OFF = 'compilation_config={"pass_config": {"fuse_norm_quant": false, "fuse_act_quant": false}}'
E8M0_OFF = "VLLM_USE_DEEP_GEMM_E8M0=0"
E8M0_ON = "VLLM_USE_DEEP_GEMM_E8M0=1 and a DeepGEMM kernel"


def adviser(settings: Mapping[str, Any], policy: str) -> Advice:
    """For an engine with these settings that is meant to follow ``policy``."""
    export = f"serve what `jetgraph export MODEL --policy {policy}` writes"

    def advise(difference: Difference, rows: Sequence[Row]) -> str:
        if ABSENT in (difference.expected, difference.got):
            where = "loaded" if difference.got == ABSENT else "in the model"
            return f"no linear of that name is {where}: names with a prefix, or another model"
        if difference.field == "arithmetic":
            return f"{export}: its plugin computes as training does (on CPU). On CUDA none is known"
        if difference.operand == "kv cache":
            return "kv_cache_dtype=auto"
        if difference.field == "format":
            return _format(difference, rows, settings, export)
        if difference.operand == "weight":
            return _weight(difference, export)
        return _activation(difference, rows, export)

    return advise


def _format(difference: Difference, rows: Sequence[Row], settings: Mapping[str, Any], export: str) -> str:
    if difference.unknown:
        return ""
    if difference.expected == "bf16":
        return "list these in modules_to_not_convert, or quantise them in training too (another policy)"
    if difference.operand == "activation" and any("Marlin" in row.kernel for row in rows):
        return "a kernel that quantises activations: unset VLLM_TEST_FORCE_FP8_MARLIN and VLLM_DISABLED_KERNELS"
    if settings.get("quantization") in (None, "None"):
        return export
    return "take these out of modules_to_not_convert (the ignore list): " + export


def _weight(difference: Difference, export: str) -> str:
    if difference.unknown:
        return "values do not show it: `jetgraph verify` compares the bytes with training's"
    if difference.field == "granularity":
        return f"a checkpoint quantised in blocks of {difference.expected}: {export}"
    if difference.got in ("yes", "exact") or difference.field == "floor":
        return f"{E8M0_OFF}: DeepGEMM quantises weights again at load"
    if difference.expected in ("yes", "exact"):
        return f"{E8M0_ON}, or {export}"
    if difference.field == "scale":
        return f"a kernel that keeps FP32 scales: DeepGEMM with {E8M0_OFF}, or CUTLASS"
    return export


def _activation(difference: Difference, rows: Sequence[Row], export: str) -> str:
    if difference.unknown:
        return ""
    fused = any("fusions" in row.source for row in rows)
    if difference.field in ("power_of_two", "division"):
        if difference.got in ("yes", "exact"):
            return E8M0_OFF
        return FUSIONS_OFF if fused else E8M0_ON
    if difference.field == "floor":
        if difference.got == FUSED_FLOOR:
            return FUSIONS_OFF
        if difference.got in GROUP_QUANT.values():
            return f"none in vLLM, the floor is built in: train with amax_floor {difference.got}, or {export}"
    return export
