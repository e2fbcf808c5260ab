"""VeRL's configuration as its users compose it, without importing VeRL (which takes ten seconds), and VeRL on a CPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.small_models import random_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A random Llama of one layer."""
    folder = tmp_path_factory.mktemp("model")
    random_model("llama", layers=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory) -> Path:
    """SmolLM2's first two layers, with its tokenizer."""
    from examples.rl.grpo import cut
    from jetgraph.models import write_smollm2

    source = write_smollm2(Path(__file__).parents[2] / ".cache" / "smollm2")
    return cut(source, tmp_path_factory.mktemp("cut"), 2)


@pytest.fixture(scope="session")
def composed(model_folder) -> Callable:
    """``composed(*overrides)``: the configuration of `jetgraph_verl.main_ppo` with what a jet run needs, and more."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("verl is not installed")
    verl = Path(spec.submodule_search_locations[0])

    from hydra import compose, initialize_config_dir

    def compose_run(*overrides: str):
        ours = Path(__file__).parents[2] / "integrations/jetgraph_verl/config"
        with initialize_config_dir(str(ours), version_base=None):
            return compose(
                "ppo_jetgraph",
                [
                    f"hydra.searchpath=[file://{verl}/trainer/config]",  # pkg:// would import verl
                    f"actor_rollout_ref.model.path={model_folder}",
                    "actor_rollout_ref.actor.strategy=fsdp2",
                    "actor_rollout_ref.rollout.name=vllm",
                    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                    *overrides,
                ],
            )

    return compose_run


@pytest.fixture(scope="session")
def verl_on_cpu() -> None:
    """VeRL imported under ``VERL_PLATFORM=cpu``; whoever imported it before without decides otherwise."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    before = os.environ.get("VERL_PLATFORM")
    os.environ["VERL_PLATFORM"] = "cpu"
    try:
        import verl  # noqa: F401
        from jetgraph_verl import cpu

        cpu.patch()
        import jetgraph_verl.rollout  # noqa: F401
    finally:
        if before is None:
            del os.environ["VERL_PLATFORM"]
