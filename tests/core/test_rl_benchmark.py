"""The GRPO loop of `benchmarks.rl`: its parts by hand, its trainer beside a plain model, two steps of two arms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import rl
from benchmarks.grpo import arm, curves, journal
from benchmarks.grpo.actor import Actor, Answer, group_advantages, repeat
from benchmarks.grpo.arm import go_on, keep_rows
from benchmarks.grpo.journal import Lesson
from benchmarks.grpo.problems import Problems, chain_sums, number_reward
from jetgraph.models import write_smollm2
from tests.core.small_models import random_model

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("71", 1.0),
        ("The sum is 14 + 57 = 71.", 1.0),
        ("71, or 72", 0.1),
        ("-71", 0.1),
        ("seventy-one", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_its_last_number(text: str, reward: float):
    assert number_reward(text, "71") == reward


def test_thousands_and_signs_are_read():
    assert number_reward("it is 1,071", "1071") == 1.0
    assert number_reward("14 - 57 = -43", " -43 ") == 1.0


def test_advantages_are_within_a_group():
    # one half away from the mean, standard deviation (of a sample) √0.5
    assert group_advantages([1.0, 0.0, 0.1, 0.1], 2) == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0, 0.0], abs=1e-5)
    assert repeat([[1], [2, 3]], 2) == [[1], [1], [2, 3], [2, 3]]


def test_no_problem_comes_twice_and_the_tokenizer_stays_at_home(tmp_path: Path):
    problems = Problems([[1], [2], [3]], ["1", "2", "3"], [0], tokenizer="here")
    assert problems.take(0, 2) == ([[1], [2]], ["1", "2"])
    with pytest.raises(ValueError, match="step 1 needs problems 2 to 3 and there are 3"):
        problems.take(1, 2)
    problems.save(tmp_path / "p.json")
    assert "here" not in (tmp_path / "p.json").read_text()
    assert Problems.load(tmp_path / "p.json", "there") == Problems(problems.prompts, problems.answers, [0], "there")


@pytest.mark.model
def test_chain_sums_are_all_different_and_end_where_the_model_ends():
    folder = str(write_smollm2(REPOSITORY / ".cache" / "smollm2"))
    found = chain_sums(folder, 60, terms=2, digits=1, style="short")
    assert len({tuple(prompt) for prompt in found.prompts}) == 60
    assert found.stop == [2]  # <|im_end|>; the tokenizer made from GGUF takes <|im_start|> for its end
    text = found._decoder.decode(found.prompts[0])
    first, sign, second = re.search(r"problem: (\d) ([+-]) (\d) = Answer with the number only", text).groups()
    assert int(found.answers[0]) == int(first) + int(f"{sign}{second}")
    with pytest.raises(ValueError, match="different sums for 300 problems: allow more --terms or --digits"):
        chain_sums(folder, 300, terms=2, digits=1, style="short")


def made_up(seed: int, number: int, reward: float, delta: float) -> dict:
    figures = dict.fromkeys(("p999", "k1", "k3"), delta) | {"mean": delta / 2, "max": delta, "num_tokens": 10}
    return {
        "arm": "jet", "seed": seed, "step": number, "reward": reward, "answer_length": 5.0, "cut_off": 0.5,
        "grad_norm": 2.0, "mismatch": figures | {"fraction_exact": float(delta == 0)},
        "seconds": {"rollout": 3.0 if number > 1 else 90.0, "train": 1.0},
    }  # fmt: skip


def test_rows_are_of_all_seeds_and_jet_must_be_exact():
    steps = [made_up(seed, number, 0.1 * seed, 0.0) for seed in (1, 3) for number in (2, 1)]
    table = {row.metric: row for row in curves.rows("jet", steps, must_be_exact=True)}
    assert table["jet, tokens compared"].value == 40
    last = "jet, reward of the last 10 steps"
    assert [round(table[f"{last}, {which}"].value, 6) for which in ("mean of seeds", "lowest", "highest")] == [
        0.2, 0.1, 0.3,
    ]  # fmt: skip
    assert table["jet, rollout, median"].value == 3.0  # without the first steps, which compile
    assert table["jet, step, median"].value == 4.0
    assert all(row.ok is not False for row in table.values())
    moved = [*steps, made_up(1, 3, 0.0, 0.25)]
    table = {row.metric: row for row in curves.rows("jet", moved, must_be_exact=True)}
    assert (table["jet, largest |Δlogprob|"].value, table["jet, largest |Δlogprob|"].ok) == (0.25, False)
    assert table["jet, fraction exact, smallest of steps"].ok is False
    assert all(row.ok is None for row in curves.rows("bf16", moved, must_be_exact=False))
    with pytest.raises(ValueError, match="jet: no step was done"):
        curves.rows("jet", [], must_be_exact=True)


def test_half_a_line_is_no_step_and_the_picture_has_a_band_an_arm(tmp_path: Path):
    lines = [json.dumps(made_up(seed, number, 0.5, 0.1)) for seed in (0, 1) for number in (1, 2, 3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    steps = curves.read(tmp_path / "rows.jsonl")
    assert len(steps) == 5
    assert curves.smoothed([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    curves.draw({"jet": steps, "bf16": steps}, tmp_path / "rl.svg")
    picture = (tmp_path / "rl.svg").read_text()
    assert picture.count("FillBetweenPolyCollection") == 4 * 2  # panels, arms
    assert curves.read(tmp_path / "nothing.jsonl") == []


def test_what_cannot_run_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        rl.parse([])
    assert "needs a CUDA device" in capsys.readouterr().err
    tiny = rl.parse(["--tiny", "--steps", "5"])
    assert (tiny.naive, tiny.steps, tiny.length) == ("codes", 5, 9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        rl.parse([])
    assert "--problems FILE is needed" in capsys.readouterr().err
    assert rl.parse(["--problems", "p.json"]).naive == "stock"


def test_steps_of_unlike_runs_are_not_reported_together(tmp_path: Path):
    options = rl.parse(["--tiny"])
    told = rl.settings(options, "cpu")
    rl.keep_settings(tmp_path, told)
    rl.keep_settings(tmp_path, json.loads(json.dumps(told)))
    with pytest.raises(ValueError, match=r"were made with length 9, and now it is 2048: take another --work"):
        rl.keep_settings(tmp_path, told | {"length": 2048})


def test_rows_beyond_what_was_saved_are_not_kept(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(made_up(0, number, 0.5, 0.1)) for number in (1, 2, 3)) + "\n{")
    keep_rows(path, 2)
    assert [step["step"] for step in curves.read(path)] == [1, 2]
    keep_rows(path, 0)
    assert path.read_text() == ""
    keep_rows(tmp_path / "new.jsonl", 0)


LESSONS = [
    Lesson(1, [[8, 49_151], [], [70_000]], [0.5, -0.5, 1 / 3], 0.25),
    Lesson(2, [[3], [4], [5]], [0.0, 0.0, 0.0], 0.0),
]


def test_a_journal_is_read_as_far_as_its_lines_are_whole_and_follow_each_other(tmp_path: Path):
    path = tmp_path / "a.journal"
    assert journal.read(path) == []
    journal.write(path, LESSONS)
    assert journal.read(path) == LESSONS
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[: len(second) // 2]}")
    assert journal.read(path) == LESSONS[:1]
    path.write_text(f"{second}\n")
    assert journal.read(path) == []
    path.write_text(f"{first}\n{first}\n{second}\n")
    assert journal.read(path) == LESSONS[:1]


def test_no_process_starts_when_time_is_out_or_all_steps_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rl, "run_module", lambda *_, **__: pytest.fail("a process was started"))
    job = made_up_job(tmp_path, until=1.0)
    assert rl.run_job(job, tmp_path / "job.json", "")
    rows = [json.dumps(made_up(0, number, 0.5, 0.1)) for number in (1, 2)]
    (tmp_path / "jet-0.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(arm, "Rollout", lambda *_: pytest.fail("an engine was started"))
    arm.run(job)


def test_why_an_arm_failed_is_said_before_its_engine_is_torn_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made_up_job(tmp_path).save(tmp_path / "job.json")

    def fail(*_: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(arm, "run", fail)
    assert arm.main([str(tmp_path / "job.json")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "rl: ValueError: no such kernel"
    assert all(line.startswith("rl: ") for line in said)


def made_up_job(folder: Path, until: float | None = None) -> arm.Job:
    """Two steps of one problem each, two answers to it."""
    return arm.Job(
        name="jet", seeds=[0], model=str(folder), trainer="bf16", provider="stock", served="", rollout=None, engine={},
        problems=str(folder / "problems.json"), tokenizer=None, steps=2, prompts=1, samples=2, length=4,
        learning_rate=1e-3, micro_batch=128, rows=str(folder / "jet"), until=until,
    )  # fmt: skip


def test_processes_are_spread_over_the_gpus_that_this_one_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert rl.devices() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert rl.devices() == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert rl.devices() == [""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    random_model("llama", layers=1).save_pretrained(path)
    return path


STALE = 0.069
"""Mean |Δ| of the tiny BF16 pair in its second step if the engine keeps its first weights, as measured on a CPU."""
ANSWERS = [Answer([5, 6, 7], [8, 9, 10, 11], []), Answer([20] * 70, [21, 22], []), Answer([1, 2], [3], [])]


def plain_logprobs(folder: Path, answer: Answer) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([answer.prompt + answer.tokens])
    found = model(input_ids=ids).logits[0].float().log_softmax(-1)
    start = len(answer.prompt)
    return [found[start - 1 + i, token].item() for i, token in enumerate(answer.tokens)]


@pytest.mark.slow
def test_the_actor_scores_as_a_plain_model_and_learns_what_is_rewarded(folder: Path):
    actor = Actor(str(folder), "bf16", "stock", learning_rate=1e-3, micro_batch=128, device="cpu")
    before = actor.score(ANSWERS)
    for answer, scores in zip(ANSWERS, before, strict=True):
        assert scores == pytest.approx(plain_logprobs(folder, answer), abs=0.05)  # BF16 of other shapes
    norm = actor.learn(ANSWERS, [1.0, -1.0, 0.0])
    after = actor.score(ANSWERS)
    assert sum(after[0]) > sum(before[0]) + 0.1
    assert sum(after[1]) < sum(before[1]) - 0.1
    actor.restart()
    assert actor.score(ANSWERS) == before
    actor.micro_batch = 10**6
    assert actor.learn(ANSWERS, [1.0, -1.0, 0.0]) == pytest.approx(norm, rel=0.02)  # micro-batches do not count


@pytest.mark.slow
def test_an_actor_goes_on_where_it_was_saved(folder: Path, tmp_path: Path):
    actor = Actor(str(folder), "bf16", "stock", learning_rate=1e-3, micro_batch=128, device="cpu")
    actor.learn(ANSWERS, [1.0, -1.0, 0.0])
    actor.save(tmp_path / "a.pt", 1)
    actor.learn(ANSWERS, [0.0, 1.0, -1.0])
    expected = actor.masters
    actor.restart()
    assert actor.resume(tmp_path / "a.pt") == 1
    actor.learn(ANSWERS, [0.0, 1.0, -1.0])
    for found, master, parameter in zip(actor.masters, expected, actor.parameters, strict=True):
        assert torch.equal(found, master)  # so the optimizer's moments and steps came back too
        assert torch.equal(parameter, master.to(torch.bfloat16))


@pytest.mark.slow
def test_a_journal_brings_a_trainer_to_where_it_was_with_or_without_a_saved_one(folder: Path, tmp_path: Path):
    problems = Problems([[5, 6], [7]], ["", ""], [])
    actor = Actor(str(folder), "bf16", "stock", learning_rate=1e-3, micro_batch=128, device="cpu")
    job, saved = made_up_job(tmp_path), tmp_path / "jet-0.pt"
    lessons = []
    for number, (prompt, tokens) in enumerate((([5, 6], [[8, 9], [10]]), ([7], [[11], [12, 13, 14]])), 1):
        norm = actor.learn([Answer(prompt, answer, []) for answer in tokens], [1.0, -1.0])
        lessons.append(Lesson(number, tokens, [1.0, -1.0], norm))
        if number == 1:
            actor.save(saved, 1)
    expected = actor.masters
    for before in ("1 updates saved, 1 taken again", "0 updates saved, 2 taken again"):
        actor.restart()
        told = go_on(job, problems, actor, saved, lessons)
        assert told.startswith(f"goes on after step 2: {before}"), told
        assert told.endswith("differ by 0 of themselves at most"), told
        assert all(map(torch.equal, actor.masters, expected))
        saved.unlink(missing_ok=True)
    actor.save(saved, 2)  # of a journal that is lost
    go_on(job, problems, actor, saved, [])
    assert all(map(torch.equal, actor.masters, [p.float() for p in actor._first]))


@pytest.mark.engine
def test_two_steps_of_a_stock_pair_and_of_jet(tmp_path: Path):
    """An update that did not arrive would leave the second step's rollout at the weights before it."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rl", "--tiny", "--arms", "bf16/bf16", "jet", "--together", "2",
         "--work", tmp_path, "--picture", tmp_path / "rl.svg", "--json", tmp_path / "rl.json"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    written = json.loads((tmp_path / "rl.json").read_text())
    table = {row["metric"]: row for row in written["rows"]}
    assert (table["jet, largest |Δlogprob|"]["value"], table["jet, largest |Δlogprob|"]["ok"]) == (0, True)
    assert table["jet, tokens compared"]["value"] == 2 * 2 * 3 * 9
    steps = json.loads((tmp_path / "rl-steps.json").read_text())["arms"]
    assert [step["step"] for step in steps["bf16/bf16"]] == [1, 2]
    assert all(step["mismatch"]["mean"] < STALE / 4 for step in steps["bf16/bf16"])
    assert steps["jet"][0]["sync"]["changed/float8_e4m3fn"] > 0.1
    assert "<svg" in (tmp_path / "rl.svg").read_text()
