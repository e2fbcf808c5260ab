"""``jetgraph.*`` of a run's configuration: what is asked, and what the rest of the configuration must be for it.

jetgraph.policy=jet              the policy's name or a path to its JSON; null (the default) leaves VeRL as it is
jetgraph.enforcement=start       off | warn | start | always (`jetgraph.admission.Enforcement`)
jetgraph.waivers=waivers.json    exceptions by rule and node, each with a last day
jetgraph.folder=…                graphs, certificate, manifest, sync reports; default_local_dir/jetgraph-run
jetgraph.rounding=nearest        how an optimizer step rounds BF16 masters: nearest | stochastic | kahan | split
jetgraph.codegen=auto            what runs training's graphs: auto | fx, operator by operator and nothing fused
jetgraph.baseline=…              whose limits raise alarms: a stored BF16/BF16 baseline's name or file; null is the
                                 field's usual limits (`jetgraph.mismatch.FIELD_LIMITS`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from jetgraph.admission import DRAFT, Enforcement, load_waivers
from jetgraph.export import declare, rollout_linears
from jetgraph.mismatch import FIELD_LIMITS, Baseline, Limit, stored_baseline
from jetgraph.model_linears import linears_of_config
from jetgraph.policy import Policy, get_policy
from jetgraph_verl.engine_options import engine_contradictions, fit_engine

ROUNDINGS = ("nearest", "stochastic", "kahan", "split")
CODEGENS = ("auto", "fx")
KEYS = ("policy", "enforcement", "waivers", "folder", "rounding", "codegen", "baseline")


class OptionsError(ValueError):
    """The configuration asks for something that the precision flow cannot be, or be proven, under."""


@dataclass(frozen=True)
class Options:
    """What a worker needs to know; plain, because it travels inside VeRL's configuration."""

    rules: Mapping[str, Any]
    """The whole policy, `Policy.to_plain`: workers may not see the file that the driver read it from."""
    enforcement: str
    folder: str
    waivers: str | None = None
    rounding: str = "nearest"
    baseline: str | None = None
    codegen: str = "auto"

    @property
    def policy(self) -> Policy:
        return Policy.from_plain(dict(self.rules))

    @classmethod
    def of(cls, config: DictConfig) -> Options:
        """The options that `prepare` left for the workers under ``actor_rollout_ref.jetgraph``."""
        return cls(**OmegaConf.to_container(config.jetgraph, resolve=True))  # type: ignore[arg-type]


def prepare(config: DictConfig) -> Options | None:
    """Read ``jetgraph.*`` and fit the run's configuration to it; None if the run asks for no policy.

    Raises:
        OptionsError: an unknown key or value; or settings of the run that contradict the policy, all of them at once.
        PolicyError, WaiverError: the policy does not fit the model, or the waivers cannot be read.
    """
    asked = config.get("jetgraph") or OmegaConf.create()
    if unknown := [str(key) for key in asked if key not in KEYS]:
        raise OptionsError(f"jetgraph.{unknown[0]} does not exist; jetgraph has {', '.join(KEYS)}")
    if asked.get("policy") is None:
        return None
    refusals = list(_contradictions(config))
    if refusals:
        raise OptionsError("jetgraph.policy cannot hold in this run:\n- " + "\n- ".join(refusals))
    policy = get_policy(asked.policy)
    enforcement = asked.get("enforcement", "start")
    enforcement = "off" if enforcement is False else str(enforcement)  # YAML reads a bare off as False
    if enforcement not in [str(e) for e in Enforcement]:
        raise OptionsError(f"jetgraph.enforcement={enforcement}: choose one of {', '.join(map(str, Enforcement))}")
    rounding = str(asked.get("rounding", "nearest"))
    if rounding not in ROUNDINGS:
        raise OptionsError(f"jetgraph.rounding={rounding}: choose one of {', '.join(ROUNDINGS)}")
    codegen = str(asked.get("codegen", "auto"))
    if codegen not in CODEGENS:
        raise OptionsError(f"jetgraph.codegen={codegen}: choose one of {', '.join(CODEGENS)}")
    waivers = asked.get("waivers")
    if waivers is not None:
        load_waivers(waivers)  # a file that cannot be read stops the run here, not after the workers have started
        waivers = str(Path(waivers).resolve())
    masters = config.actor_rollout_ref.actor.fsdp_config.get("model_dtype") or "fp32"
    if rounding != "nearest" and str(masters) not in ("bfloat16", "bf16"):
        raise OptionsError(
            f"jetgraph.rounding={rounding} rounds BF16 masters, and actor.fsdp_config.model_dtype is {masters}: set it "
            "to bfloat16, or leave the rounding at nearest"
        )
    baseline = asked.get("baseline")
    limits(baseline)
    # not "jetgraph": a process that starts beside a folder of that name would import it instead of the package
    folder = Path(asked.get("folder") or Path(config.trainer.default_local_dir) / "jetgraph-run").resolve()
    if folder.name == "jetgraph":
        raise OptionsError(f"jetgraph.folder={folder}: a process started beside it would import it; use another name")
    if waivers is not None and Path(waivers) == folder / DRAFT:
        raise OptionsError(
            f"jetgraph.waivers={waivers}: every start writes this draft anew; sign a copy of it elsewhere"
        )
    options = Options(policy.to_plain(), enforcement, str(folder), waivers, rounding, baseline, codegen)
    _fit(config, options)
    return options


def limits(baseline: str | None) -> tuple[Limit, ...]:
    """What mismatch raises an alarm: a measured BF16/BF16 baseline's limits, by its name or file, or the field's.

    Raises:
        OptionsError: there is no such baseline.
    """
    if baseline is None:
        return FIELD_LIMITS
    try:
        return (Baseline.load(baseline) if Path(baseline).is_file() else stored_baseline(baseline)).limits()
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise OptionsError(f"jetgraph.baseline={baseline}: no stored baseline and no file of one: {error}") from error


def _contradictions(config: DictConfig) -> Iterator[str]:
    actor, rollout, model = (config.actor_rollout_ref[part] for part in ("actor", "rollout", "model"))
    if not config.trainer.get("use_v1", True):
        yield "trainer.use_v1=False: the gate lives in VeRL's V1 trainer"
    if config.trainer.v1.trainer_mode != "sync":
        yield f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: only 'sync' is supported"
    if actor.strategy != "fsdp2":
        yield f"actor.strategy={actor.strategy}: expected fsdp2, whose parameters keep their names and shapes"
    reference = config.actor_rollout_ref.get("ref") or {}
    if (found := reference.get("strategy", actor.strategy)) != actor.strategy:
        yield f"ref.strategy={found}: expected the actor's, {actor.strategy}; the reference would not run the policy"
    reward = (config.get("reward") or {}).get("reward_model") or {}
    if reward.get("enable") and not reward.get("enable_resource_pool"):
        yield (
            "reward.reward_model.enable without enable_resource_pool: after a colocated reward model VeRL sends "
            "weights of no version"
        )
    if rollout.name != "vllm":
        yield f"rollout.name={rollout.name}: expected vllm"
    if rollout.get("quantization") is not None:
        yield f"rollout.quantization={rollout.quantization}: VeRL would quantise by its own rule; leave it null"
    for key in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if rollout.get(key, 1) != 1:
            yield f"rollout.{key}={rollout[key]}: expected 1, weight sync writes one rank of an engine"
    if (float(rollout.temperature), float(rollout.top_p)) != (1.0, 1.0) or int(rollout.top_k) not in (-1, 0):
        yield (
            f"rollout.temperature={rollout.temperature}, top_p={rollout.top_p}, top_k={rollout.top_k}: expected 1, 1 "
            "and -1; training's graph scores the raw logits, and no other distribution may be sampled (JG020)"
        )
    if rollout.enforce_eager:
        yield "rollout.enforce_eager=True: an eager engine has no graph to capture; set it to False"
    if rollout.checkpoint_engine.backend != "naive":
        yield f"rollout.checkpoint_engine.backend={rollout.checkpoint_engine.backend}: expected naive (colocated)"
    if model.get("lora_rank", 0) or (model.get("lora") or {}).get("rank", 0):
        yield "model.lora_rank: adapters would run beside the quantised linears in BF16 on one side only"
    if model.get("use_liger") or model.get("use_fused_kernels"):
        yield "model.use_liger / use_fused_kernels: these replace the operators that the graph is captured from"
    if config.actor_rollout_ref.actor.get("fsdp_config", {}).get("ulysses_sequence_parallel_size", 1) != 1:
        yield "actor.fsdp_config.ulysses_sequence_parallel_size: expected 1"
    yield from engine_contradictions((rollout.get("engine_kwargs") or {}).get("vllm") or {})


def _fit(config: DictConfig, options: Options) -> None:
    """Settings that follow from the policy, so that nobody has to know them."""
    shared = config.actor_rollout_ref
    folder = Path(shared.model.path)
    linears = rollout_linears(options.policy, linears_of_config(folder))
    declaration = declare(options.policy, "exact", linears)
    with open_dict(config):
        shared.jetgraph = asdict(options)
        shared.rollout.load_format = "dummy"  # the first sync brings weights, quantised by the trainer
        shared.rollout.calculate_log_probs = True
        shared.rollout.logprobs_mode = "raw_logprobs"  # the same numbers at temperature 1 without top-p and top-k
        shared.rollout.dtype = "bfloat16"
        fit_engine(_section(shared.rollout.engine_kwargs, "vllm"), declaration)
        environment = _section(_section(config.ray_kwargs.ray_init, "runtime_env"), "env_vars")
        environment["VLLM_USE_AOT_COMPILE"] = "0"  # a capture needs a real compilation
        environment["VLLM_DISABLE_COMPILE_CACHE"] = "1"
        environment["VERL_DISABLE_FLASH_ATTN_CE"] = "1"
        environment["JETGRAPH_PLAIN_LINEAR"] = "1"  # without effect on a GPU


def _section(parent: DictConfig, key: str) -> DictConfig:
    """``parent[key]`` itself, made if it is missing or null; `DictConfig.setdefault` returns what it made a copy of."""
    if parent.get(key) is None:
        parent[key] = {}
    return parent[key]
