"""What precision does to RL: GRPO in one process, three arms, three seeds:  python -m benchmarks.rl --problems FILE

SmolLM2 learns chain sums of reasoning-gym: 16 problems a step, 8 answers each, rewarded by a rule; every problem comes
once, so a reward is on problems never trained on.  FP32 masters under AdamW; the trainer is `jetgraph.compile`'s in
every arm, the engine a live vLLM in the same process.  `benchmarks.grpo` has the parts, and the steps of a loop.

- bf16/bf16: stock kernels on both sides;
- naive FP8 rollout: the same trainer; stock vLLM quantises each update to FP8 by itself (one scale a weight, one a
  token).  On a CPU no stock FP8 kernel runs: our plugin serves jet's codes to the BF16 trainer (``--naive codes``);
- jet: one FP8 flow on both sides, weights by jetgraph's transaction; the bar is a mismatch of exactly 0.

All arms have the same problems in the same order and, for a seed, the same seeds of rollouts.  Mismatch is that of
`jetgraph.mismatch` between the engine's own logprobs and the trainer's on the same tokens, before the update.  Every
step is a line in ``--work``; the curves are their means over the seeds in a band from the lowest to the highest.

    python -m benchmarks.rl --write-problems long.json --style long      # elsewhere: needs reasoning-gym
    python -m benchmarks.rl --problems long.json --length 2048 --together 3 --minutes 9

``--minutes`` ends all arms in time, and the report says how many steps each did; the same call with the same ``--work``
goes on from there, on another machine too: a few MB of ``*.jsonl``, ``*.journal`` and `SETTINGS` are enough
(`benchmarks.grpo.journal`).  ``--only-report`` makes the report again.  ``--tiny`` runs two steps of a random model of
two layers on any machine, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import ENVIRONMENT, cache_options, write_model
from benchmarks.gpu_time import device_name
from benchmarks.grpo import curves
from benchmarks.grpo.arm import Job
from benchmarks.grpo.problems import INSTRUCTIONS, Problems, chain_sums, random_problems
from benchmarks.mismatch import OUR_CODES, PAIRINGS, Pairing
from benchmarks.report import report, versions
from benchmarks.rollout import BLOCK
from jetgraph.child_process import run_module
from jetgraph.export import export_checkpoint

STEPS, PROMPTS, SAMPLES, SEEDS = 100, 16, 8, (0, 1, 2)
NAIVE = "naive FP8 rollout"
ARMS = ("bf16/bf16", NAIVE, "jet")
SETTINGS = "settings.json"
TINY = {"steps": 2, "prompts": 2, "samples": 3, "length": 9, "seeds": [0], "eager": True, "lr": 1e-3}
"""What ``--tiny`` means where nothing else is given."""


def pairing_of(arm: str, naive: str) -> Pairing:
    return OUR_CODES if arm == NAIVE and naive == "codes" else PAIRINGS[arm]


def engine_options(arm: str, options: argparse.Namespace, longest_prompt: int) -> dict[str, Any]:
    """Of `vllm.LLM`."""
    quantization = pairing_of(arm, options.naive).quantization
    found: dict[str, Any] = {
        "max_model_len": longest_prompt + options.length + 1,
        "max_num_seqs": options.prompts * options.samples,
        "max_num_batched_tokens": 8192 if torch.cuda.is_available() else 512,
        "enable_prefix_caching": True,
        "enforce_eager": options.eager,
    }
    if quantization:
        found["quantization"] = quantization
    if torch.cuda.is_available():
        rows = options.prompts * options.samples
        found |= cache_options(Path(options.model), rows * (found["max_model_len"] + BLOCK))
        if not options.eager:
            sizes = sorted({1 << i for i in range(rows.bit_length())} | {rows})
            found["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return found


def job_of(arm: str, seeds: list[int], options: argparse.Namespace, longest_prompt: int) -> Job:
    pairing = pairing_of(arm, options.naive)
    served = options.model
    if not pairing.engine.stock:
        served = exported(options.model, options.work / f"served-{arm_slug(arm)}", pairing.engine.policy)
    return Job(
        name=arm,
        seeds=seeds,
        model=options.model,
        trainer=pairing.trainer.policy,
        provider="stock" if pairing.trainer.stock else "reference",
        served=served,
        rollout=None if pairing.engine.stock else pairing.engine.policy,
        engine=engine_options(arm, options, longest_prompt),
        problems=str(options.problems),
        tokenizer=None if options.tiny else options.model,
        steps=options.steps,
        prompts=options.prompts,
        samples=options.samples,
        length=options.length,
        learning_rate=options.lr,
        micro_batch=options.micro_batch,
        rows=str(options.work / arm_slug(arm)),
        until=options.until,
    )


@functools.cache
def exported(model: str, folder: Path, policy: str) -> str:
    """What our plugin serves, made once for the processes of all seeds."""
    return str(export_checkpoint(model, folder, policy))


def arm_slug(arm: str) -> str:
    return arm.replace("/", "-").replace(" ", "-")


def own_environment(*, stock: bool) -> dict[str, str]:
    if not torch.cuda.is_available():
        # even stock engines need the plugin: theirs pack the weights where no update reaches them
        return {"JETGRAPH_PLAIN_LINEAR": "1"}
    # vLLM's second model runner takes logprobs by kernels of its own, whose sums are not training's: one for all arms
    return {"VLLM_USE_V2_MODEL_RUNNER": "0"} | ({"VLLM_PLUGINS": ""} if stock else {})


def devices() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` is to be for each GPU that this process sees; one empty name if it sees none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return names or [""]


def run_job(job: Job, path: Path, device: str) -> bool:
    """One arm's process on one of `devices` to its end, if there is time for it; False if it failed, which it says."""
    if job.until is not None and time.time() > job.until:
        return True
    job.save(path)
    environment = {**ENVIRONMENT, **os.environ, **own_environment(stock=job.rollout is None)}
    environment["CUDA_VISIBLE_DEVICES"] = device
    environment["VLLM_CACHE_ROOT"] = str(path.with_suffix(".cache"))  # two engines that write one entry damage it

    def say(line: str) -> None:
        print(f"{job.name}: {line}", flush=True)

    status, last = run_module("benchmarks.grpo.arm", path, environment, "rl: ", say, stdout=subprocess.DEVNULL)
    if status == 0:
        return True
    print(f"{job.name}, seeds {job.seeds}: failed; its last lines:\n" + "\n".join(last), flush=True)
    return False


def run(options: argparse.Namespace) -> bool:
    """Every arm, on all GPUs in turn; False if one failed."""
    longest = max(map(len, Problems.load(options.problems, None).prompts))
    groups = [[seed] for seed in options.seeds] if options.split_seeds else [list(options.seeds)]
    jobs = [job_of(arm, seeds, options, longest) for seeds in groups for arm in options.arms]
    with ThreadPoolExecutor(max_workers=options.together) as pool:
        paths = [Path(f"{job.rows}-{job.seeds[0]}.job.json") for job in jobs]
        return all(list(pool.map(run_job, jobs, paths, itertools.cycle(devices()))))


def settings(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """What all steps of one report have in common."""
    names = ("prompts", "samples", "length", "lr", "naive", "eager")
    told = {name: getattr(options, name) for name in names}
    return told | {"model": Path(options.model).name, "masters": "float32", "device": device, "versions": versions()}


def keep_settings(work: Path, told: dict[str, Any]) -> None:
    """Write ``told`` beside the steps, whose arms and seeds may come from several calls.

    Raises:
        ValueError: the steps that lie there were made with others.
    """
    path = work / SETTINGS
    before = json.loads(path.read_text()) if path.is_file() else told
    if different := [name for name in told if before.get(name) != told[name]]:
        name = different[0]
        was, now = before.get(name), told[name]
        raise ValueError(f"the steps in {work} were made with {name} {was}, and now it is {now}: take another --work")
    path.write_text(json.dumps(told, indent=1) + "\n")


def finish(options: argparse.Namespace, told: dict[str, Any]) -> int:
    """Rows, curves and steps of whatever lies in ``--work``; 1 if jet is not exact, or an arm has no step."""
    steps: dict[str, list[curves.Step]] = {
        arm: [step for path in sorted(options.work.glob(f"{arm_slug(arm)}-*.jsonl")) for step in curves.read(path)]
        for arm in options.arms
    }
    done = {arm: of_arm for arm, of_arm in steps.items() if of_arm}
    found = [row for arm, of_arm in done.items() for row in curves.rows(arm, of_arm, must_be_exact=arm == "jet")]
    curves.draw(done, options.picture)
    beside = options.picture.with_name(f"{options.picture.stem}-steps.json")
    beside.write_text(json.dumps(told | {"arms": steps}) + "\n")
    return max(report(found, options.json, told["device"]), int(len(done) < len(steps)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2", help="folder of SmolLM2's weights and tokenizer")
    parser.add_argument("--problems", type=Path, help="what --write-problems wrote")
    parser.add_argument("--write-problems", type=Path, help="only write the problems of all steps into this file")
    parser.add_argument("--style", choices=list(INSTRUCTIONS), default="short", help="of --write-problems")
    parser.add_argument("--terms", type=int, default=2, help="of --write-problems: at most so many numbers a sum")
    parser.add_argument("--digits", type=int, default=2, help="of --write-problems: at most so many digits a number")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--naive", choices=["stock", "codes"], help="whose FP8 the naive arm serves")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="problems a step")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="answers to each problem")
    parser.add_argument("--length", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--micro-batch", type=int, default=16384, help="most tokens of one forward, padding included")
    parser.add_argument("--together", type=int, default=1, help="processes at a time; phases then share the device")
    parser.add_argument("--split-seeds", action="store_true", help="a process for each seed, not for each arm")
    parser.add_argument("--minutes", type=float, help="no step begins after so long")
    parser.add_argument("--eager", action="store_true", help="engines without CUDA graphs and compilation")
    parser.add_argument("--work", type=Path, help="keeps steps and served folders there")
    parser.add_argument("--only-report", action="store_true", help="of the steps that lie in --work, on any machine")
    parser.add_argument("--picture", type=Path, default=Path("out/rl.svg"), help="the curves; all steps go beside it")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--tiny", action="store_true", help="a random model, two steps, any machine: no measurement")
    if parser.parse_known_args(arguments)[0].tiny:
        parser.set_defaults(**TINY)
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    options.naive = options.naive or ("stock" if on_gpu else "codes")
    if options.tiny or options.only_report or options.write_problems:
        return options
    if not on_gpu:
        parser.error("needs a CUDA device, and this machine has none; --tiny runs anywhere")
    if options.problems is None:
        parser.error("--problems FILE is needed; --write-problems FILE makes it")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.write_problems:
        count = options.steps * options.prompts
        found = chain_sums(options.model, count, terms=options.terms, digits=options.digits, style=options.style)
        found.save(options.write_problems)
        return 0
    options.until = time.time() + 60 * options.minutes if options.minutes else None
    with tempfile.TemporaryDirectory() as folder:
        options.work = options.work or Path(folder)
        options.work.mkdir(parents=True, exist_ok=True)
        if options.tiny:
            options.model = str(write_model(options.work / "model", 2, tiny=True))
            options.problems = options.work / "problems.json"
            random_problems(512, options.steps * options.prompts, 7).save(options.problems)
        if options.only_report:
            told = json.loads((options.work / SETTINGS).read_text())
        else:
            told = settings(options, device_name() if torch.cuda.is_available() else "cpu, tiny: no measurement")
            keep_settings(options.work, told)
        failed = not options.only_report and not run(options)
        return max(finish(options, told), int(failed))


if __name__ == "__main__":
    sys.exit(main())
