"""The fine-tuning example: two steps on a small model train both policies and leave numbers and a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]
VOCABULARY = 64


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """A one-layer model and a tokenizer that knows the characters of sums."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.core.small_models import family_config, randomized

    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path / "model"
    randomized(family_config("llama", layers=1, head_dim=32, vocab_size=VOCABULARY, **sizes)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?0123456789+-= \n")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_two_steps_train_both_policies_and_leave_numbers_and_a_picture(small_model: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(REPOSITORY / "examples" / "finetune.py"), str(small_model)]
    options = ["--steps", "2", "--batch", "2", "--length", "24", "--lr", "0.01", "--out", str(tmp_path / "losses")]
    run = subprocess.run([*program, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    arms = json.loads((tmp_path / "losses.json").read_text())["arms"]
    assert list(arms) == ["bf16", "jet"]
    losses = torch.tensor([arms[policy]["loss"] for policy in arms])
    assert losses.shape == (2, 2)
    assert losses.isfinite().all()
    assert (losses[0] != losses[1]).all()  # FP8 is another arithmetic
    assert (losses[0] - losses[1]).abs()[0] < 0.1 * losses[0, 0]  # from the same start
    assert "<svg" in (tmp_path / "losses.svg").read_text()[:500]


@pytest.mark.slow
def test_the_data_are_the_same_for_every_policy_and_only_answers_are_learnt(small_model: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    from transformers import AutoTokenizer

    from examples.finetune import IGNORED, batches

    tokenizer = AutoTokenizer.from_pretrained(small_model)
    once, again = ([*batches(tokenizer, 3, 2, 24)] for _ in range(2))
    for (ids, labels), (other_ids, other_labels) in zip(once, again, strict=True):
        assert torch.equal(ids, other_ids)
        assert torch.equal(labels, other_labels)
        for row, wanted in zip(ids, labels, strict=True):
            text = tokenizer.decode(row).split("\n")[0]
            left, answer = text.split("=")
            assert eval(left) == int(answer)  # a sum of two numbers
            assert tokenizer.decode(wanted[wanted != IGNORED]) == f" {int(answer)}\n"
    assert not torch.equal(once[0][0], once[1][0])


@pytest.mark.slow
def test_the_gpu_programs_of_whole_steps_run_on_a_tiny_model(tmp_path: Path) -> None:
    """Their figures come from a GPU; that they run, refuse what a CPU has not and keep their bars is tested here."""
    rows = tmp_path / "rows.json"
    program = [sys.executable, "-m", "benchmarks.numerics", "--only", "tiny", "--json", str(rows)]
    run = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "tiny, triton: refused, model.layers.0.self_attn.q_proj: provider 'triton' cannot run" in run.stdout
    found = {row["metric"]: row for row in json.loads(rows.read_text())["rows"]}
    assert found["tiny, auto against reference, cosine"]["value"] == pytest.approx(1.0)  # on a CPU it is the reference
    assert found["tiny, auto against reference, SQNR"]["ok"]
    assert 0.9 < found["tiny, control against reference, cosine"]["value"] < 1.0
