"""FSDP2 and DDP on gloo: the parameters after training equal a single process's, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import jetgraph
from tests.core.small_models import random_ids, random_model

pytestmark = pytest.mark.slow
STEPS = 2


MAX_NORM = {"ddp": 1.0, "fsdp": 1e6}
"""FSDP adds up a gradient's norm shard by shard, so its last bit, and with it every clipped gradient's, is its own.
There the limit is one that nothing reaches: the clipping runs, and multiplies by exactly 1."""


def train(model, run, parameters, max_norm: float) -> None:
    """Every process sees the same batch, so averaged gradients equal one process's: (g + g) / 2 is exact."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    for step in range(STEPS):
        ids = random_ids(model, 1, 24 + 9 * step, seed=step)
        logits = run(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


def worker(kind: str, output: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = random_model()
    if kind == "ddp":
        jetgraph.compile(model, "jet")
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        train(model, wrapped, list(model.parameters()), MAX_NORM["ddp"])
        state = {n: p.detach() for n, p in model.named_parameters()}
    else:
        state = fsdp(model.float(), compile_first=kind == "fsdp-compile-first")
    model.jetgraph.coverage().require()
    if rank == 0:
        torch.save(state, output)
    dist.barrier()
    dist.destroy_process_group()


def fsdp(model, *, compile_first: bool) -> dict[str, torch.Tensor]:
    """FSDP2 with FP32 masters and BF16 compute, sharded by block; returns the gathered masters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if compile_first:
        jetgraph.compile(model, "jet")
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not compile_first:
        jetgraph.compile(model, "jet")
    seen = used_codes()
    train(model, model, list(model.parameters()), MAX_NORM["fsdp"])
    gathered = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    with torch.no_grad():  # P3: the codes of the next forward are those of the whole weight
        seen.clear()
        model(input_ids=random_ids(model, 1, 24), use_cache=False)
    for name, master in gathered.items():
        if "_proj" in name:
            codes, _ = torch.ops.jetgraph.quantize(master.bfloat16(), 128, 128, 448.0, 1e-12, "div", False)
            assert codes.view(torch.uint8).numpy().tobytes() in seen, name
    return gathered


def used_codes() -> set[bytes]:
    """The codes of every weight that `jetgraph::quantize` makes from now on."""
    from jetgraph.lowering import reference

    seen: set[bytes] = set()
    plain = reference.quantize

    def watching(x, rows, *rest):
        codes, scale = plain(x, rows, *rest)
        if rows == 128:
            seen.add(codes.view(torch.uint8).numpy().tobytes())
        return codes, scale

    reference.quantize = watching
    return seen


@pytest.fixture(scope="module")
def single_process():
    """The same steps in one process: BF16 masters for DDP; FP32 masters with one BF16 cast for FSDP2."""
    plain = jetgraph.compile(random_model(), "jet")
    train(plain, plain, list(plain.parameters()), MAX_NORM["ddp"])
    model = jetgraph.compile(random_model(), "jet")  # computes in BF16; the masters live beside it
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]

    class Masters(torch.nn.Module):
        config = model.config

        def forward(self, **inputs):
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
                    parameter.grad = None
            return model(**inputs)

    run = Masters()
    optimizer = torch.optim.AdamW(masters, lr=1e-3, foreach=False)
    for step in range(STEPS):
        ids = random_ids(model, 1, 24 + 9 * step, seed=step)
        logits = run(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM["fsdp"], foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    names = [n for n, _ in model.named_parameters()]
    return {
        "ddp": {n: p.detach() for n, p in plain.named_parameters()},
        "fsdp": dict(zip(names, (m.detach() for m in masters), strict=True)),
    }


@pytest.mark.parametrize(
    ("kind", "world"), [("ddp", 2), ("fsdp-compile-first", 1), ("fsdp-compile-first", 2), ("fsdp-shard-first", 2)]
)
def test_parameters_equal_a_single_process(tmp_path, single_process, kind, world):
    port = str(29600 + os.getpid() % 300 + world)
    children = []
    for rank in range(world):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                                    "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}  # fmt: skip
        command = [sys.executable, "-m", "tests.core.test_distributed", json.dumps([kind, str(tmp_path / "state.pt")])]
        children.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for child in children:
        _, errors = child.communicate(timeout=600)
        assert child.returncode == 0, errors[-3000:]
    state = torch.load(tmp_path / "state.pt")
    expected = single_process[kind.split("-")[0]]
    assert state.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(state[n], expected[n])] == []


if __name__ == "__main__":
    name, path = json.loads(sys.argv[1])
    worker(name, Path(path))
