"""What the facts of a linear say of its two precisions, and what of them cannot be known.

qmax is the largest code by any rule that divides.  The amax floor and the division leave no trace in values: they are
read from the method that makes them, if that method says so, or known of a kernel because `jetgraph attest` measured it
(docs/findings.md, by number).  The rest stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jetgraph.audit import UNKNOWN, Quantiser, Role, Row
from jetgraph.precision import Precision
from jetgraph_vllm.audit_linears import LinearFacts

GROUP_QUANT = {False: "1e-10", True: "4.48e-08"}
"""amax floor of `_C.per_token_group_fp8_quant`, by power of two [F4]."""
FUSED_FLOOR = "0.00195312"
"""amax floor of the quantisers that the default fusions put behind norms and activations [F6]."""
REQUANTISED_FLOOR = "0.0001"
"""Of weights that DeepGEMM's post-processing quantises again at load [F9]."""
BLOCK_KERNELS = ("DeepGemm", "DeepGEMM", "Cutlass", "Triton")
"""Parts of the names of kernels whose activation is quantised by vLLM's own group quantiser."""
FUSED_INTO = {"norm": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv_proj", "gate_up_proj"),
              "act": ("down_proj",)}  # fmt: skip
"""Linears whose activation's quantiser the default fusions replace, by what comes before it."""


def linear_row(facts: LinearFacts, settings: Mapping[str, Any]) -> Row:
    """The row of one linear, under ``settings`` as `jetgraph_vllm.stock_facts.settings` gives them."""
    weight, activation = _weight(facts), _activation(facts, settings)
    shape, dtype, strides = facts.weight
    layout = f"packed as {list(shape) or 'an opaque handle'} {dtype}" if facts.packed else f"{list(shape)} {dtype}"
    if strides is not None and not facts.packed:
        layout += f" strides {list(strides)}"
    if facts.scales is not None:
        layout += f"; scales {list(facts.scales[0])} {facts.scales[1]}"
        layout += "" if facts.scales[2] is None else f" strides {list(facts.scales[2])}"
    stored = {True: "quantised again at load", False: "the checkpoint's codes", None: ""}[facts.changed]
    return Row(
        facts.name,
        Role.LINEAR,
        facts.module,
        facts.kernel or facts.method,
        weight,
        activation[0],
        layout=layout,
        stored=stored,
        source=activation[1],
    )


def _weight(facts: LinearFacts) -> Quantiser:
    dtype = facts.weight[1]
    if facts.declared is not None:
        declared = Quantiser.of(Precision.parse(facts.declared[1]))
        return _checked(declared, facts)
    if dtype in ("bfloat16", "float16", "float32") and facts.scales is None:
        return Quantiser({"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype])
    fp8 = dtype == "float8_e4m3fn" or (facts.packed and facts.method.startswith("Fp8"))
    if not fp8:
        return Quantiser(UNKNOWN if facts.packed else dtype)
    scale = {None: UNKNOWN, "float32": "f32", "bfloat16": "bf16", "float8_e8m0fnu": "e8m0"}
    scale_format = scale.get(facts.scales[1] if facts.scales else None, UNKNOWN)
    requantised = facts.changed and facts.powers_of_two
    power_of_two = {None: UNKNOWN, True: "yes", False: "no"}[facts.powers_of_two]
    return Quantiser(
        "f8e4m3",
        "x".join(map(str, facts.block)) if facts.block else _granularity(facts),
        scale_format,
        "dynamic",
        "exact" if facts.powers_of_two else UNKNOWN,
        _qmax(facts),
        REQUANTISED_FLOOR if requantised else UNKNOWN,
        power_of_two,
    )


def _checked(declared: Quantiser, facts: LinearFacts) -> Quantiser:
    """What the method says, except where the stored tensors themselves say otherwise."""
    dtype = facts.weight[1]
    if not declared.quantised:
        return declared if dtype == "bfloat16" else Quantiser(dtype)
    if dtype != "float8_e4m3fn" or facts.scales is None:
        return Quantiser(dtype)
    if facts.scales[1] != "float32":
        declared = replace(declared, scale=facts.scales[1])
    if facts.powers_of_two is not None and declared.power_of_two == "yes" and not facts.powers_of_two:
        declared = replace(declared, power_of_two="no", division=UNKNOWN)
    if declared.power_of_two == "no" and facts.largest_code is not None and _qmax(facts) != declared.qmax:
        declared = replace(declared, qmax=_qmax(facts))
    return declared


def _granularity(facts: LinearFacts) -> str:
    """Without a block: one scale for the tensor, or one a row."""
    count = 1
    for size in facts.scales[0] if facts.scales else ():
        count *= size
    if facts.scales is None or facts.packed:
        return UNKNOWN
    return "*x*" if count == 1 else "1x*" if count == facts.weight[0][0] else UNKNOWN


def _qmax(facts: LinearFacts) -> str:
    """By a rule that divides, some block's largest code is qmax; a power of two only bounds it."""
    if facts.largest_code is None:
        return UNKNOWN
    if facts.powers_of_two:
        return "448" if facts.largest_code > 224 else UNKNOWN
    return f"{facts.largest_code:g}"


def _activation(facts: LinearFacts, settings: Mapping[str, Any]) -> tuple[Quantiser, str]:
    """The precision in which the GEMM reads its activation, and how that is known."""
    if facts.declared is not None:
        return Quantiser.of(Precision.parse(facts.declared[0])), ""  # the live method's own arguments
    if facts.scales is None and facts.weight[1] != "float8_e4m3fn" and not facts.method.startswith("Fp8"):
        return Quantiser("bf16") if facts.method.startswith("Unquantized") else Quantiser(UNKNOWN), ""
    if "Marlin" in facts.kernel or "Marlin" in facts.method:
        return Quantiser("bf16"), "Marlin multiplies BF16 activations (W8A16)"
    if not any(part in facts.kernel for part in BLOCK_KERNELS) or not facts.block:
        return _from_kernel(facts), ""
    leaf = facts.name.rpartition(".")[2]
    if _fused(settings, leaf):
        return (
            Quantiser("f8e4m3", f"1x{facts.block[1]}", "f32", "dynamic", "div", "448", FUSED_FLOOR, "no"),
            "quantised by the default fusions [F6]",
        )
    power_of_two = facts.quantiser[2] if facts.quantiser else _e8m0(facts, settings)
    return (
        Quantiser(
            "f8e4m3",
            facts.quantiser[0] if facts.quantiser else f"1x{facts.block[1]}",
            "f32",
            "dynamic",
            "exact" if power_of_two else "div",
            "448",
            GROUP_QUANT[power_of_two],
            "yes" if power_of_two else "no",
        ),
        "per_token_group_fp8_quant [F4]",
    )


def _from_kernel(facts: LinearFacts) -> Quantiser:
    """A kernel that nobody attested: what its own quantiser object says, and no more."""
    if facts.quantiser is None:
        return Quantiser(UNKNOWN)
    granularity, static, power_of_two = facts.quantiser
    return Quantiser("f8e4m3", granularity, "f32", "static" if static else "dynamic",
                     power_of_two="yes" if power_of_two else "no")  # fmt: skip


def _e8m0(facts: LinearFacts, settings: Mapping[str, Any]) -> bool:
    """vLLM's own default where nothing is set: DeepGEMM takes power-of-two scales, on Hopper too [F9]."""
    is_deep_gemm = "DeepGemm" in facts.kernel or "DeepGEMM" in facts.kernel
    return is_deep_gemm and settings["environment"].get("VLLM_USE_DEEP_GEMM_E8M0", "1") != "0"


def _fused(settings: Mapping[str, Any], leaf: str) -> bool:
    if settings["mode"] != 3 or not settings.get("capability"):
        return False
    passes = settings["pass_config"]
    return any(passes.get(f"fuse_{before}_quant") and leaf in leaves for before, leaves in FUSED_INTO.items())
