"""`jetgraph.compile`: the path of the architecture as one function.

    model ──regions──▶ Backend ──joint graph──▶ quantise linears ──▶ row-invariant GEMMs ──partition──▶ runs

The model stays the Hugging Face module it was: same class, parameters, names and state_dict.  What is new hangs on
`model.jetgraph`, a `Compiled`: coverage, compile times, and `capture()`, which records a live step and lifts it to the
`PrecisionGraph` of what ran.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.fx import GraphModule

import jetgraph.lowering.torch_ops  # noqa: F401  (registers torch.ops.jetgraph)
from jetgraph.capture import Backend, run_region
from jetgraph.graph import Role
from jetgraph.passes.quantize_linears import LoweredGemm, quantize_linears
from jetgraph.passes.row_invariant_gemms import make_gemms_row_invariant
from jetgraph.passes.saved import SavedTensor, saved_tensors
from jetgraph.policy import LinearPrecision, Policy, get_policy

PROVIDERS = ("reference", "stock")


class CompileError(RuntimeError):
    """The model cannot run the policy: says which module and why."""


@dataclass
class Compiled:
    """What `jetgraph.compile` knows of a model; found at ``model.jetgraph``."""

    model: torch.nn.Module
    policy: Policy
    provider: str
    regions: dict[str, Backend] = field(default_factory=dict)
    """FQN of each compiled region → its backend; regions that decide alike share one."""

    def __reduce__(self) -> tuple:
        raise CompileError("a compiled model is not pickled whole: save model.state_dict(), load it and compile again")

    @property
    def seconds(self) -> float:
        """Time spent in the compiler so far."""
        return sum(c.seconds for b in set(self.regions.values()) for c in b.compiled)

    @property
    def num_compiles(self) -> int:
        return sum(len(b.compiled) for b in set(self.regions.values()))

    def linears(self) -> dict[str, LinearPrecision]:
        """Every linear of the model and what the policy demands of it in training."""
        return {
            name: self.policy.linear(name)
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }

    def saved(self) -> list[SavedTensor]:
        """What each compiled region keeps for backward, and for whom."""
        return [
            tensor
            for name, backend in _first_names(self.regions).items()
            if (compiled := backend.last_trained) is not None
            for tensor in saved_tensors(compiled.forward, compiled.backward, name)  # type: ignore[arg-type]
        ]


def compile(model: torch.nn.Module, policy: str | Policy = "jet", *, provider: str = "reference") -> torch.nn.Module:
    """Make ``model`` train in the precision flow of ``policy``; returns the same module.

    Args:
        model: a Hugging Face causal LM in BF16 (its parameters are the masters).  Decoder blocks and the head are
            compiled where they stand; everything else keeps running as it is.
        policy: a `Policy` or its name: ``jet``, ``bf16``, ``bf16_train_fp8_rollout``.
        provider: ``reference`` runs the exact, row-invariant kernels that the rollout plugin runs too; ``stock`` leaves
            torch's own attention and BF16 GEMMs (and cannot serve an FP8 policy bit for bit against a rollout).

    Raises:
        ValueError: unknown policy or provider.
        CompileError: the model has no decoder blocks, or is compiled already.
    """
    chosen = get_policy(policy)
    if provider not in PROVIDERS:
        raise ValueError(f"provider {provider!r} does not exist; choose one of {', '.join(PROVIDERS)}")
    if getattr(model, "jetgraph", None) is not None:
        raise CompileError("this model is compiled already; load it again to compile it with another policy")
    regions = find_regions(model)
    check_masters(model)
    check_scope(model, [name for name, _ in regions], chosen)
    compiled = Compiled(model, chosen, provider)
    model.config = copy.deepcopy(model.config)  # models made from one config object share it
    model.config.use_cache = False  # a training step fills no KV cache; `generate` asks for one itself
    if provider == "reference":
        from jetgraph.lowering.attention import use_reference_attention

        use_reference_attention(model)  # type: ignore[arg-type]
        make_head_row_invariant(model)
    backends: dict[tuple, Backend] = {}
    for name, module in regions:
        decisions = _decisions(module, name, chosen)
        signature = (type(module), tuple(sorted(decisions.items())))
        if signature not in backends:
            backends[signature] = Backend(name, _lowering(decisions, chosen, provider))
        compiled.regions[name] = backends[signature]
        module.compile(backend=backends[signature], fullgraph=True)
        module._compiled_call_impl = run_region(name, module._compiled_call_impl)  # type: ignore[assignment, arg-type]
        object.__setattr__(module, "__deepcopy__", _refuse_copy)
    object.__setattr__(model, "jetgraph", compiled)
    object.__setattr__(model, "__deepcopy__", partial(_copy_compiled, model))
    return model


def check_masters(model: torch.nn.Module) -> None:
    """The parameters are the BF16 masters that both sides quantise.

    Raises:
        CompileError: a parameter has another floating dtype; names it.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.bfloat16:
            raise CompileError(
                f"{name} is {parameter.dtype}; expected torch.bfloat16 masters: load with dtype=torch.bfloat16"
            )


def check_scope(model: torch.nn.Module, regions: list[str], policy: Policy) -> None:
    """Every linear that the policy quantises must lie in a compiled region.

    Raises:
        CompileError: one does not, and would silently run in BF16.
    """
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{region}.") for region in regions)
        if isinstance(module, torch.nn.Linear) and policy.linear(name).quantized and not inside:
            raise CompileError(
                f"policy {policy.name!r} quantises {name}, which lies outside the compiled blocks ({regions[0]} …); "
                "it would silently run in BF16"
            )


def _copy_compiled(model: torch.nn.Module, memo: dict) -> torch.nn.Module:
    """`copy.deepcopy` of a compiled model: a copy compiled with the same policy, never a silent BF16 one."""
    compiled: Compiled = model.jetgraph  # type: ignore[assignment]
    held = [(m, m.__dict__.pop("__deepcopy__")) for m in model.modules() if "__deepcopy__" in m.__dict__]
    del model.__dict__["jetgraph"]
    try:
        twin = copy.deepcopy(model, memo)
    finally:
        for module, hook in held:
            object.__setattr__(module, "__deepcopy__", hook)
        object.__setattr__(model, "jetgraph", compiled)
    return compile(twin, compiled.policy, provider=compiled.provider)


def _refuse_copy(memo: dict) -> torch.nn.Module:
    raise CompileError("a compiled block cannot be copied alone (the copy would run in BF16); copy the whole model")


def find_regions(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules to compile: every decoder block, i.e. each element of the longest `nn.ModuleList` of one class."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(m) for m in module}) == 1
    ]
    if not lists:
        raise CompileError(f"{type(model).__name__} has no list of equal decoder blocks to compile")
    name, blocks = max(lists, key=lambda item: (len(item[1]), -item[0].count(".")))
    return [(f"{name}.{i}", block) for i, block in enumerate(blocks)]


class RowInvariantLinear(torch.nn.Linear):
    """An unquantised linear outside the blocks (the head) whose rows do not depend on how many there are.

    `nn.Linear` with another forward: the module keeps its name, parameters and state_dict.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ops.jetgraph.row_tile_gemm(input, self.weight)


def make_head_row_invariant(model: torch.nn.Module) -> None:
    """Give the output embedding the row-invariant GEMM; it is called as it is, outside the compiled blocks."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if isinstance(head, torch.nn.Linear):
        if head.bias is not None:
            raise CompileError("the output head has a bias, for which there is no row-invariant kernel")
        head.__class__ = RowInvariantLinear


def _decisions(module: torch.nn.Module, name: str, policy: Policy) -> dict[str, LinearPrecision]:
    """Relative FQN → precision for every linear of a region (the region itself has the empty FQN)."""
    return {
        relative: policy.linear(f"{name}.{relative}" if relative else name)
        for relative, part in module.named_modules()
        if isinstance(part, torch.nn.Linear)
    }


def _lowering(
    decisions: dict[str, LinearPrecision], policy: Policy, provider: str
) -> Callable[[GraphModule], list[LoweredGemm]]:
    """The passes of one region, and the check that none of its linears was missed."""

    def lower(module: GraphModule) -> list[LoweredGemm]:
        lowered = quantize_linears(module, decisions.__getitem__, policy.wgrad_source)
        missed = {fqn for fqn, p in decisions.items() if p.quantized} - {
            gemm.fqn for gemm in lowered if gemm.role is Role.FPROP
        }
        if missed:
            raise CompileError(
                f"linears {sorted(missed)} are FP8 in policy {policy.name!r}, but their forward GEMM was not found in "
                "the captured graph; they would silently run in BF16"
            )
        if provider == "reference":
            make_gemms_row_invariant(module)
        return lowered

    return lower


def _first_names(regions: dict[str, Backend]) -> dict[str, Backend]:
    first: dict[str, Backend] = {}
    for name, backend in regions.items():
        if backend not in first.values():
            first[name] = backend
    return first
