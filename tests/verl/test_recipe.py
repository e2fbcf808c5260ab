"""`examples/rl/grpo.py`: what it tells VeRL exists there, and contradicts no policy; nothing runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("omegaconf")
pytest.importorskip("hydra")

from jetgraph_verl.options import prepare

RECIPE = Path(__file__).parents[2] / "examples/rl/grpo.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("grpo_recipe", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("device", "answers"), [("cpu", 4), ("cuda", 128)])
def test_every_option_exists_and_contradicts_nothing(recipe, composed, model_folder, tmp_path, device, answers):
    given = recipe.parse(
        ["--folder", str(tmp_path), "--gpus", "2", "--micro-batch", "2", "trainer.project_name=mine"], device
    )
    data = tmp_path / "train.parquet", tmp_path / "test.parquet"
    config = composed(*recipe.overrides(given, model_folder, *data, device))
    options = prepare(config)
    assert (options.enforcement, options.policy.name) == ("start", "jet")
    rollout = config.actor_rollout_ref.rollout
    assert config.data.train_batch_size * rollout.n == answers <= rollout.max_num_seqs
    assert config.trainer.project_name == "mine"
    assert rollout.max_model_len == config.data.max_prompt_length + config.data.max_response_length
    assert config.ray_kwargs.ray_init.get("num_gpus") == (2 if device == "cpu" else None)


def test_a_micro_batch_that_verl_would_refuse_after_minutes_is_refused_at_once(recipe, capsys):
    with pytest.raises(SystemExit):
        recipe.parse(["--prompts", "3", "--micro-batch", "4"], "cpu")
    assert "--micro-batch 4: VeRL needs 6 answers a step to be a multiple of it" in capsys.readouterr().err
