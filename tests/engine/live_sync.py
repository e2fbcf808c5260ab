"""Run by `test_sync`: one trainer and one engine in one process, weights synced over and over, everything written down.

python -m tests.engine.live_sync FOLDER OUT.json, with a BF16 model in FOLDER/bf16

On a GPU both are there; the engine runs as it rolls out, in full CUDA graphs and scheduling ahead, and can sleep.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jetgraph_vllm.sync as sync
import torch
from jetgraph_vllm.engine import Completion, Engine
from transformers import AutoModelForCausalLM

import jetgraph
from jetgraph.digest import tensor_digest
from jetgraph.export import export_checkpoint
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.scoring import Rollout, Scores, mismatch
from jetgraph.sync import StoredUpdate, SyncRefused, publish, send, write_update
from jetgraph.sync import receiver as receiver_module
from jetgraph.trainer import capture_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 32
COMMON = [7 + 3 * i % 400 for i in range(BLOCK + 8)]
PROMPTS = [COMMON + [11, 12, 13], COMMON + [21], [31, 32, 33, 34, 35], [5, 6]]
SEEDS = [1, 2, 3, 4]
LAYER = "model.layers.0"
DOWN = f"{LAYER}.mlp.down_proj"
OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "block_size": BLOCK,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "max_model_len": 128,
}
ON_GPU: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05}
"""Others may use it too."""
AS_IT_ROLLS_OUT: dict[str, Any] = {
    "compilation": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    "enable_sleep_mode": True,  # of one engine in a process
}
if DEVICE == "cuda":
    OPTIONS |= ON_GPU


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer = self.masters().train()
        jetgraph.compile(self.trainer, "jet")
        own = AS_IT_ROLLS_OUT if DEVICE == "cuda" else {}
        self.engine = Engine(export_checkpoint(folder / "bf16", folder / "jet"), **OPTIONS, **own)
        self.live = sync.attach(self.engine)
        self.slots = self.live.receiver.store.slots
        self.found: dict[str, Any] = {"device": DEVICE, "start_seconds": self.engine.start_seconds, "failed": {}}

    def masters(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.folder / "bf16", dtype=torch.bfloat16).to(DEVICE)

    # ------------------------------------------------------------------------------------------------- looking

    def rollout(self) -> list[Completion]:
        return self.engine.generate(PROMPTS, max_tokens=6, seeds=SEEDS, prompt_logprobs=True)

    def exactness(self) -> dict[str, Any]:
        """Three rollouts against the trainer as it is now: a first one, one on a warm prefix cache, one with prompts.

        vLLM reads no cache for a request with prompt logprobs, so only the first two can meet an old block.
        """
        first, warm = (self.engine.generate(PROMPTS, max_tokens=6, seeds=SEEDS) for _ in range(2))
        prompts = self.rollout()
        scores: Scores = {}
        runs = (first, warm, prompts)
        found = [mismatch(self.trainer, [as_rollout(c) for c in run], scores=scores) for run in runs]
        return {
            "tokens": sum(m.num_tokens for m in found),
            "exact": sum(m.num_exact for m in found),
            "cached": [run[0].num_cached_tokens for run in (first, warm)],  # others may share blocks with the first
            "versions": sorted({v for run in runs for c in run for v in c.versions}),
            "num_versions": [len(c.versions) == len(c.tokens) for run in runs for c in run],
            "completions": plain(prompts),
        }

    def differing_bytes(self) -> dict[str, int]:
        """Bytes that differ between the engine's storage and the operator of training's forward on the masters."""
        linears = {n for n, p in self.trainer.jetgraph.linears().items() if p.quantized}
        arguments = scale_arguments(self.trainer.jetgraph.policy.linear(DOWN).weight.scale)
        count = {"codes": 0, "scales": 0, "plain": 0, "bytes": 0}
        for name, parameter in self.trainer.named_parameters():
            wanted = {("plain", name): parameter.detach()}
            if name.removesuffix(".weight") in linears:
                codes, scale = torch.ops.jetgraph.quantize(parameter.detach(), *arguments)
                wanted = {("codes", name): codes, ("scales", f"{name}_scale_inv"): scale}
            for (kind, held), tensor in wanted.items():
                a, b = (t.contiguous().view(torch.uint8) for t in (tensor, self.slots[held].live))
                count[kind] += int((a != b).sum())
                count["bytes"] += a.numel()
        return count

    def values(self) -> dict[str, Any]:
        return dataclasses.asdict(self.live.verify_values())

    # ------------------------------------------------------------------------------------------------- the story

    def as_loaded(self) -> None:
        self.found["loaded"] = {"bytes": self.differing_bytes(), "values": self.values(), **self.exactness()}
        self.found["aliases"] = dict(self.live.receiver.store.aliases)
        self.found["same_object"] = sync.attach(self.engine.llm) is self.live

    def two_optimizer_steps(self) -> None:
        optimizer = torch.optim.AdamW(self.trainer.parameters(), lr=2e-3)
        ids = torch.tensor([[(11 * i + 5) % 500 for i in range(40)]], device=DEVICE)
        self.found["steps"] = []
        for version in (1, 2):
            self.trainer(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = self.live.update(publish(self.trainer, version))
            self.found["steps"].append(
                {
                    "report": dataclasses.asdict(report),
                    "bytes": self.differing_bytes(),
                    "values": self.values(),
                    **self.exactness(),
                }
            )

    def operands_of_the_next_step(self) -> None:
        """Codes and scales that the next training step really multiplied, by the digests in its captured graph."""
        operands = capture_step(self.trainer.jetgraph, backward=False).graph.meta["operands"]
        held = {
            f"{name}.weight": tensor_digest(
                self.slots[f"{name}.weight"].live, self.slots[f"{name}.weight_scale_inv"].live
            )
            for name, p in self.trainer.jetgraph.linears().items()
            if p.quantized
        }
        self.found["operands"] = {"trained": operands, "held": held}

    def constant_weights(self) -> None:
        """[N6]: all codes 448 both times; only the scale tells 0.01 from 0.015."""
        weight = self.trainer.get_parameter(f"{DOWN}.weight")
        before, self.found["constant"] = weight.detach().clone(), []
        for version, value in ((3, 0.01), (4, 0.015)):
            with torch.no_grad():
                weight.fill_(value)
            report = self.live.update(publish(self.trainer, version))
            codes, scale = self.slots[f"{DOWN}.weight"].live, self.slots[f"{DOWN}.weight_scale_inv"].live
            self.found["constant"].append(
                {
                    "codes": sorted(set(codes.float().unique().tolist())),
                    "effective": (scale * 448).unique().tolist(),
                    "changed": report.changed,
                    **self.exactness(),
                }
            )
        with torch.no_grad():
            weight.copy_(before)

    def again_and_again(self) -> None:
        """[N6, W1]: the same weights three times, the second time through files."""
        self.found["again"] = []
        for version in (5, 6, 7):
            update = publish(self.trainer, version)
            if version == 6:
                write_update(update, self.folder / "update")
                update = StoredUpdate(self.folder / "update")
            report = self.live.update(update)
            self.found["again"].append({"changed": report.changed, "completions": plain(self.rollout())})

    def refused(self) -> None:
        """Every malformed update: what was raised, and what the engine answers afterwards."""
        other = self.masters()
        update = publish(other, 8, "jet")
        sent, manifest = list(update), update.manifest
        scale = f"{DOWN}.weight_scale_inv"
        cases = {
            "scale-less": [(n, t) for n, t in sent if n != scale],
            "partial": [(n, t) for n, t in sent if not n.startswith(DOWN)],
            "wrong shape": [(n, t[:-1] if n == "model.norm.weight" else t) for n, t in sent],
            "wrong dtype": [(n, t.bfloat16() if n == scale else t) for n, t in sent],
            "unknown": [(f"module.{n}", t) for n, t in sent],
        }
        self.found["refused"] = {}
        for case, tensors in cases.items():
            try:
                transaction = self.live.begin(8)
                for name, tensor in tensors:
                    transaction.put(name, tensor)
                transaction.commit(manifest)
                raised = ""
            except SyncRefused as error:
                raised = str(error)
            self.found["refused"][case] = self._after(raised)
        write, calls = receiver_module.write, []

        def fails_at_the_ninth(live: torch.Tensor, new: torch.Tensor, name: str) -> None:
            calls.append(name)
            if len(calls) == 9:
                raise RuntimeError(f"{name}: the device fell off")
            write(live, new, name)

        def fails_when_all_is_written(together: Any) -> None:  # on a GPU, where one launch writes everything
            write_together(together)
            raise RuntimeError("the device fell off")

        write_together = receiver_module.write_together
        receiver_module.write, receiver_module.write_together = fails_at_the_ninth, fails_when_all_is_written
        try:
            send(publish(other, 8, "jet"), self.live)
            raised = ""
        except SyncRefused as error:
            raised = str(error)
        finally:
            receiver_module.write, receiver_module.write_together = write, write_together
        self.found["refused"]["interrupted flip"] = self._after(raised)

    def _after(self, raised: str) -> dict[str, Any]:
        values = self.live.verify_values()
        completions = self.engine.generate(PROMPTS[:2], max_tokens=6, seeds=SEEDS[:2])
        return {"raised": raised, "version": self.live.version, "differing": values.differing + values.moved,
                "completions": [c["tokens"] for c in plain(completions)],
                "logprobs": [c.logprobs for c in completions]}  # fmt: skip

    def flip_under_running_requests(self) -> None:
        """Requests half-way through sampling when the weights change; each token against training at its version."""
        from vllm import SamplingParams

        engine = self.engine.llm.llm_engine
        for i, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(
                temperature=1.0, seed=SEEDS[i], max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False
            )
            engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        finished = []
        for _ in range(4):
            finished += [o for o in engine.step() if o.finished]
        old = {n: p.detach().clone() for n, p in self.trainer.named_parameters()}
        with torch.no_grad():
            for parameter in self.trainer.parameters():
                parameter.mul_(1.125)
        self.live.update(publish(self.trainer, 8))
        while engine.has_unfinished_requests():
            finished += [o for o in engine.step() if o.finished]
        tokens = []
        new_scores, old_scores = self._scores(finished), {}
        with torch.no_grad():
            for name, parameter in self.trainer.named_parameters():
                old_scores[name] = parameter.detach().clone()
                parameter.copy_(old[name])
        before = self._scores(finished)
        with torch.no_grad():
            for name, parameter in self.trainer.named_parameters():
                parameter.copy_(old_scores[name])
        for output in finished:
            sampled = output.outputs[0]
            for i, token in enumerate(sampled.token_ids):
                tokens.append(
                    {
                        "request": output.request_id,
                        "version": sampled.weight_versions[i],
                        "logprob": sampled.logprobs[i][token].logprob,
                        "trainer": {7: before[output.request_id][i], 8: new_scores[output.request_id][i]},
                    }
                )
        self.found["running"] = {"tokens": tokens, "after": self.exactness()}

    def _scores(self, outputs: list[Any]) -> dict[str, list[float]]:
        """Logprobs of the sampled tokens by the trainer as it is now."""
        from jetgraph.trainer import token_logprobs

        scores = {}
        for output in outputs:
            ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]], device=DEVICE)
            logits = self.trainer(input_ids=ids, use_cache=False).logits.detach()
            start = len(output.prompt_token_ids) - 1
            scores[output.request_id] = token_logprobs(logits[:, :-1], ids[:, 1:])[0].tolist()[start:]
        return scores

    def sleep(self) -> None:
        """[W7]: ends at version 9."""
        if DEVICE == "cuda":
            self._sleeps()
        else:
            self._cannot_sleep()

    def _sleeps(self) -> None:
        """Both levels: what is refused meanwhile and after waking, and what the engine answers then."""
        found: dict[str, Any] = {}
        for level in (1, 2):
            self.live.sleep(level)
            found[str(level)] = {
                "asleep": raised(self.rollout),
                "update": raised(lambda: self.live.update(publish(self.trainer, 9))),
            }
            self.live.wake_up()
            found[str(level)] |= {"values": self.values()}
            if level == 2:
                found[str(level)] |= {"woken": raised(self.rollout)}
                self.live.update(publish(self.trainer, 9))
            found[str(level)] |= self.exactness()
        self.found["sleep"] = found

    def _cannot_sleep(self) -> None:
        """What vLLM does without a sleep mode when it is told to sleep, and what weight sync makes of it."""
        llm = self.engine.llm
        found: dict[str, Any] = {}
        for level in (1, 2):
            found[f"ours {level}"] = raised(lambda level=level: self.live.sleep(level))
            llm.sleep(level=level)
            found[f"vllm {level}"] = {
                "is_sleeping": self.engine.core.model_executor.is_sleeping,
                "differing": self.live.verify_values().differing,
                "update": raised(lambda: self.live.update(publish(self.trainer, 9))),
            }
            llm.wake_up()
        found["enable_sleep_mode"] = raised(
            lambda: Engine(self.folder / "jet", enforce_eager=True, enable_sleep_mode=True, **OPTIONS)
        )
        self.live.receiver.lose_weights()  # as a level-2 sleep on a GPU leaves them
        found["without weights"] = raised(self.rollout)
        found["left behind"] = self.engine.scheduler.get_num_unfinished_requests()
        self.live.update(publish(self.trainer, 9))
        self.found["sleep"] = found | {"after": self.exactness()}

    def keeping_the_prefix_cache(self) -> None:
        """[W9] The control: an update that leaves the cache alone is caught by the comparison used everywhere here."""
        store = self.live.receiver.store
        with torch.no_grad():
            for parameter in self.trainer.parameters():
                parameter.mul_(1.125)
        stop, store.stop = store.stop, lambda: None
        self.live.update(publish(self.trainer, 10))
        store.stop = stop
        stale = self.exactness()
        self.live.update(publish(self.trainer, 11))
        self.found["prefix cache"] = {"kept": stale, "reset": self.exactness()}

    def fresh_engine(self) -> None:
        """[N6, W9]: an engine that loads what the synced one holds answers the same."""
        self.trainer.save_pretrained(self.folder / "trained")
        folder = export_checkpoint(self.folder / "trained", self.folder / "fresh")
        synced = plain(self.rollout())
        fresh = Engine(folder, enforce_eager=True, **OPTIONS)
        mine = fresh.generate(PROMPTS, max_tokens=6, seeds=SEEDS, prompt_logprobs=True)
        self.found["fresh"] = {"synced": synced, "fresh": plain(mine)}


def as_rollout(c: Completion) -> Rollout:
    given = None if c.prompt_logprobs is None else tuple(c.prompt_logprobs)
    return Rollout(tuple(c.prompt), tuple(c.tokens), tuple(c.logprobs), given)


def plain(completions: list[Completion]) -> list[dict[str, Any]]:
    return [{"tokens": c.tokens, "logprobs": c.logprobs, "prompt": c.prompt_logprobs} for c in completions]


def raised(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: str, out: str) -> None:
    run = Run(Path(folder))
    for act in (
        run.as_loaded,
        run.two_optimizer_steps,
        run.operands_of_the_next_step,
        run.constant_weights,
        run.again_and_again,
        run.refused,
        run.flip_under_running_requests,
        run.sleep,
        run.keeping_the_prefix_cache,
        run.fresh_engine,
    ):
        start = time.perf_counter()
        try:
            act()
        except Exception:  # what comes after it is told all the same
            run.found["failed"][act.__name__] = traceback.format_exc(limit=-4)
        print(f"jetgraph_vllm: {act.__name__}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        Path(out).write_text(json.dumps(run.found))


if __name__ == "__main__":
    main(*sys.argv[1:])
