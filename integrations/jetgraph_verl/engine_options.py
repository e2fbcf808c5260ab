"""What a run may tell vLLM itself, under ``rollout.engine_kwargs.vllm``, and what the policy puts there beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

PLACE = "rollout.engine_kwargs.vllm"
REPLACED = ("dtype", "enforce_eager", "load_format", "logprobs_mode", "quantization", "worker_extension_cls")
"""vLLM's options that the run has under names of VeRL's, or that the policy decides; given here they would win."""

MODE, CUDAGRAPH_MODE, CUSTOM_OPS = 2, "NONE", "all"
MODES = {"2", "DYNAMO_TRACE_ONCE"}
REWRITES = (
    "compile_ranges_endpoints",
    "compile_sizes",
    "inductor_compile_config",
    "inductor_passes",
    "pass_config",
    "splitting_ops",
    "use_inductor_graph_partition",
)
"""Parts of a compilation_config that change what runs after, or beside, the graph that is captured."""


def engine_contradictions(engine: Mapping[str, Any]) -> Iterator[str]:
    """Why the policy could not hold, or not be proven, in an engine with these options; one line each."""
    for name in REPLACED:
        if engine.get(name) is not None:
            yield f"{PLACE}.{name}={engine[name]}: would replace what the policy or the run sets; leave it out"
    if (engine.get("hf_overrides") or {}).get("quantization_config") is not None:
        yield f"{PLACE}.hf_overrides.quantization_config: jetgraph.policy declares the engine's precision; leave it out"
    try:
        given = compilation_config(engine)
    except ValueError as error:
        yield str(error)
    else:
        yield from _compilation_contradictions(given)


def _compilation_contradictions(given: Mapping[str, Any]) -> Iterator[str]:
    place = f"{PLACE}.compilation_config"
    if (mode := given.get("mode")) is not None and str(mode).upper() not in MODES:
        yield f"{place}.mode={mode}: expected 2; in this mode vLLM runs the very graph that is captured"
    if (backend := given.get("backend")) and backend != capturing_backend():
        yield f"{place}.backend={backend}: expected none; the policy's backend records the graph and runs it as it is"
    graphs = given.get("cudagraph_mode")
    if graphs is not None and str(graphs).upper() != CUDAGRAPH_MODE:
        yield f"{place}.cudagraph_mode={graphs}: expected {CUDAGRAPH_MODE}; a capture needs every step to be run"
    for op in given.get("custom_ops") or ():
        if op == "none" or str(op).startswith("-"):
            yield f"{place}.custom_ops has {op}: expected {CUSTOM_OPS}; vLLM's formula would take the policy's place"
    for name in REWRITES:
        if given.get(name):
            yield f"{place}.{name}: changes what runs beside the graph that is captured; leave it out"


def fit_engine(engine: DictConfig, declaration: Mapping[str, Any]) -> None:
    """Put the policy's declaration and the capturing backend into vLLM's options; what else is there stays."""
    engine["hf_overrides"] = {**(engine.get("hf_overrides") or {}), "quantization_config": declaration}
    given = compilation_config(engine)
    custom_ops = [CUSTOM_OPS, *(op for op in given.get("custom_ops") or () if op != CUSTOM_OPS)]
    engine["compilation_config"] = {
        **given,
        "mode": MODE,
        "backend": capturing_backend(),
        "custom_ops": custom_ops,
        "cudagraph_mode": CUDAGRAPH_MODE,
    }


def compilation_config(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The run's own ``compilation_config``, which VeRL takes as a section or as JSON; {} if there is none.

    Raises:
        ValueError: it is neither.
    """
    given = engine.get("compilation_config")
    if OmegaConf.is_config(given):
        given = OmegaConf.to_container(given, resolve=True)
    if isinstance(given, str):
        with contextlib.suppress(ValueError):  # said below
            given = json.loads(given)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"{PLACE}.compilation_config={given}: expected a section of keys and values, or JSON of one")
    return given


def capturing_backend() -> str:
    from jetgraph_vllm.capture import BACKEND

    return BACKEND
