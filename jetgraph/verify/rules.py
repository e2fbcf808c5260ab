"""The verifier's rules as rows of data: one id, one meaning, one remedy each.

A rule says what kind of difference was found; *finding* it is the business of `finder`, `conformance` and `evidence`.
`docs/rules/JGnnn.md` is printed from these rows (`python -m jetgraph.verify.pages`), and a refutation in
`tests/refutations/` provokes every rule that has a detector in this room.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """What a fault of a rule does to the verdict."""

    VIOLATION = "violation"
    """the rollout computes something else than the trainer: VIOLATED"""
    UNKNOWN = "unknown"
    """the graphs do not show enough to decide: UNKNOWN, which is never success"""
    BITWISE = "bitwise-only"
    """one precision flow still, but not the same bits: CONTAINED with bitwise false"""

    def __str__(self) -> str:
        return self.value


class Stage(str, Enum):
    """Who detects a rule's faults.  LIFTER: a lifter refuses or splits; this room has only the row and the page."""

    FINDER = "finder"
    CONFORMANCE = "conformance"
    EVIDENCE = "evidence"
    LIFTER = "lifter"
    NOT_YET = "not yet"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Rule:
    """One row.  ``remedy`` is a template over the fields of a fault: fqn, op, expected, got."""

    id: str
    title: str
    severity: Severity
    stage: Stage
    meaning: str
    example: str
    remedy: str


_V, _U, _B = Severity.VIOLATION, Severity.UNKNOWN, Severity.BITWISE
_FIND, _CONF, _EVID, _LIFT, _NOT = Stage.FINDER, Stage.CONFORMANCE, Stage.EVIDENCE, Stage.LIFTER, Stage.NOT_YET

_ROWS = [
    Rule(
        "JG001",
        "format",
        _V,
        _FIND,
        "A value has another number format on the two sides.",
        "The trainer rounds the norm's result to bf16, the engine rounds it to f8e4m3.",
        "make {fqn} produce {expected} in the engine",
    ),
    Rule(
        "JG002",
        "granularity",
        _V,
        _FIND,
        "A tensor is quantised on both sides, but other blocks share a scale. A finer partition is not contained in a "
        "coarser one: every amax changes.",
        "Activations are quantised 1x128 by the trainer and 1x64 by the engine.",
        "set the engine's block shape of this operand of {fqn} to {expected}",
    ),
    Rule(
        "JG003",
        "scale format",
        _V,
        _FIND,
        "Scales are stored in another format: f32, f32 rounded up to a power of two, or ue8m0. Rounding up to a "
        "power of two belongs here: it says which numbers a scale can be.",
        "The engine's kernel wants power-of-two scales (Blackwell), the trainer keeps f32 ones.",
        "use {expected} scales for {fqn} in the engine, or train with {got}",
    ),
    Rule(
        "JG004",
        "rounding sequence",
        _V,
        _FIND,
        "One side rounds a value where the other does not. Arithmetic is FP32, so a missing round changes bits of what "
        "follows, and any rounding difference flips FP8 codes.",
        "The engine's fused add-norm squares the residual sum before rounding it to bf16.",
        "make the engine's {op} at {fqn} give {expected} before its next use",
    ),
    Rule(
        "JG005",
        "scale rule",
        _V,
        _FIND,
        "Scales or codes are computed by another rule: qmax, amax floor, division or reciprocal, dynamic or static.",
        "The engine's amax floor is 1e-10, the trainer's 1e-12; or the engine multiplies by 1/scale.",
        "compute the scale at {fqn} with {expected} in the engine",
    ),
    Rule(
        "JG006",
        "block straddles a merged part",
        _V,
        _LIFT,
        "A merged weight (qkv, gate_up) was quantised with one block grid although the rows of a part are no "
        "multiple of the block, so one block holds rows of two parts.",
        "q 576 | k 192 | v 192 rows with 128x128 blocks: row 576 is in the middle of a block.",
        "quantise each part of {fqn} on its own grid",
    ),
    Rule(
        "JG007",
        "block straddles a shard",
        _V,
        _LIFT,
        "A tensor-parallel shard's size is no multiple of the block, so ranks quantise other blocks than the trainer.",
        "N = 576 over tp = 2 with 128-row blocks: the border 288 is inside a block.",
        "choose a tp for {fqn} that keeps shards multiples of the block",
    ),
    Rule(
        "JG008",
        "KV cache format",
        _V,
        _FIND,
        "K or V reach attention in another precision than in training.",
        "The engine runs with kv_cache_dtype=fp8, the trainer attends over bf16 K and V.",
        "set the engine's KV cache to {expected}, or train with {got}",
    ),
    Rule(
        "JG009",
        "double quantisation",
        _V,
        _FIND,
        "A tensor is quantised twice on one side: the second amax sees rounded values.",
        "The engine re-quantises weights that a checkpoint already holds in FP8.",
        "load the codes of {fqn} as they are instead of quantising them again",
    ),
    Rule(
        "JG010",
        "accumulation or output format",
        _V,
        _FIND,
        "A GEMM hands its result out in another format: its output was not FP32 before the declared round.",
        "The engine's GEMM accumulates in bf16 where the trainer's gives f32 and a round follows.",
        "use a GEMM with {expected} output for {fqn} in the engine",
    ),
    Rule(
        "JG011",
        "op or attribute",
        _V,
        _FIND,
        "Another operation, one too many or one missing, or the same operation with another constant or attribute. "
        "Reading uninitialised memory is here too: it differs from everything.",
        "RMSNorm eps is 1e-6 in the engine's config and 1e-5 in the trainer's.",
        "make {op} at {fqn} use {expected} instead of {got} in the engine",
    ),
    Rule(
        "JG012",
        "operand order",
        _V,
        _FIND,
        "The right operation reads the right kind of value from the wrong place.",
        "gate and up are swapped: silu is applied to up.",
        "connect {op} at {fqn} to {expected} in the engine",
    ),
    Rule(
        "JG013",
        "parameter identity",
        _V,
        _FIND,
        "A module uses another parameter than the trainer's module of the same place.",
        "A loader off by one gives layer 7 the k_proj of layer 8.",
        "load {expected} into {fqn} of the engine",
    ),
    Rule(
        "JG014",
        "precision island on one side only",
        _V,
        _FIND,
        "An operand is quantised on one side and not on the other.",
        "Rollout runs FP8 linears, training runs bf16 ones: the naive setting.",
        "give {fqn} one precision on both sides: the trainer has {expected}, the engine {got}",
    ),
    Rule(
        "JG015",
        "kernel depends on batch",
        _B,
        _EVID,
        "Both sides compute the same term, but with other kernels or with one that is not known to give a row the same "
        "bits in every batch. Containment holds; equality of bits is not claimed.",
        "The engine's GEMM picks split-K by batch size.",
        "run {expected} on both sides at {fqn} for equal bits",
    ),
    Rule(
        "JG016",
        "reduction order",
        _B,
        _NOT,
        "Partial sums of a row-parallel shard are added over an FP32 wire in another order: contained modulo reduction "
        "order. BF16 partials are a rounding difference (JG004).",
        "o_proj over tp = 8, all-reduced in FP32.",
        "fix the reduction order of {fqn}, or accept containment modulo reduction order",
    ),
    Rule(
        "JG017",
        "weight value identity",
        _V,
        _EVID,
        "The engine's stored weight is not the value that the trainer's next forward uses: codes, scales or a BF16 "
        "parameter differ, or stored codes belong to no parameter.",
        "The engine quantised the synced weight again at load with another rule: one code differs.",
        "sync {fqn} again and compare digests: the trainer has {expected}, the engine {got}",
    ),
    Rule(
        "JG018",
        "version vector",
        _V,
        _NOT,
        "KV entries were written under another weight version or adapter than the one that reads them.",
        "A partial rollout continues after a weight update on the old prefix cache.",
        "drop the cache at the update, or state the version vector for {fqn}",
    ),
    Rule(
        "JG019",
        "row coupling",
        _V,
        _EVID,
        "A token's result depends on other tokens of the batch, so prefill, decode and padding are not one function.",
        "Per-tensor dynamic activation scales; a scale group of 128 tokens; a mask that is not causal.",
        "use a row-local form for {op} at {fqn}: {expected}",
    ),
    Rule(
        "JG020",
        "observable chain",
        _V,
        _FIND,
        "What is observed differs although the network agrees: head cast, soft cap, temperature, log-softmax, gather.",
        "The engine reports logprobs of temperature-scaled logits, the trainer of raw ones.",
        "make the observable {fqn} be {expected} in the engine",
    ),
    Rule(
        "JG021",
        "policy conformance",
        _V,
        _CONF,
        "A linear does not have the precision that the policy demands, on either side. Two graphs that are both "
        "silently bf16 contain each other; this rule is what notices.",
        "The FP8 patch did not apply to down_proj: both sides run it in bf16.",
        "give {fqn} {expected} or change the policy",
    ),
    Rule(
        "JG022",
        "MoE routing",
        _V,
        _NOT,
        "Expert routing differs: score function, bias, renormalisation, tie-break, combine order, router precision.",
        "The engine renormalises top-k scores, the trainer does not.",
        "declare and match the routing attributes of {fqn}",
    ),
    Rule(
        "JG090",
        "unregistered op",
        _U,
        _EVID,
        "An operation is outside the vocabulary; nothing is known about it.",
        "An engine update brings a custom op without a declared expansion.",
        "declare an expansion for {got} (jetgraph/ops.py and the lifter's table)",
    ),
    Rule(
        "JG091",
        "undischarged condition",
        _U,
        _EVID,
        "A condition of the proof could not be shown: a digest is missing, an attention mask has no proven class, or "
        "the checker does not accept the witness.",
        "A (1,1,S,S) bool mask whose class the lifter could not prove causal.",
        "show {expected} for {fqn}",
    ),
    Rule(
        "JG092",
        "compiler below the graph",
        _U,
        _EVID,
        "The graph was lowered by a compiler that is not known to keep every cast the graph shows.",
        "Inductor may keep FP32 in registers across ops that FX shows as rounded.",
        "run the {op} side with compiler fx or eager, or show that {got} keeps casts",
    ),
    Rule(
        "JG093",
        "replay gate",
        _U,
        _EVID,
        "Interpreting the lifted graph was not shown to reproduce the captured run bit for bit.",
        "A lifter without replay, or one case that differs.",
        "run the replay gate on the {op} graph until all cases pass",
    ),
    Rule(
        "JG094",
        "uncovered guard or later graph",
        _U,
        _NOT,
        "A captured graph holds only under a guard that the other side does not cover, or was compiled after "
        "verification.",
        "A trainer graph traced under 'positions are consecutive' against packed rollouts.",
        "verify the graph that serves under {got} before it serves",
    ),
    Rule(
        "JG095",
        "vacuous or dead",
        _U,
        _EVID,
        "A required observable is missing, or a parameter is neither used nor declared dead. The empty graph proves "
        "nothing.",
        "The engine graph has no K and V outputs; a bias is loaded but never read.",
        "observe or use {fqn}, or declare it dead with the reason",
    ),
]

RULES: dict[str, Rule] = {row.id: row for row in _ROWS}
