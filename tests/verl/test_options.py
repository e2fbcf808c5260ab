"""The one option and what follows from it, on VeRL's real configuration; no VeRL process and no Ray."""

from __future__ import annotations

import copy
import json

import pytest

pytest.importorskip("omegaconf")
pytest.importorskip("hydra")

from jetgraph_verl.options import Options, OptionsError, limits, prepare
from omegaconf import OmegaConf

from jetgraph.admission import WaiverError
from jetgraph.mismatch import FIELD_LIMITS
from jetgraph.mismatch.baselines import stored_baselines
from jetgraph.policy import get_policy

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
COMPILATION = f"{VLLM}.compilation_config"


@pytest.fixture(scope="module")
def jet_run(composed):
    """A fresh copy of one composed configuration, with settings changed; composing takes a second."""
    config = composed("jetgraph.policy=jet")

    def changed(**settings):
        run = copy.deepcopy(config)
        OmegaConf.set_struct(run, False)
        for key, value in settings.items():
            OmegaConf.update(run, key, value, force_add=True)
        OmegaConf.set_struct(run, True)
        return run

    return changed


def test_without_a_policy_nothing_is_touched(composed):
    config = composed()
    before = OmegaConf.to_container(config, resolve=False)
    assert prepare(config) is None
    assert OmegaConf.to_container(config, resolve=False) == before


def test_without_a_policy_nothing_is_refused(composed):
    assert prepare(composed(f"{ACTOR}.strategy=fsdp", f"{ROLLOUT}.temperature=0.7")) is None


CONTRADICTIONS = {
    "trainer.use_v1": (False, "trainer.use_v1=False"),
    "trainer.v1.trainer_mode": ("separate_async", "trainer.v1.trainer_mode=separate_async: only 'sync'"),
    f"{ACTOR}.strategy": ("fsdp", "actor.strategy=fsdp: expected fsdp2"),
    "actor_rollout_ref.ref.strategy": ("fsdp", "ref.strategy=fsdp: expected the actor's, fsdp2"),
    f"{ROLLOUT}.name": ("sglang", "rollout.name=sglang: expected vllm"),
    f"{ROLLOUT}.quantization": ("fp8", "rollout.quantization=fp8"),
    f"{ROLLOUT}.tensor_model_parallel_size": (2, "rollout.tensor_model_parallel_size=2: expected 1"),
    f"{ROLLOUT}.data_parallel_size": (2, "rollout.data_parallel_size=2: expected 1"),
    f"{ROLLOUT}.pipeline_model_parallel_size": (2, "rollout.pipeline_model_parallel_size=2: expected 1"),
    f"{ROLLOUT}.temperature": (0.7, "rollout.temperature=0.7"),
    f"{ROLLOUT}.top_p": (0.9, "top_p=0.9"),
    f"{ROLLOUT}.top_k": (50, "top_k=50"),
    f"{ROLLOUT}.enforce_eager": (True, "rollout.enforce_eager=True"),
    f"{ROLLOUT}.checkpoint_engine.backend": ("nccl", "rollout.checkpoint_engine.backend=nccl: expected naive"),
    "actor_rollout_ref.model.lora_rank": (8, "model.lora_rank"),
    "actor_rollout_ref.model.lora.rank": (8, "model.lora_rank"),
    "actor_rollout_ref.model.use_liger": (True, "model.use_liger / use_fused_kernels"),
    "actor_rollout_ref.model.use_fused_kernels": (True, "model.use_liger / use_fused_kernels"),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": (2, "ulysses_sequence_parallel_size: expected 1"),
    f"{VLLM}.load_format": ("auto", "rollout.engine_kwargs.vllm.load_format=auto: would replace what the policy"),
    f"{VLLM}.logprobs_mode": ("processed_logprobs", "vllm.logprobs_mode=processed_logprobs: would replace"),
    f"{VLLM}.hf_overrides.quantization_config": ({"quant_method": "awq"}, "vllm.hf_overrides.quantization_config"),
    f"{COMPILATION}": ("3", "vllm.compilation_config=3: expected a section of keys and values"),
    f"{COMPILATION}.mode": (3, "vllm.compilation_config.mode=3: expected 2"),
    f"{COMPILATION}.backend": ("inductor", "vllm.compilation_config.backend=inductor: expected none"),
    f"{COMPILATION}.cudagraph_mode": ("FULL", "vllm.compilation_config.cudagraph_mode=FULL: expected NONE"),
    f"{COMPILATION}.custom_ops": (["all", "-rms_norm"], "vllm.compilation_config.custom_ops has -rms_norm"),
    f"{COMPILATION}.pass_config": ({"fuse_norm_quant": True}, "vllm.compilation_config.pass_config: changes what runs"),
    f"{COMPILATION}.compile_sizes": ([1], "vllm.compilation_config.compile_sizes: changes what runs"),
    "reward.reward_model.enable": (True, "reward.reward_model.enable without enable_resource_pool"),
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_each_contradiction_is_named(jet_run, key):
    value, message = CONTRADICTIONS[key]
    with pytest.raises(OptionsError) as refused:
        prepare(jet_run(**{key: value}))
    assert str(refused.value).startswith("jetgraph.policy cannot hold in this run:\n- ")
    assert message in str(refused.value)
    assert str(refused.value).count("\n- ") == 1


def test_several_contradictions_come_in_one_error_and_change_nothing(jet_run):
    run = jet_run(**{f"{ROLLOUT}.enforce_eager": True, f"{ROLLOUT}.temperature": 0.5, f"{ROLLOUT}.quantization": "fp8"})
    before = OmegaConf.to_container(run, resolve=False)
    with pytest.raises(OptionsError) as refused:
        prepare(run)
    assert str(refused.value).count("\n- ") == 3
    assert OmegaConf.to_container(run, resolve=False) == before


def test_top_k_0_is_off_in_vllm_as_minus_1_is(jet_run):
    assert prepare(jet_run(**{f"{ROLLOUT}.top_k": 0})) is not None


def test_a_reward_model_on_machines_of_its_own_is_fine(jet_run):
    settings = {"reward.reward_model.enable": True, "reward.reward_model.enable_resource_pool": True}
    assert prepare(jet_run(**settings)) is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jetgraph.polcy": "jet"}, "jetgraph.polcy does not exist; jetgraph has policy, enforcement, waivers"),
        ({"jetgraph.enforcement": "sometimes"}, "enforcement=sometimes: choose one of off, warn, start, always"),
        ({"jetgraph.enforcement": True}, "jetgraph.enforcement=True: choose one of"),
        ({"jetgraph.rounding": "up"}, "jetgraph.rounding=up: choose one of nearest, stochastic, kahan, split"),
        ({"jetgraph.codegen": "inductor"}, "jetgraph.codegen=inductor: choose one of auto, fx"),
        ({"jetgraph.rounding": "kahan"}, "kahan rounds BF16 masters, and actor.fsdp_config.model_dtype is fp32"),
        ({"jetgraph.baseline": "nothing-like-it"}, "jetgraph.baseline=nothing-like-it: no stored baseline"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(jet_run, settings, message):
    with pytest.raises(OptionsError) as refused:
        prepare(jet_run(**settings))
    assert message in str(refused.value)


def test_an_unknown_policy_is_refused(jet_run):
    with pytest.raises(ValueError, match="policy 'jett' does not exist"):
        prepare(jet_run(**{"jetgraph.policy": "jett"}))


@pytest.mark.parametrize("content", [None, "{}", "["])
def test_waivers_that_cannot_be_read_stop_the_run_here(jet_run, tmp_path, content):
    path = tmp_path / "waivers.json"
    if content is not None:
        path.write_text(content)
    run = jet_run(**{"jetgraph.waivers": str(path)})
    with pytest.raises(WaiverError, match=r"waivers\.json"):
        prepare(run)
    assert "jetgraph" not in run.actor_rollout_ref


def test_a_bare_off_in_a_yaml_file_is_off(jet_run):
    off = OmegaConf.create("enforcement: off").enforcement
    assert off is False  # YAML 1.1
    assert prepare(jet_run(**{"jetgraph.enforcement": off})).enforcement == "off"


# ------------------------------------------------------------------------------------------------- what follows from it


def test_what_the_policy_needs_is_set(jet_run):
    run = jet_run()
    prepare(run)
    rollout = run.actor_rollout_ref.rollout
    assert rollout.load_format == "dummy"
    assert rollout.calculate_log_probs is True
    assert rollout.logprobs_mode == "raw_logprobs"
    assert rollout.dtype == "bfloat16"
    vllm = rollout.engine_kwargs.vllm
    assert vllm.compilation_config.backend == "jetgraph_vllm.capture.backend"
    declaration = vllm.hf_overrides.quantization_config
    assert (declaration.quant_method, declaration.weight_block_size) == ("fp8", [128, 128])
    assert (declaration.jetgraph.policy, declaration.jetgraph.ops) == ("jet", "exact")
    assert "lm_head" in declaration.modules_to_not_convert


def test_what_a_capture_needs_reaches_every_ray_worker(jet_run):
    """`run_ppo` hands ``ray_init.runtime_env`` to Ray: what is not in it, no worker sees."""
    run = jet_run(**{"ray_kwargs.ray_init.runtime_env.env_vars": {"MINE": "1"}})
    for config in (jet_run(), run):
        prepare(config)
        assert (
            dict(config.ray_kwargs.ray_init.runtime_env.env_vars).items()
            >= {
                "VLLM_USE_AOT_COMPILE": "0",
                "VLLM_DISABLE_COMPILE_CACHE": "1",
                "VERL_DISABLE_FLASH_ATTN_CE": "1",
                "JETGRAPH_PLAIN_LINEAR": "1",
            }.items()
        )
    assert run.ray_kwargs.ray_init.runtime_env.env_vars.MINE == "1"


def test_sections_that_are_null_are_made(jet_run):
    run = jet_run(**{f"{ROLLOUT}.engine_kwargs.vllm": None, "ray_kwargs.ray_init.runtime_env": None})
    prepare(run)
    assert run.actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.quantization_config.quant_method == "fp8"
    assert run.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_AOT_COMPILE == "0"


def test_the_users_own_engine_options_stay(jet_run):
    own = {"max_num_partial_prefills": 2, "hf_overrides": {"rope_theta": 5.0}}
    run = jet_run(**{f"{ROLLOUT}.engine_kwargs.vllm": own})
    prepare(run)
    vllm = run.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm.max_num_partial_prefills == 2
    assert vllm.hf_overrides.rope_theta == 5.0
    assert vllm.hf_overrides.quantization_config.quant_method == "fp8"


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_the_users_compilation_config_stays_beside_the_policys(jet_run, form):
    own = {"debug_dump_path": "/d", "mode": "dynamo_trace_once", "custom_ops": ["+rms_norm"], "cudagraph_mode": "none"}
    own["backend"] = "jetgraph_vllm.capture.backend"  # what the policy itself sets contradicts nothing
    run = jet_run(**{COMPILATION: form(own)})
    prepare(run)
    assert OmegaConf.to_container(run.actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config) == {
        "debug_dump_path": "/d",
        "mode": 2,
        "backend": "jetgraph_vllm.capture.backend",
        "custom_ops": ["all", "+rms_norm"],
        "cudagraph_mode": "NONE",
    }


def test_bf16_declares_no_fp8(jet_run):
    run = jet_run(**{"jetgraph.policy": "bf16"})
    prepare(run)
    declaration = run.actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.quantization_config
    assert declaration.quant_method == "jetgraph"
    assert declaration.jetgraph.weight == "bf16"


def signed_waivers() -> str:
    fault = dict.fromkeys(("node", "op", "expected", "got"), "a")
    return json.dumps([fault | {"rule": "JG014", "expires": "2099-01-01", "reason": "r"}])


def test_a_draft_that_the_next_start_replaces_is_no_place_for_waivers(jet_run, tmp_path):
    path = tmp_path / "waivers-draft.json"
    path.write_text(signed_waivers())
    settings = {"jetgraph.waivers": str(path), "jetgraph.folder": str(tmp_path)}
    with pytest.raises(OptionsError, match="every start writes this draft anew; sign a copy of it elsewhere"):
        prepare(jet_run(**settings))
    assert prepare(jet_run(**settings | {"jetgraph.folder": str(tmp_path / "run")})).waivers == str(path)


def test_options_travel_inside_the_configuration(jet_run, tmp_path, monkeypatch):
    (tmp_path / "waivers.json").write_text(signed_waivers())
    monkeypatch.chdir(tmp_path)  # a relative path is the driver's: workers have another working directory
    run = jet_run(**{
        "jetgraph.waivers": "waivers.json",
        "jetgraph.folder": "out",
        "jetgraph.rounding": "split",
        "jetgraph.enforcement": "always",
        f"{ACTOR}.fsdp_config.model_dtype": "bfloat16",
    })  # fmt: skip
    options = prepare(run)
    sent = OmegaConf.create(OmegaConf.to_yaml(run.actor_rollout_ref))
    assert Options.of(sent) == options
    assert options.policy == get_policy("jet")
    assert (options.folder, options.waivers) == (str(tmp_path / "out"), str(tmp_path / "waivers.json"))
    assert (options.rounding, options.enforcement, options.baseline) == ("split", "always", None)


def test_a_policy_file_travels_by_content(jet_run, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(get_policy("jet").to_plain()))
    run = jet_run(**{"jetgraph.policy": str(path)})
    prepare(run)
    path.unlink()
    assert Options.of(run.actor_rollout_ref).policy.train == get_policy("jet").train


def test_the_folder_is_beside_the_checkpoints(jet_run, tmp_path):
    assert prepare(jet_run(**{"trainer.default_local_dir": str(tmp_path)})).folder == str(tmp_path / "jetgraph-run")
    with pytest.raises(OptionsError, match="would import it"):  # the worker's own folder comes first on its path
        prepare(jet_run(**{"jetgraph.folder": str(tmp_path / "jetgraph")}))


def test_limits_are_the_fields_or_a_baselines():
    assert limits(None) == FIELD_LIMITS
    assert limits(stored_baselines()[0]) != FIELD_LIMITS
