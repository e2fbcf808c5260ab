"""`jetgraph.compile`: the path of the architecture as one function.

    model ──linears declare their precision──▶ regions ──▶ Backend ──joint graph──▶ quantise linears ──partition──▶ runs

The model stays the Hugging Face module it was: same class, parameters, names and state_dict.  What is new hangs on
`model.jetgraph`, a `Compiled`: what ran, compile times, what is saved for backward.  `jetgraph.trainer.capture_step`
takes it, records a live step and lifts it to the `PrecisionGraph` of what ran.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from jetgraph import exported
from jetgraph.backend import Backend, run_region
from jetgraph.codegen import CODEGENS
from jetgraph.coverage import Coverage, coverage
from jetgraph.errors import CompileError
from jetgraph.followed import follow, get_followed
from jetgraph.graph import Role
from jetgraph.linear import Linear, check_convertible, convert
from jetgraph.lowering import registry
from jetgraph.lowering.kernels import Kernels
from jetgraph.lowering.linear_ops import linear_requests
from jetgraph.lowering.weight_codes import Held, hold
from jetgraph.passes.fuse import Fusion, fuse
from jetgraph.passes.linears import find_plain_linears
from jetgraph.passes.quantize_linears import LoweredGemm, quantize_linears
from jetgraph.passes.row_means import DEVICES as ROW_MEAN_DEVICES
from jetgraph.passes.row_means import row_means
from jetgraph.passes.saved import SavedTensor, saved_tensors
from jetgraph.policy import LinearPrecision, Policy, check_matches, get_policy
from jetgraph.scope import check_supported

PROVIDERS = ("reference", "stock")
SCOPES = ("blocks", "whole")
MASTERS = (torch.bfloat16, torch.float32)
CPU = torch.device("cpu")


@dataclass
class Compiled:
    """What `jetgraph.compile` knows of a model; found at ``model.jetgraph``.

    A copy of the model carries it along.  An unpickled model has no compiled regions: its linears still run the
    declared precision, and `jetgraph.compile` compiles its blocks again, with the options of that call.
    """

    model: torch.nn.Module
    policy: Policy
    provider: str
    scope: str = "blocks"
    codegen: str = "fx"
    kernels: Kernels = field(default_factory=Kernels)
    fused: bool = False
    engine: str | None = None
    """Whose own arithmetic the model follows (`jetgraph.followed`); None: engines follow the model."""
    device: torch.device = CPU
    """Where it was compiled to run."""
    regions: dict[str, Backend] = field(default_factory=dict)
    """FQN of each compiled region → its backend; regions that decide alike share one."""
    tried: list[Fusion] = field(default_factory=list)

    def __reduce__(self) -> tuple:
        options = self.policy, self.provider, self.scope, self.codegen, self.kernels, self.fused, self.engine
        return _unpickled, options, {"model": self.model}

    @property
    def seconds(self) -> float:
        """Time spent in the compiler so far."""
        return sum(c.seconds for b in set(self.regions.values()) for c in b.compiled)

    @property
    def num_compiles(self) -> int:
        return sum(len(b.compiled) for b in set(self.regions.values()))

    def linears(self) -> dict[str, LinearPrecision]:
        """Every linear of the model and what it was declared to run in training."""
        return {
            name: module.precision if isinstance(module, Linear) else self.policy.linear(name)
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }

    def coverage(self) -> Coverage:
        """What every linear ran as so far; ``coverage().require()`` after a step proves that none was left out."""
        report = coverage(self.model, self.policy, self.regions, reference=self.provider == "reference")
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        if self.provider == "reference" and attention not in (None, "jetgraph"):
            switched = f"attention {attention!r} was set after compile; expected 'jetgraph'"
            report = dataclasses.replace(report, others=(switched,))
        return report

    def codegens(self) -> dict[str, str]:
        """What runs the newest graphs of each kind of region, and why not Inductor where it was asked for."""
        return {
            f"{name or 'the model'} {kind}": execution.by + (f": {execution.reason}" if execution.reason else "")
            for name, backend in _first_names(self.regions).items()
            for variant in backend.compiled
            for kind, execution in variant.executions.items()
        }

    def fusions(self) -> list[Fusion]:
        """Every fusion that was tried so far, once for each graph, with the reason of a refusal."""
        return list(self.tried)

    def hold_weights(self) -> AbstractContextManager[Held]:
        """A block of one optimizer step in which each weight is quantised once, for all forwards and backwards in it.

        Raises:
            StaleWeights: on leaving the block, if a weight changed within it in a way that torch does not count.
        """
        return hold(self.model.named_parameters())

    def saved(self) -> list[SavedTensor]:
        """What each compiled region keeps for backward, and for whom."""
        return [
            tensor
            for name, backend in _first_names(self.regions).items()
            if (compiled := backend.last_trained) is not None
            for tensor in saved_tensors(compiled.forward, compiled.backward, name)  # type: ignore[arg-type]
        ]


def compile(
    model: torch.nn.Module | ExportedProgram,
    policy: str | Policy = "jet",
    *,
    provider: str = "reference",
    scope: str = "blocks",
    codegen: str = "auto",
    kernels: str = "auto",
    fused: bool | None = None,
    engine: str | None = None,
    device: torch.device | str | None = None,
) -> torch.nn.Module:
    """Make ``model`` train in the precision flow of ``policy``; returns the same module.

    Args:
        model: a Hugging Face causal LM.  Its parameters are the masters: BF16, or FP32 for training under
            ``torch.autocast(dtype=torch.bfloat16)`` or FSDP2 with ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``,
            which cast them to BF16 once before they are quantised.  Or a `torch.export` program of one, which is
            compiled whole.
        policy: a `Policy`, its name (``jetgraph policy show`` lists them) or a path to its JSON.
        provider: ``reference`` runs the exact, row-invariant kernels that the rollout plugin runs too; ``stock`` leaves
            torch's own attention and BF16 GEMMs (and cannot serve an FP8 policy bit for bit against a rollout).
        scope: what is captured as one graph: ``blocks``, each decoder block where it stands (equal blocks compile
            once), or ``whole``, the model.  Linears outside run their declared precision eagerly.
        codegen: ``fx`` runs the lowered graphs operator by operator; ``inductor`` makes kernels of what lies between
            GEMMs, of a forward only if they keep every bit (`jetgraph.codegen`: tested when they are made); ``auto`` is
            ``inductor`` on a GPU.
        kernels: whose FP8 GEMMs run: ``auto`` (the fastest that serves the shape and, in FPROP, whose rows do not
            depend on each other), a provider's name, or a name per role as ``dgrad=triton,wgrad=cublaslt``;
            `jetgraph doctor` lists them.  On a CPU it is the reference.  Linears that run outside compiled blocks take
            the registry's own choice.
        fused: quantise where a norm, an activation or a gradient is computed, in one operator.  The same bits, checked
            for each fusion when it is applied; ``model.jetgraph.fusions()`` lists them.  By default where
            the provider `triton_fused` runs; elsewhere the definitions do, which save memory but no time.
        engine: ``vllm-stock`` lets training follow what stock vLLM computes, without our plugin: its scale rule, its
            norms and rotary embedding (`jetgraph.followed`).  ``model.jetgraph.policy`` is then the policy to export.
        device: where the model will run, if it is moved there after this call, as FSDP2 moves what it shards; by
            default where its parameters are.

    Raises:
        ValueError: unknown policy, provider, scope, codegen, kernels or engine, or a policy rule that matches nothing
            in the model.
        PolicyError: a recipe that the followed engine cannot compute.
        ProviderError: the kernels that were asked for cannot run one of the model's GEMMs; nothing is changed.
        CompileError: the model has no decoder blocks, is compiled already, or holds something that cannot run the
            policy.
    """
    chosen = get_policy(policy) if engine is None else get_followed(engine).policy(get_policy(policy))
    for what, value, known in (
        ("provider", provider, PROVIDERS),
        ("scope", scope, SCOPES),
        ("codegen", codegen, CODEGENS),
    ):
        if value not in known:
            raise ValueError(f"{what} {value!r} does not exist; choose one of {', '.join(known)}")
    wanted = Kernels.parse(kernels)
    if isinstance(model, ExportedProgram):
        model, scope = exported.module_of(model), "whole"
    if engine is not None and provider != "reference":
        raise ValueError(f"provider {provider!r} cannot follow {engine}: its rounding needs provider 'reference'")
    asked = chosen, provider, engine
    compiled: Compiled | None = getattr(model, "jetgraph", None)
    if compiled is not None and (compiled.regions or (compiled.policy, compiled.provider, compiled.engine) != asked):
        raise CompileError("this model is compiled already; load it again to compile it with another policy")
    find_regions(model, scope)
    if hasattr(model, "config"):
        check_supported(model, reference_attention=provider == "reference")
    check_masters(model)
    check_matches(chosen, [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)])
    device = torch.device(device) if device is not None else next((p.device for p in model.parameters()), CPU)
    check_kernels(model, chosen, wanted, device)
    if compiled is None:
        if engine is not None:
            follow(model, device)
        if hasattr(model, "config"):
            model.config = copy.deepcopy(model.config)  # models made from one config object share it
            model.config.use_cache = False  # a training step fills no KV cache; `generate` asks for one itself
        if provider == "reference":
            _use_reference_attention(model)
        declare_precision(model, chosen, provider)
    if codegen == "auto":
        codegen = "inductor" if device.type == "cuda" else "fx"
    if fused is None:
        fused = registry.probe("triton_fused", device).ok
    _compile_regions(model, Compiled(model, chosen, provider, scope, codegen, wanted, fused, engine, device))
    return model


def _use_reference_attention(model: torch.nn.Module) -> None:
    from jetgraph.lowering.attention import use_reference_attention

    attention = exported.plain_attention(model)
    if attention is not None:
        raise CompileError(
            f"the exported program runs torch's own attention ({attention}), which provider 'reference' does not; "
            "compile it with provider='stock', or export a model that jetgraph.compile has compiled"
        )
    if hasattr(model, "config"):
        use_reference_attention(model)  # type: ignore[arg-type]


def declare_precision(model: torch.nn.Module, policy: Policy, provider: str) -> None:
    """Turn every linear that the policy quantises, and with the reference provider every other, into `Linear`.

    All are checked before the first is changed, so a refused model is left as it was.

    Raises:
        CompileError: one of them is a subclass of `nn.Linear` with a forward of its own, or stands at two places to
            which the policy gives two precisions.
    """
    places = [
        (name, module, policy.linear(name))
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.Linear)
    ]
    declared: dict[int, tuple[str, LinearPrecision]] = {}
    for name, module, precision in places:
        first, other = declared.setdefault(id(module), (name, precision))
        if other.without_reason() != precision.without_reason():
            raise CompileError(
                f"{first} and {name} are one layer; policy {policy.name!r} gives it two precisions "
                f"({other.reason} and {precision.reason})"
            )
        if precision.quantized or provider == "reference":
            check_convertible(module, name, precision)
    for name, module, precision in reversed(places):  # the first name of a shared layer is the one that stays
        if precision.quantized or provider == "reference":
            convert(module, name, precision)


def _compile_regions(model: torch.nn.Module, compiled: Compiled) -> None:
    backends: dict[tuple, Backend] = {}
    for part in model.modules():
        if isinstance(part, Linear):
            part.num_eager_calls = 0  # what a copy or an unpickled model ran before says nothing of this one
    for name, module in find_regions(model, compiled.scope):
        decisions = _decisions(module)
        signature = (type(module), tuple(sorted(decisions.items())))
        if signature not in backends:
            lower = _lowering(decisions, _twins(module), name, compiled)
            backends[signature] = Backend(name, lower, compiled.codegen)
        backend = compiled.regions[name] = backends[signature]
        check = partial(_refuse_undeclared, module, name, compiled.policy)
        _compile_region(name, module, backend, check, _proof_of_masks(module, compiled))
    for name, norm in final_norms(model) if compiled.scope == "blocks" else ():
        if compiled.device.type in ROW_MEAN_DEVICES:
            _compile_region(name, norm, Backend(name, _lower_norm, compiled.codegen), lambda: None)
    object.__setattr__(model, "jetgraph", compiled)
    object.__setattr__(model, "__deepcopy__", partial(_copy_compiled, model))


def _compile_region(
    name: str, module: torch.nn.Module, backend: Backend, check: Callable[[], None], proof: Callable | None = None
) -> None:
    module.compile(backend=backend, fullgraph=True)
    run = run_region(name, backend, module, module._compiled_call_impl, check, proof)  # type: ignore[arg-type]
    module._compiled_call_impl = run  # type: ignore[assignment]


def _lower_norm(module: GraphModule) -> list[LoweredGemm]:
    row_means(module)
    return []


def final_norms(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The norms beside the decoder blocks: they too sum along rows, and run outside the blocks' graphs."""
    blocks = find_regions(model)[0][0].rpartition(".")[0]
    parent = blocks.rpartition(".")[0]
    return [
        (_join(parent, name), child)
        for name, child in model.get_submodule(parent).named_children()
        if type(child).__name__.endswith("Norm")
    ]


def _proof_of_masks(model: torch.nn.Module, compiled: Compiled) -> Callable | None:
    """Block by block, masks are proven outside the blocks; a model traced whole needs the proof before it runs."""
    if compiled.scope != "whole" or compiled.provider != "reference" or not hasattr(model, "config"):
        return None
    from jetgraph.lowering.attention import proven_plain

    return proven_plain(model)


def check_masters(model: torch.nn.Module) -> None:
    """The parameters are the masters that both sides quantise a BF16 copy of.

    Raises:
        CompileError: a parameter has another floating dtype; names it.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in MASTERS:
            raise CompileError(
                f"{name} is {parameter.dtype}; expected torch.bfloat16 or torch.float32 masters: "
                "load with dtype=torch.bfloat16"
            )


def check_kernels(model: torch.nn.Module, policy: Policy, kernels: Kernels, device: torch.device) -> None:
    """Probe the providers now, on the device where the model will run, and ask them about every GEMM to come.

    Raises:
        ProviderError: a provider that was asked for cannot run one of them; names the linear.
    """
    for fqn, module in model.named_modules():
        precision = policy.linear(fqn)
        if isinstance(module, torch.nn.Linear) and precision.quantized and device.type != "meta":
            has_bias = module.bias is not None
            gemms = linear_requests(module.out_features, module.in_features, has_bias, precision)
            kernels.check([(fqn, gemm) for gemm in gemms], device)


def _copy_compiled(model: torch.nn.Module, memo: dict) -> torch.nn.Module:
    """`copy.deepcopy` of a compiled model: a copy whose regions are compiled too."""
    hook = model.__dict__.pop("__deepcopy__")
    try:
        twin = copy.deepcopy(model, memo)
    finally:
        object.__setattr__(model, "__deepcopy__", hook)
    compiled: Compiled = model.jetgraph  # type: ignore[assignment]
    _compile_regions(twin, dataclasses.replace(compiled, model=twin, regions={}, tried=[]))
    return twin


def _unpickled(
    policy: Policy, provider: str, scope: str, codegen: str, kernels: Kernels, fused: bool, engine: str | None
) -> Compiled:
    if provider == "reference":
        from jetgraph.lowering.attention import register

        register()
    return Compiled(None, policy, provider, scope, codegen, kernels, fused, engine)  # type: ignore[arg-type]  # the model follows as state


def find_regions(model: torch.nn.Module, scope: str = "blocks") -> list[tuple[str, torch.nn.Module]]:
    """The modules to compile: the model, or every decoder block: each element of its longest list of equal modules.

    Raises:
        CompileError: there is no `nn.ModuleList` whose elements have one class.
    """
    if scope == "whole":
        return [("", model)]
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(m) for m in module}) == 1
    ]
    if not lists:
        raise CompileError(f"{type(model).__name__} has no list of equal decoder blocks to compile")
    name, blocks = max(lists, key=lambda item: (len(item[1]), -item[0].count(".")))
    return [(f"{name}.{i}", block) for i, block in enumerate(blocks)]


def _decisions(region: torch.nn.Module) -> dict[str, LinearPrecision]:
    """Relative FQN → declared precision for every converted linear of a region (the region has the empty FQN)."""
    return {name: part.precision for name, part in region.named_modules() if isinstance(part, Linear)}


def _twins(region: torch.nn.Module) -> dict[str, str]:
    """The linears whose weight is another one's too, by the first that holds it."""
    first: dict[int, str] = {}
    linears = [(name, part) for name, part in region.named_modules() if isinstance(part, Linear)]
    names = {name: first.setdefault(id(part.weight), name) for name, part in linears}
    return {name: other for name, other in names.items() if name != other}


def _lowering(
    decisions: dict[str, LinearPrecision], twins: Mapping[str, str], region: str, compiled: Compiled
) -> Callable[[GraphModule], list[LoweredGemm]]:
    """The passes of one region, and the check that it holds no linear of undeclared precision."""
    policy, tried = compiled.policy, compiled.tried

    def lower(module: GraphModule) -> list[LoweredGemm]:
        for relative in find_plain_linears(module.graph):
            _refuse_if_quantized(_join(region, relative), policy)
        row_means(module)
        lowered = quantize_linears(module, compiled.kernels)
        missed = {fqn for fqn, p in decisions.items() if p.quantized} - {
            gemm.fqn for gemm in lowered if gemm.role is Role.FPROP
        }
        for fqn in sorted(missed & twins.keys()):
            raise CompileError(
                f"{_join(region, fqn)} and {_join(region, twins[fqn])} hold one weight and read one input, so torch "
                "runs a single GEMM for both, and its two names cannot be told apart: give each a weight of its own"
            )
        if missed:
            raise CompileError(
                f"linears {sorted(missed)} of {region or 'the model'} (or of a block like it) are FP8 in policy "
                f"{policy.name!r}, but their forward does not appear in what the block runs: it may use their weights "
                "by itself, in BF16"
            )
        if compiled.fused:
            tried.extend(dataclasses.replace(f, fqn=_join(region, f.fqn)) for f in fuse(module))
        return lowered

    return lower


def _refuse_undeclared(region: torch.nn.Module, name: str, policy: Policy) -> None:
    for relative, part in region.named_modules():
        if isinstance(part, torch.nn.Linear) and not isinstance(part, Linear):
            _refuse_if_quantized(_join(name, relative), policy)


def _refuse_if_quantized(fqn: str, policy: Policy) -> None:
    """A plain linear in a region: fine where the policy keeps it in BF16."""
    precision = policy.linear(fqn)
    if precision.quantized:
        raise CompileError(
            f"{fqn} was added after jetgraph.compile and would silently run in BF16, where policy {policy.name!r} "
            f"demands FP8 ({precision.reason}). Add adapters before compiling, with a policy rule for them"
        )


def _join(region: str, relative: str) -> str:
    return ".".join(part for part in (region, relative) if part)


def _first_names(regions: dict[str, Backend]) -> dict[str, Backend]:
    first: dict[str, Backend] = {}
    for name, backend in regions.items():
        if backend not in first.values():
            first[name] = backend
    return first
