"""BF16 masters that keep small updates, and how much of a model a step changes (A10, N9)."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetgraph.masters import RoundedMasters, rounding, snapshot
from tests.core.small_models import random_model

MODES = ["nearest", "stochastic", "kahan", "split"]
RATE, STEPS = 1e-6, 100


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values).bfloat16()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- rounding rules


@pytest.mark.parametrize("share", [0.0625, 0.25, 0.5, 0.9375])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_is_right_on_average(share, sign):
    """A number that lies ``share`` of the way from 1 to its neighbour 1 + 2^-7 is rounded up that often."""
    value = torch.full((100_000,), sign * (1 + share / 128))
    rounded = rounding.stochastic(value, generator()).double() * sign
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    deviation = math.sqrt(share * (1 - share) / len(value))
    assert (rounded > 1).double().mean().item() == pytest.approx(share, abs=4 * deviation)


def test_stochastic_rounding_leaves_what_needs_none():
    values = bf16(0.0, -0.0, 1.0, -3.5, 2.0**-133, 3.3895e38, math.inf, -math.inf).float()
    exact = rounding.stochastic(values, generator())
    assert torch.equal(exact.view(torch.int16), values.bfloat16().view(torch.int16))
    # of all bits set, where adding noise carries out of the word
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounding.stochastic(nan, generator()).isnan().all()
    assert rounding.stochastic(torch.empty(0, 3), generator()).shape == (0, 3)


def test_stochastic_rounding_of_a_transposed_tensor():
    value = torch.rand(3, 5, generator=generator())
    turned = rounding.stochastic(value.T.contiguous().T, generator(1))
    assert torch.equal(turned, rounding.stochastic(value, generator(1)))


def test_kahan_keeps_what_was_lost_to_eight_more_bits():
    rounded, lost = rounding.compensated(torch.tensor([1 + 2**-9, 1 + 2**-8 + 2**-10]))
    assert rounded.tolist() == [1.0, 1.0078125]
    assert lost.tolist() == [2**-9, 2**-8 + 2**-10 - 2**-7]
    assert rounding.compensated(torch.tensor([math.inf, 3.4e38]))[1].tolist() == [0.0, 0.0]


@settings(max_examples=100)
@given(st.integers(-(2**31), 2**31 - 1))
def test_split_gives_back_every_float32(bits):
    """All bit patterns but NaN; half-way above an even BF16 it is one last place off, as its docstring says."""
    value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    if value.isnan():
        return
    rounded, distance = rounding.split(value)
    assert torch.equal(rounded, value.bfloat16())
    returned = rounding.joined(rounded, distance).view(torch.int32).item()
    assert returned == (bits - 1 if bits & 0x1FFFF == 0x8000 and value.isfinite() else bits)


@pytest.mark.parametrize("bits", [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000, 0, 0x7F800000])
def test_split_at_its_edges(bits):
    test_split_gives_back_every_float32.hypothesis.inner_test(bits)


# ---- the experiment: what survives a hundred small steps


def after_steps(mode: str, weights: torch.Tensor, update: torch.Tensor, steps: int = STEPS):
    """The weights after ``steps`` of += RATE · update, as a forward reads them, and with what is kept beside them."""
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = RoundedMasters(torch.optim.SGD([parameter], lr=RATE), mode)
    for _ in range(steps):
        parameter.grad = -update
        optimizer.step()
    beside = optimizer.state[parameter].get("compensation")
    if mode == "split":
        return parameter.detach().double(), rounding.joined(parameter.detach(), beside).double()
    return parameter.detach().double(), parameter.detach().double() + (beside.double() if beside is not None else 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_steps_of_a_millionth(mode):  # [A10, N9: the mean moves by 1e-4 ± 10 %]
    weights = (torch.randn(1 << 16, generator=generator()) * 0.02).bfloat16()
    seen, _ = after_steps(mode, weights, torch.ones_like(weights))
    moved = (seen - weights.double()).mean().item() / (STEPS * RATE)
    if mode == "nearest":
        assert moved < 0.1
    else:
        assert moved == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_updates_of_a_millionth_of_the_weight(mode):
    """Relative 1e-6 is a 4,000th of the step from one BF16 to the next: only chance moves a weight within 100 steps."""
    weights = (1 + torch.rand(1 << 16, generator=generator())).bfloat16()
    seen, whole = after_steps(mode, weights, weights)
    moved, kept = (((x / weights.double()) - 1).mean().item() / (STEPS * RATE) for x in (seen, whole))
    if mode == "nearest":
        assert kept == 0
    else:
        assert kept == pytest.approx(1.0, rel=0.1)
    assert (moved == pytest.approx(1.0, rel=0.1)) == (mode == "stochastic")


def test_what_kahan_loses_in_the_end_and_split_does_not():
    """700 steps of relative 1e-6; a BF16 compensation stops growing below 4e-4, which never reaches a weight."""
    weights = (1 + torch.rand(1 << 10, generator=generator())).bfloat16()
    wholes = {mode: after_steps(mode, weights, weights, 700)[1] for mode in ("kahan", "split")}
    moved = {mode: ((whole / weights.double()) - 1).mean().item() for mode, whole in wholes.items()}
    assert moved["kahan"] < 4e-4
    assert moved["split"] == pytest.approx(7e-4, rel=0.01)


def mixed_parameters() -> list[torch.nn.Parameter]:
    """BF16 masters of several sizes, an FP32 parameter among them, and one that never gets a gradient."""
    shapes = [((32, 48), torch.bfloat16), ((48,), torch.float32), ((7, 3, 2), torch.bfloat16), ((5,), torch.bfloat16)]
    make = generator(3)
    return [torch.nn.Parameter((torch.randn(shape, generator=make) * 0.02).to(dtype)) for shape, dtype in shapes]


def give_gradients(parameters, step: int) -> None:
    make = generator(100 + step)
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=make).to(parameter.dtype)


def test_split_is_training_with_float32_masters():
    """AdamW with weight decay: bits of every weight are those of FP32 masters cast once, in every step."""
    ours = mixed_parameters()
    masters = [torch.nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in ours]
    optimizer = RoundedMasters(torch.optim.AdamW(ours, lr=1e-4), "split", chunk=64)
    reference = torch.optim.AdamW(masters, lr=1e-4)
    for step in range(20):
        give_gradients(ours, step)
        for parameter, master in zip(ours, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        reference.step()
        for parameter, master in zip(ours, masters, strict=True):
            assert torch.equal(parameter, master.to(parameter.dtype))


# ---- the wrapper


INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "groups": lambda p: torch.optim.Adam([{"params": p[:2], "lr": 1e-2}, {"params": p[2:]}], lr=1e-3),
}


@pytest.mark.parametrize("inner", INNER)
def test_nearest_is_the_inner_optimizer_in_float32_and_one_rounding(inner):
    """And so for any number of parameters that have FP32 copies at one time."""
    ours, others = mixed_parameters(), mixed_parameters()
    optimizer = RoundedMasters(INNER[inner](ours), "nearest")
    few = RoundedMasters(INNER[inner](others), "nearest", chunk=1)
    wide = [torch.nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in ours]
    reference = INNER[inner](wide)
    for step in range(4):
        for parameters in (ours, others):
            give_gradients(parameters, step)
        for parameter, copied in zip(ours, wide, strict=True):
            copied.data = parameter.detach().to(torch.float32, copy=True)
            copied.grad = None if parameter.grad is None else parameter.grad.float()
        for each in (optimizer, few, reference):
            each.step()
        for parameter, other, copied in zip(ours, others, wide, strict=True):
            assert torch.equal(parameter, copied.to(parameter.dtype))
            assert torch.equal(parameter, other)
    assert all(p.dtype == q.dtype and p.grad is q.grad is None for p, q in [(ours[-1], others[-1])])
    assert optimizer.state[ours[0]] != {}
    assert ours[3] not in optimizer.state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inner", ["adamw", "sgd", "groups"])
def test_a_resumed_run_repeats_the_bits(mode, inner, tmp_path):
    through, stopped = mixed_parameters(), mixed_parameters()
    runs = [(p, RoundedMasters(INNER[inner](p), mode, seed=5)) for p in (through, stopped)]
    for step in range(3):
        for parameters, optimizer in runs:
            give_gradients(parameters, step)
            optimizer.step()
    torch.save([stopped, runs[1][1].state_dict()], tmp_path / "checkpoint.pt")
    resumed, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again = RoundedMasters(INNER[inner](resumed), mode, seed=99)  # the checkpoint's seed counts
    again.load_state_dict(state)
    for step in range(3, 6):
        for parameters, optimizer in ((through, runs[0][1]), (resumed, again)):
            give_gradients(parameters, step)
            optimizer.step()
    assert all(map(torch.equal, through, resumed))
    for entries, others in zip(
        runs[0][1].state_dict()["state"].values(), again.state_dict()["state"].values(), strict=True
    ):
        assert {k: v.dtype for k, v in entries.items() if v is not None} == {
            k: v.dtype for k, v in others.items() if v is not None
        }


def test_seeds_and_steps_draw_other_numbers():
    outcomes = []
    for seed in (0, 0, 1):
        parameter = torch.nn.Parameter(torch.ones(1000).bfloat16())
        optimizer = RoundedMasters(torch.optim.SGD([parameter], lr=1e-3), "stochastic", seed=seed)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            outcomes.append((parameter.detach() != 1).clone())
            parameter.data.fill_(1)
    assert torch.equal(outcomes[0], outcomes[2])
    assert torch.equal(outcomes[1], outcomes[3])
    assert not torch.equal(outcomes[0], outcomes[1])  # another step
    assert not torch.equal(outcomes[0], outcomes[4])  # another seed


def test_the_state_of_a_plain_run_is_taken_over():
    ours = mixed_parameters()
    plain = INNER["adamw"](ours)
    give_gradients(ours, 0)
    plain.step()
    rounded = RoundedMasters(INNER["adamw"](ours), "kahan")
    rounded.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert torch.equal(rounded.state[ours[0]]["exp_avg"], plain.state[ours[0]]["exp_avg"].float())
    give_gradients(ours, 1)
    rounded.step()
    assert rounded.state[ours[0]]["step"] == 2
    assert rounded.state[ours[0]]["compensation"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="saved with mode kahan, loaded into 'split'"):
        RoundedMasters(INNER["adamw"](mixed_parameters()), "split").load_state_dict(rounded.state_dict())


def test_schedulers_clipping_and_closures():
    ours = mixed_parameters()
    optimizer = RoundedMasters(torch.optim.SGD(ours, lr=1.0), "nearest")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    give_gradients(ours, 0)
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)
    before = [p.detach().clone() for p in ours]
    optimizer.step()
    assert not torch.equal(before[0], ours[0])
    assert (before[0].float() - ours[0].float()).norm() < 2e-3
    schedule.step()
    before = [p.detach().clone() for p in ours]
    assert optimizer.step(lambda: give_gradients(ours, 1) or 4.5) == 4.5
    assert all(map(torch.equal, before, ours))  # the learning rate is 0 now
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours)


def test_gradients_and_parameters_stay_what_they_were():
    """Also when the inner optimizer fails in the middle: no gradient is lost, no FP32 copy stays."""
    ours = mixed_parameters()
    inner = INNER["adamw"](ours)
    optimizer = RoundedMasters(inner, "split")
    give_gradients(ours, 0)
    gradients, addresses = [p.grad for p in ours], [p.data_ptr() for p in ours]
    optimizer.step()

    def fail(*_):
        raise FloatingPointError

    hook = inner.register_step_pre_hook(fail)
    before = [p.detach().clone() for p in ours]
    with pytest.raises(FloatingPointError):
        optimizer.step()
    hook.remove()
    assert all(map(torch.equal, before, ours))
    assert all(p.grad is g for p, g in zip(ours, gradients, strict=True))
    assert [p.data_ptr() for p in ours] == addresses
    assert sum(p.numel() for group in inner.param_groups for p in group["params"]) == ours[1].numel()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: RoundedMasters(torch.optim.SGD(p, lr=1.0), "up"), "mode is 'up': expected one of nearest"),
        (lambda p: RoundedMasters(torch.optim.LBFGS(p), "kahan"), "LBFGS"),
        (lambda p: RoundedMasters(torch.optim.SGD([p[0].half().detach()], lr=1.0), "kahan"), "torch.float16"),
        (
            lambda p: RoundedMasters(torch.optim.SGD(p, lr=1.0), "kahan").add_param_group({"params": [p[0].clone()]}),
            "before it is wrapped",
        ),
    ],
)
def test_what_cannot_be_rounded(make, says):
    with pytest.raises(ValueError, match=says):
        make([p.detach() for p in mixed_parameters()])


def test_an_optimizer_that_has_stepped_and_sparse_gradients():
    ours = mixed_parameters()
    inner = INNER["adamw"](ours)
    give_gradients(ours, 0)
    inner.step()
    with pytest.raises(ValueError, match="wrap a new one"):
        RoundedMasters(inner, "kahan")
    table = torch.nn.Embedding(4, 3, sparse=True, dtype=torch.bfloat16)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        RoundedMasters(torch.optim.SGD(table.parameters(), lr=1.0), "kahan").step()


# ---- FSDP2


def sharded_worker(output: Path) -> None:
    """Two ranks, odd sizes (one rank of `bias` is empty): three AdamW steps, a checkpoint, two more."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    results = {}
    for mode in MODES:
        runs = []
        for _ in range(2):
            model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)).bfloat16()
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator(number)) * 0.02)
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            runs.append((model, RoundedMasters(torch.optim.AdamW(model.parameters(), lr=1e-3), mode)))
        for step in range(5):
            if step == 3:  # the second run goes on from the first one's checkpoint
                (first, saved), (second, loaded) = runs
                second.load_state_dict(first.state_dict())
                state = copy.deepcopy(get_optimizer_state_dict(first, saved))
                set_optimizer_state_dict(second, loaded, state)
            for model, optimizer in runs[: 1 if step < 3 else 2]:
                for parameter in model.parameters():
                    whole = torch.randn(parameter.shape, generator=generator(50 + step)).bfloat16()
                    parameter.grad = torch.distributed.tensor.distribute_tensor(
                        whole, parameter.device_mesh, parameter.placements
                    )
                optimizer.step()
        gathered = [[p.full_tensor().detach() for p in model.parameters()] for model, _ in runs]
        shard = next(iter(runs[0][1].state_dict()["state"].values()))["exp_avg"]
        results[mode] = (*gathered, tuple(shard.shape))
    if dist.get_rank() == 0:
        torch.save(results, output)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_masters_equal_whole_ones_and_resume(tmp_path):
    children = []
    for rank in range(2):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                    "MASTER_PORT": str(29950 + os.getpid() % 40), "OMP_NUM_THREADS": "1"}  # fmt: skip
        command = [sys.executable, "-m", "tests.core.test_masters_rounding", str(tmp_path / "results.pt")]
        children.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors[-3000:]
    results = torch.load(tmp_path / "results.pt")
    shapes = [(5, 6), (5,), (1, 5), (1,)]
    for mode in MODES:
        first, resumed, shape = results[mode]
        assert shape == (5, 6)  # of the whole weight: a checkpoint can be resharded
        assert all(map(torch.equal, first, resumed)), mode
        whole = [
            torch.nn.Parameter((torch.randn(s, generator=generator(i)) * 0.02).bfloat16()) for i, s in enumerate(shapes)
        ]
        optimizer = RoundedMasters(torch.optim.AdamW(whole, lr=1e-3), mode)
        for step in range(5):
            for parameter in whole:
                parameter.grad = torch.randn(parameter.shape, generator=generator(50 + step)).bfloat16()
            optimizer.step()
        if mode != "stochastic":  # which draws other numbers for other shards
            assert all(map(torch.equal, first, whole)), mode


# ---- how much a step changes


def test_changes_of_known_steps():
    model = random_model()
    weight = model.model.layers[0].mlp.up_proj.weight  # [448, 320]: 4 by 3 blocks
    with torch.no_grad():
        weight.fill_(0.01)
    before = snapshot(model, "jet")
    nothing = before.changes(model)
    assert nothing.num_weights == sum(p.numel() for p in model.parameters())
    assert nothing.scalars("") == {"weights_changed": 0.0, "codes_changed": 0.0, "scales_changed": 0.0}
    with torch.no_grad():
        weight[0, 0] = 0.015  # its block's scale grows by half, so all codes in it change; its own stays 448
    changes = before.changes(model)
    assert changes.num_weights_changed == 1
    assert changes.num_codes_changed == 128 * 128 - 1
    assert changes.num_scales_changed == 1
    with torch.no_grad():
        weight.fill_(0.015)  # [N6: every code stays 448, only scales change]
        model.model.norm.weight[3] += 1
    changes = before.changes(model)
    assert changes.num_weights_changed == 448 * 320 + 1
    assert (changes.num_codes_changed, changes.num_scales_changed) == (0, 12)
    assert changes.num_codes == sum(p.numel() for n, p in model.named_parameters() if "_proj" in n)
    assert changes.scalars()["jetgraph/weights_changed"] == changes.num_weights_changed / changes.num_weights


def test_updates_that_fp8_does_not_see():
    """A weight that moves by one BF16 (1/128) inside its block mostly keeps its code (steps of 1/8)."""
    model = random_model()
    before = snapshot(model, "jet")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.view(torch.int16).add_(1)
    changes = before.changes(model).scalars("")
    assert changes["weights_changed"] > 0.3
    assert 0.01 < changes["codes_changed"] < 0.25


def test_changes_without_a_policy_or_of_float32_masters():
    model = random_model().float()
    before = snapshot(model)
    with torch.no_grad():
        model.model.norm.weight += 1e-6  # below BF16's resolution: the forward sees none of it
        model.lm_head.weight[0] += 1
    changes = before.changes(model)
    assert changes.num_weights_changed == model.lm_head.weight.shape[1]
    assert changes.scalars("") == {"weights_changed": changes.num_weights_changed / changes.num_weights}


def test_changes_of_another_model_or_of_nan():
    model = random_model()
    before = snapshot(model)
    with pytest.raises(ValueError, match="expected the model that was snapshotted"):
        before.changes(torch.nn.Linear(2, 2))
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match="model.norm.weight holds 1 values that are not finite"):
        before.changes(model)


if __name__ == "__main__":
    sharded_worker(Path(sys.argv[1]))
