"""GRPO on chain sums with SmolLM2: VeRL trains, vLLM rolls out, jetgraph stands at the gate.

    python examples/rl/grpo.py --steps 3                    # run on CPU so far; takes a GPU if there is one
    python examples/rl/grpo.py --steps 3 --policy bf16      # another policy, both sides
    python examples/rl/grpo.py --steps 6 algorithm.kl_ctrl.kl_coef=0.001     # any VeRL option, passed on

The run's folder holds both precision graphs, the certificate, the manifest, a report of every weight sync, and VeRL's
checkpoints; starting again in the same folder resumes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = {
    "cuda": {"prompts": 16, "samples": 8, "micro_batch": 16, "response_length": 256, "step_tokens": 8192},
    "cpu": {"prompts": 2, "samples": 2, "micro_batch": 4, "response_length": 16, "step_tokens": 128},
}
"""What is not given.  On a CPU the reference kernels run, which are exact and slow: a few answers of a few tokens."""


def overrides(given: argparse.Namespace, model: Path, train: Path, test: Path, device: str) -> list[str]:
    """The whole VeRL configuration of this recipe that differs from VeRL's defaults."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    length = given.prompt_length + given.response_length
    return [
        f"jetgraph.policy={given.policy}",
        f"jetgraph.enforcement={given.enforcement}",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={train}",
        f"data.val_files={test}",
        f"data.train_batch_size={given.prompts}",
        f"data.max_prompt_length={given.prompt_length}",
        f"data.max_response_length={given.response_length}",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.model_dtype={given.masters}",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.use_torch_compile=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",  # would run each forward once more
        f"{actor}.ppo_mini_batch_size={given.prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={given.micro_batch}",
        f"{actor}.optim.lr={given.lr}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={given.micro_batch}",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n={given.samples}",
        f"{rollout}.enforce_eager=False",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={given.micro_batch}",
        f"{rollout}.max_model_len={length}",
        f"{rollout}.max_num_seqs={max(8, given.prompts * given.samples)}",
        f"{rollout}.max_num_batched_tokens={max(given.step_tokens, length)}",
        f"{rollout}.free_cache_engine=False",  # trainer and engine of so small a model share the device, nobody sleeps
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.agent.num_workers=1",
        f"reward.custom_reward_function.path={HERE / 'chain_sum.py'}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        'trainer.logger=["console","file"]',
        "trainer.project_name=jetgraph",
        "trainer.experiment_name=chain_sum",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={given.gpus}",
        f"trainer.total_training_steps={given.steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        f"trainer.save_freq={given.save_every}",
        f"trainer.default_local_dir={given.folder / 'checkpoints'}",
        f"jetgraph.folder={given.folder / 'jetgraph-run'}",
        f"hydra.run.dir={given.folder / 'hydra'}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=32",  # places, not cores: where there are too few VeRL waits for ever
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=300000000",  # tensors travel through TransferQueue
        *(on_cpu(given) if device == "cpu" else []),
        *given.others,
    ]


def cut(source: Path, folder: Path, layers: int) -> Path:
    """The first ``layers`` layers of a BF16 model with its tokenizer, as a folder of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source, num_hidden_layers=layers)
    AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def on_cpu(given: argparse.Namespace) -> list[str]:
    """What a machine without an accelerator needs: Ray counts pretended GPUs."""
    return ["trainer.device=cpu", f"+ray_kwargs.ray_init.num_gpus={given.gpus}"]


def environment(folder: Path, device: str) -> dict[str, str]:
    found = {
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "HYDRA_FULL_ERROR": "1",
    }
    if device == "cpu":
        found |= {
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_WAIT_POLICY": "passive",
            "OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1)),  # Ray would give every process one
            "RAY_worker_niceness": "0",  # not 15: on a busy machine its workers would hardly run
            "VERL_DISABLE_TRITON_FP8": "1",
        }
    return found


def parse(arguments: list[str] | None, device: str) -> argparse.Namespace:
    """What is given, and `SIZES` of the device where nothing is; ``others`` are VeRL's own options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/rl"))
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; SmolLM2 is unpacked if there is none")
    parser.add_argument("--layers", type=int, help="only the model's first layers: a trial of the machinery, no model")
    parser.add_argument("--data", type=Path, help="what chain_sum.py wrote elsewhere; made here if there is none")
    parser.add_argument("--policy", default="jet")
    parser.add_argument("--enforcement", default="start")
    parser.add_argument("--masters", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, help="problems a step")
    parser.add_argument("--samples", type=int, help="answers to each")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--prompt-length", type=int, default=96)
    parser.add_argument("--response-length", type=int)
    parser.add_argument("--step-tokens", type=int, help="most tokens of one step of the engine")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-every", type=int, default=-1)
    parser.add_argument("--gpus", type=int, default=1)
    parser.set_defaults(**SIZES[device])
    given, given.others = parser.parse_known_args(arguments)
    given.folder = given.folder.resolve()
    answers = given.prompts * given.samples
    if answers % (given.gpus * given.micro_batch):
        parser.error(
            f"--micro-batch {given.micro_batch}: VeRL needs {answers} answers a step to be a multiple of it on each of "
            f"{given.gpus} devices"
        )
    return given


def main() -> int:
    import torch

    sys.path.insert(0, str(HERE))
    import chain_sum

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = parse(None, device)
    if given.model is None:
        from jetgraph.models import write_smollm2

        given.model = write_smollm2(".cache/smollm2")
    if given.layers is not None:
        given.model = cut(given.model, given.folder / f"model-{given.layers}", given.layers)
    if given.data is None:
        train, test = chain_sum.write(given.folder / "data", 16 * given.prompts, given.prompts)
    else:
        train, test = (given.data.resolve() / name for name in chain_sum.FILES)
    command = [sys.executable, "-m", "jetgraph_verl.main_ppo"]
    command += overrides(given, given.model.resolve(), train, test, device)
    return subprocess.run(command, env=environment(given.folder, device) | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
