"""The main job: SmolLM2's real weights, a live vLLM, separate processes, and 0 difference on every token.

Two engines run (ours with policy jet, and stock BF16), two trainers score what they sampled, and the four captured
graphs are verified against each other.  Everything below reads the results of those four processes.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from jetgraph.engines import EngineRun, RolloutPlan
from jetgraph.extract import expected_rollout
from jetgraph.graph import PrecisionGraph
from jetgraph.models import write_smollm2
from jetgraph.modes import demo_prompts
from jetgraph.pair import TrainerRun, run_engine, run_trainer, verify_files
from jetgraph.verify import Verdict, checker, verify
from tests.verify.mutations import MUTATIONS, apply

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden", "smollm2.json").read_text())


@dataclass(frozen=True)
class Main:
    engines: dict[str, EngineRun]
    trainers: dict[str, TrainerRun]

    def graphs(self, train: str, infer: str) -> tuple[PrecisionGraph, PrecisionGraph]:
        return PrecisionGraph.load(self.trainers[train].graph), PrecisionGraph.load(self.engines[infer].graph)


def plans(prompts: list[list[int]]) -> list[RolloutPlan]:
    seeds = [1000 + i for i in range(len(prompts))]
    return [
        RolloutPlan("batch", prompts, seeds, 80, tokens=256),
        RolloutPlan("mixed", prompts, seeds, 80, tokens=29, sequences=8),
        RolloutPlan("alone", prompts[:4], seeds[:4], 80, one_at_a_time=True),
    ]


@pytest.fixture(scope="module")
def main(tmp_path_factory) -> Main:
    work = tmp_path_factory.mktemp("pair")
    model = write_smollm2(Path(".cache/smollm2"))
    questions = demo_prompts(model)
    prompts = [*questions, *([*q[:-1], i + 60, q[-1]] for i, q in enumerate(questions))]  # sixteen that differ
    jet = run_engine(model, "jet", "vllm", work, graph=work / "infer-jet.json", plans=plans(prompts))
    stock = run_engine(model, "bf16", "vllm", work, stock=True, graph=work / "infer-bf16.json")
    trainers = {
        "jet": run_trainer(model, "jet", "reference", graph=work / "train-jet.json", rollouts=jet.rollouts),
        "bf16": run_trainer(
            model,
            "bf16_train_fp8_rollout",
            "stock",
            graph=work / "train-bf16.json",
            backward=False,
            rollouts={"alone": jet.rollouts["alone"]},
        ),
    }
    return Main({"jet": jet, "bf16": stock}, trainers)


def test_the_engines_logprobs_are_trainings_on_every_token(main):
    mismatches = main.trainers["jet"].mismatches
    assert set(mismatches) == {"batch", "mixed", "alone"}
    for name, m in mismatches.items():
        assert (m.num_exact, m.max, m.k3) == (m.num_tokens, 0.0, 0.0), name
    assert sum(m.num_tokens for m in mismatches.values()) >= 4000


def test_the_same_seeds_give_the_same_tokens_however_batched(main):
    rollouts = main.engines["jet"].rollouts
    assert [r.tokens for r in rollouts["batch"]] == [r.tokens for r in rollouts["mixed"]]
    assert [r.tokens for r in rollouts["batch"]][:4] == [r.tokens for r in rollouts["alone"]]
    assert len({r.tokens for r in rollouts["batch"]}) == len(rollouts["batch"])


def test_fp8_rollout_with_bf16_training_is_not_exact(main):
    """The measure can fail: the same samples scored by BF16 training."""
    m = main.trainers["bf16"].mismatches["alone"]
    assert m.num_exact < 0.1 * m.num_tokens
    assert m.mean > 0.01


def test_both_graphs_replay_bit_for_bit(main):
    train, infer = main.graphs("jet", "jet")
    assert train.meta["replay"]["passed"]
    assert any("272 gradients: equal" in case for case in train.meta["replay"]["cases"])
    cases = infer.meta["replay"]["cases"]
    assert infer.meta["replay"] == {"passed": True, "cases": cases, "injected": []}
    for case in ("body, 17 rows, (new, length) [(17, 17)]", "body, 5 rows, (new, length) [(5, 5)]"):
        assert f"{case}: equal" in cases  # prefill
    assert "body, 1 rows, (new, length) [(1, 18)]: equal" in cases  # decode
    assert any(case.startswith("body, 22 rows") for case in cases)  # both prompts in one step
    assert any(case.startswith("head, 1 rows") for case in cases)


def test_nothing_is_unknown_and_both_sides_are_whole(main):
    for graph in main.graphs("jet", "jet"):
        assert graph.meta["unknown"] == []
        assert sum(n.op == "attention" for n in graph.nodes) == 30
        assert {f"k.{i}" for i in range(30)} | {"logits", "logprob"} <= set(graph.outputs)


def test_contained_bitwise_and_re_checked_without_torch(main, tmp_path):
    train, infer = main.trainers["jet"].graph, main.engines["jet"].graph
    result = verify_files(train, infer)
    assert (result.verdict, result.bitwise, result.exit_status) == (Verdict.CONTAINED, True, 0), result.text()
    certificate = tmp_path / "certificate.json"
    result.certificate.save(certificate)
    alone = tmp_path / "checker.py"
    alone.write_text(Path(checker.__file__).read_text())
    command = [sys.executable, "-I", "-S", str(alone), str(certificate), str(train), str(infer)]
    assert subprocess.run(command, check=False).returncode == 0
    certificate.write_bytes(certificate.read_bytes().replace(b"CONTAINED", b"CONTAINEE"))
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1


def test_the_engine_runs_what_training_implies(main):
    train, infer = main.graphs("jet", "jet")
    assert infer.semantic_digest == expected_rollout(train).semantic_digest


def test_semantic_digests_are_the_golden_ones(main):
    train, infer = main.graphs("jet", "jet")
    assert {"train": train.semantic_digest, "infer": infer.semantic_digest} == GOLDEN["jet"]


def test_the_same_codes_in_trainer_exporter_and_engine(main):
    train, infer = main.graphs("jet", "jet")
    assert len(infer.meta["operands"]) == 210
    assert infer.meta["operands"] == train.meta["operands"]


def test_another_live_engine_is_refused_each_root_fault_once(main):
    """The negative control: vLLM in BF16 with its own operators, under jet training."""
    result = verify_files(main.trainers["jet"].graph, main.engines["bf16"].graph)
    assert (result.verdict, result.exit_status, result.certificate) == (Verdict.VIOLATED, 1, None)
    count = {rule: sum(f.rule == rule for f in result.faults) for rule in {f.rule for f in result.faults}}
    assert count == {"JG014": 210, "JG004": 300}  # linears; rotary products (240) and residual sums (60) unrounded
    linears = [f for f in result.faults if f.rule == "JG014"]
    assert len({f.fqn for f in linears}) == 210
    assert all(f.train_source.startswith("models/llama/modeling_llama.py:") for f in linears)
    assert all(f.infer_source for f in result.faults)


def test_what_people_run_today_is_refused(main):
    result = verify_files(main.trainers["bf16"].graph, main.engines["jet"].graph)
    assert result.verdict is Verdict.VIOLATED
    assert {f.rule for f in result.faults} == {"JG014"}
    assert len(result.faults) == 210
    assert len(result.folded) == 7


def test_stock_bf16_differs_only_in_rounding(main):
    result = verify_files(main.trainers["bf16"].graph, main.engines["bf16"].graph)
    assert {f.rule for f in result.faults} == {"JG004"}
    assert len(result.faults) == 300
    assert len(result.folded) == 4


@pytest.mark.parametrize("name", MUTATIONS)
def test_single_faults_in_the_live_engines_graph(main, name):
    train, infer = main.graphs("jet", "jet")
    mutation = MUTATIONS[name]
    for layer, expected in ((7, mutation.one), (None, mutation.every[0] * 30 + mutation.every[1])):
        changed = dataclasses.replace(apply(infer, mutation.edit, layer=layer), meta=infer.meta)
        result = verify(train, changed)
        assert result.verdict is Verdict.VIOLATED
        assert {f.rule for f in result.faults} == {mutation.rule}, result.text()
        assert len(result.faults) == expected, result.text()
