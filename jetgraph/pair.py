"""The ten-minute path: a model folder, a training policy and a rollout engine → two captured graphs and a verdict.

Trainer and engine run in separate processes; what they share is the model folder, the exported checkpoint and the two
graph files.  Nothing here knows which engine it is.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jetgraph.child_process import run_module
from jetgraph.engines import EngineRun, RolloutPlan, get_engine
from jetgraph.export import export_checkpoint
from jetgraph.followed import ENGINES
from jetgraph.mismatch import Difference
from jetgraph.policy import get_policy
from jetgraph.scoring import Rollout
from jetgraph.verify import Result, Source, verify

Say = Callable[[str], None]


class TrainerFailed(RuntimeError):
    """The trainer's process ended with an error; carries the last lines it printed."""


@dataclass(frozen=True)
class TrainerRun:
    """What the trainer's process reports: where its graph is, how long compiling took, mismatch per rollout plan.

    ``logprobs`` are the trainer's of the sampled tokens, per rollout plan and request.
    """

    graph: Path | None
    compile_seconds: float
    num_compiles: int
    saved: dict[str, Any] = field(default_factory=dict)
    mismatches: dict[str, Difference] = field(default_factory=dict)
    logprobs: dict[str, list[list[float]]] = field(default_factory=dict)


def run_trainer(
    model_dir: Path,
    policy: str,
    provider: str,
    *,
    graph: Path | None = None,
    rollouts: dict[str, Sequence[Rollout]] | None = None,
    backward: bool = True,
    device: str = "cpu",
    engine: str | None = None,
    say: Say = print,
) -> TrainerRun:
    """Compile on ``device``, capture one step (without gradients if not ``backward``) to ``graph``, score ``rollouts``.

    All of it in a process of its own.  ``engine`` is one that training follows, as of `jetgraph.compile`.
    """
    get_policy(policy)
    check_model_folder(model_dir)
    if graph is not None:
        graph.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        job, results = Path(folder, "job.json"), Path(folder, "results.json")
        content = {
            "model_dir": str(model_dir),
            "policy": policy,
            "provider": provider,
            "graph": str(graph) if graph else None,
            "backward": backward,
            "device": device,
            "engine": engine,
            "rollouts": {name: [asdict(r) for r in items] for name, items in (rollouts or {}).items()},
            "results": str(results),
        }
        job.write_text(json.dumps(content))
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        status, lines = run_module("jetgraph.train_process", job, environment, "jetgraph:", say)
        if status != 0:
            said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            raise TrainerFailed(said[-1] if said else "the trainer failed; its last lines:\n" + "\n".join(lines))
        data = json.loads(results.read_text())
    mismatches = {name: Difference(**values) for name, values in data["mismatches"].items()}
    return TrainerRun(graph, data["compile_seconds"], data["num_compiles"], data["saved"], mismatches, data["logprobs"])


def run_engine(
    model_dir: Path,
    policy: str,
    engine: str,
    work: Path,
    *,
    stock: bool = False,
    graph: Path | None = None,
    plans: Sequence[RolloutPlan] = (),
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    say: Say = print,
) -> EngineRun:
    """Export ``model_dir`` for the rollout of ``policy`` and run the engine; ``stock`` runs the folder as it is.

    ``options`` are the engine's own settings, besides those that the plans need; weights are quantised on ``device``.
    """
    integration = get_engine(engine)
    get_policy(policy)
    check_model_folder(model_dir)
    if stock:
        folder = model_dir
    else:
        chosen, folder = get_policy(policy), exported_folder(work, policy)
        say(f"exporting the {chosen.name} checkpoint")  # always: the folder may hold another model, or older weights
        export_checkpoint(model_dir, folder, chosen, device=device)
    return integration.run(folder, graph=graph, plans=plans, options=options, say=say)


def exported_folder(work: Path, policy: str) -> Path:
    """Where `run_engine` puts the checkpoint that an engine of ours serves."""
    return work / f"exported-{get_policy(policy).file_stem}"


def verify_model(
    model_dir: Path,
    policy: str,
    engine: str,
    work: Path,
    *,
    stock: bool = False,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    say: Say = print,
) -> Result:
    """Capture both sides of ``policy`` into ``work`` (train.json, infer.json) and verify them.

    ``engine`` is an integration, which follows training, or one of `jetgraph.followed`, which training follows: then
    its own kernels run on a checkpoint that says no word of us.  The trainer runs on ``device``.
    """
    get_policy(policy)
    follows = engine in ENGINES
    get_engine(ENGINES[engine].integration if follows else engine)
    if follows and stock:
        raise ValueError(f"{engine} is the engine as it is, and training follows it: leave --stock out")
    work.mkdir(parents=True, exist_ok=True)
    train, infer = work / "train.json", work / "infer.json"
    provider = "stock" if stock else "reference"
    followed = engine if follows else None
    at_training, told = _named(say, "trainer"), _named(say, engine)
    run_trainer(model_dir, policy, provider, graph=train, device=device, engine=followed, say=at_training)
    if follows:
        folder = work / f"exported-{get_policy(policy).file_stem}-{engine}"
        told(f"exporting the {policy} checkpoint for {engine}")
        export_checkpoint(model_dir, folder, policy, engine=engine, device=device)
        get_engine(ENGINES[engine].integration).capture_stock(folder, train, infer, options, say=told)
    else:
        run_engine(model_dir, policy, engine, work, stock=stock, graph=infer, options=options, device=device, say=told)
    return verify_files(train, infer)


def _named(say: Say, name: str) -> Say:
    return lambda text: say(f"{name}: {text}")


def verify_files(train: Path, infer: Path) -> Result:
    """Verify two graph files; a certificate is bound to their bytes."""
    return verify(Source.load(train, "train"), Source.load(infer, "infer"))


def check_model_folder(folder: Path) -> None:
    """Refuse, before a process is started for it, what cannot be a model folder."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
