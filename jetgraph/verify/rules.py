"""The verifier's rules as rows of data: one id, one meaning, one remedy each.

A rule says what kind of difference was found; *finding* it is the business of `finder`, `reduction`, `conformance`,
`evidence` and `declared`.  `docs/rules/JGnnn.md` is printed from these rows (`python -m jetgraph.verify.pages`), and
`tests/refutations/JGnnn_*.py` provokes every rule and holds what is just valid beside it.
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
    QUALIFIED = "qualified"
    """contained, but only modulo what the rule names, which the verdict says: CONTAINED modulo …, never bitwise"""
    BITWISE = "bitwise-only"
    """one precision flow still, but not the same bits: CONTAINED with bitwise false"""

    def __str__(self) -> str:
        return self.value


class Stage(str, Enum):
    """Who detects a rule's faults."""

    FINDER = "finder"
    REDUCTION = "reduction"
    CONFORMANCE = "conformance"
    EVIDENCE = "evidence"
    DECLARED = "declared"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Rule:
    """One row.  ``remedy`` is a template over the fields of a fault: fqn, op, expected, got.

    ``modulo`` completes "CONTAINED modulo …" for a qualified rule; ``spec`` is the paragraph of docs/spec.md that the
    rule enforces.
    """

    id: str
    title: str
    severity: Severity
    stage: Stage
    meaning: str
    example: str
    remedy: str
    spec: str
    modulo: str = ""


_V, _U, _Q, _B = Severity.VIOLATION, Severity.UNKNOWN, Severity.QUALIFIED, Severity.BITWISE
_FIND, _CONF, _EVID, _DECL = Stage.FINDER, Stage.CONFORMANCE, Stage.EVIDENCE, Stage.DECLARED

_ROWS = [
    Rule(
        "JG001",
        "format",
        _V,
        _FIND,
        "A value has another number format on the two sides.",
        "The trainer rounds the norm's result to bf16, the engine rounds it to f8e4m3.",
        "make {fqn} produce {expected} in the engine",
        "3.2",
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
        "3.3",
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
        "3.4",
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
        "3.5",
    ),
    Rule(
        "JG005",
        "scale rule",
        _V,
        _FIND,
        "Scales or codes are computed by another rule: qmax, amax floor, division or reciprocal, dynamic or static.",
        "The engine's amax floor is 1e-10, the trainer's 1e-12; or the engine multiplies by 1/scale.",
        "compute the scale at {fqn} with {expected} in the engine",
        "3.4",
    ),
    Rule(
        "JG006",
        "block straddles a merged part",
        _V,
        _DECL,
        "A merged weight (qkv, gate_up) was quantised with one block grid although the rows of a part are no "
        "multiple of the block, so one block holds rows of two parts.",
        "q 576 | k 192 | v 192 rows with 128x128 blocks: row 576 is in the middle of a block.",
        "quantise {fqn} on a block grid of its own: {expected}",
        "4.3",
    ),
    Rule(
        "JG007",
        "block straddles a shard",
        _V,
        _DECL,
        "A tensor-parallel shard's size is no multiple of the block, so ranks quantise other blocks than the trainer.",
        "N = 576 over tp = 2 with 128-row blocks: the border 288 is inside a block.",
        "choose a tensor-parallel size for {fqn} that gives {expected}, or quantise before cutting",
        "4.4",
    ),
    Rule(
        "JG008",
        "KV cache format",
        _V,
        _FIND,
        "K or V reach attention in another precision than in training.",
        "The engine runs with kv_cache_dtype=fp8, the trainer attends over bf16 K and V.",
        "set the engine's KV cache to {expected}, or train with {got}",
        "3.8",
    ),
    Rule(
        "JG009",
        "double quantisation",
        _V,
        _FIND,
        "A tensor is quantised twice on one side: the second amax sees rounded values.",
        "The engine re-quantises weights that a checkpoint already holds in FP8.",
        "load the codes of {fqn} as they are instead of quantising them again",
        "4.7",
    ),
    Rule(
        "JG010",
        "accumulation or output format",
        _V,
        _FIND,
        "A GEMM hands its result out in another format: its output was not FP32 before the declared round.",
        "The engine's GEMM accumulates in bf16 where the trainer's gives f32 and a round follows.",
        "use a GEMM with {expected} output for {fqn} in the engine",
        "3.2",
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
        "3.2",
    ),
    Rule(
        "JG012",
        "operand order",
        _V,
        _FIND,
        "The right operation reads the right kind of value from the wrong place.",
        "gate and up are swapped: silu is applied to up.",
        "connect {op} at {fqn} to {expected} in the engine",
        "3.2",
    ),
    Rule(
        "JG013",
        "parameter identity",
        _V,
        _FIND,
        "A module uses another parameter than the trainer's module of the same place.",
        "A loader off by one gives layer 7 the k_proj of layer 8.",
        "load {expected} into {fqn} of the engine",
        "3.9",
    ),
    Rule(
        "JG014",
        "precision island on one side only",
        _V,
        _FIND,
        "An operand is quantised on one side and not on the other.",
        "Rollout runs FP8 linears, training runs bf16 ones: the naive setting.",
        "give {fqn} one precision on both sides: the trainer has {expected}, the engine {got}",
        "3.5",
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
        "5.2",
    ),
    Rule(
        "JG016",
        "reduction order",
        _Q,
        Stage.REDUCTION,
        "Partial sums of a row-parallel shard are added over an FP32 wire in another order: contained modulo reduction "
        "order. BF16 partials are a rounding difference (JG004).",
        "o_proj over tp = 8, all-reduced in FP32: eight partial sums instead of one.",
        "give {fqn} {expected} in the engine, or accept containment modulo reduction order",
        "4.5",
        "reduction order",
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
        "3.9",
    ),
    Rule(
        "JG018",
        "version vector",
        _Q,
        _DECL,
        "KV entries were written under another weight version or adapter than the one that reads them. Each token's "
        "logprob is then training's at the versions its past was written with, not at one version.",
        "A partial rollout continues after a weight update on the old prefix cache.",
        "drop these KV entries at the update ({fqn}), or score each token with the version that wrote it",
        "3.10",
        "version vector",
    ),
    Rule(
        "JG019",
        "row coupling",
        _V,
        _EVID,
        "A token's result depends on other tokens of the batch, so prefill, decode and padding are not one function.",
        "Per-tensor dynamic activation scales; a scale group of 128 tokens; a mask that is not causal.",
        "use a row-local form for {op} at {fqn}: {expected}",
        "3.11",
    ),
    Rule(
        "JG020",
        "observable chain",
        _V,
        _FIND,
        "What is observed differs although the network agrees: head cast, soft cap, temperature, log-softmax, gather; "
        "or the engine is set to return logprobs of what temperature, top-k and top-p make of the logits.",
        "The engine reports logprobs of temperature-scaled logits, the trainer of raw ones.",
        "make the observable {fqn} be {expected} in the engine",
        "3.8",
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
        "2.1",
    ),
    Rule(
        "JG022",
        "MoE routing",
        _V,
        _FIND,
        "Expert routing differs: score function, bias, renormalisation, tie-break, combine order or format, replayed "
        "or computed selection, or the precision of the router. A capacity limit couples tokens and is JG019.",
        "The engine renormalises the scores of the top-k experts, the trainer does not.",
        "make the routing of {fqn} use {expected} instead of {got} in the engine",
        "3.12",
    ),
    Rule(
        "JG090",
        "unregistered op",
        _U,
        _EVID,
        "An operation is outside the vocabulary; nothing is known about it.",
        "An engine update brings a custom op without a declared expansion.",
        "declare an expansion for {got} (jetgraph/ops.py and the lifter's table)",
        "1.4",
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
        "6.4",
    ),
    Rule(
        "JG092",
        "compiler below the graph",
        _U,
        _EVID,
        "The graph was lowered by a compiler that is not known to keep every cast the graph shows.",
        "Inductor may keep FP32 in registers across ops that FX shows as rounded.",
        "run the {op} side with compiler {expected}, or show that {got} keeps casts",
        "1.9",
    ),
    Rule(
        "JG093",
        "replay gate",
        _U,
        _EVID,
        "Interpreting the lifted graph was not shown to reproduce the captured run bit for bit.",
        "A lifter without replay, or one case that differs.",
        "run the replay gate on the {op} graph until all cases pass",
        "1.8",
    ),
    Rule(
        "JG094",
        "uncovered guard or later graph",
        _U,
        _DECL,
        "The trainer's graph holds only under a guard that the engine's guards do not imply, or the engine compiled "
        "another graph for this model that was not verified.",
        "A trainer graph traced under 'positions are consecutive' against packed rollouts.",
        "serve only {expected}; verify anything else before it serves",
        "1.10",
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
        "3.8",
    ),
]

RULES: dict[str, Rule] = {row.id: row for row in _ROWS}
