"""Weight sync without an engine: what is taken is taken whole, what is refused changes nothing, and both ends agree."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.policy import get_policy
from jetgraph.sync import (
    Manifest,
    Receiver,
    SleepGuard,
    StoredUpdate,
    SyncRefused,
    TensorSpec,
    Update,
    WeightsLost,
    publish,
    send,
    write_update,
)
from tests.core.fake_engine import LAYER, MERGED, FakeEngine, connected, raw
from tests.core.small_models import random_family

LINEARS = [name for names in MERGED for name in names]
DOWN, GATE, UP = f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"
EMBEDDING = "model.embed_tokens.weight"
Sent = list[tuple[str, Tensor]]


def small_model(seed: int = 0) -> torch.nn.Module:
    """One Qwen2 layer: biases, a tied head, 320 = 2.5 blocks of rows and columns, K and V of half a block."""
    return random_family("qwen2", layers=1, seed=seed, vocab_size=500, intermediate_size=448)


@pytest.fixture(scope="module")
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return small_model(0), small_model(1)


@pytest.fixture(scope="module")
def second(models) -> tuple[Sent, Manifest]:
    """All of the second model as version 2."""
    return whole(models[1], 2)


@pytest.fixture
def serving(models) -> tuple[FakeEngine, Receiver]:
    """An engine that serves version 1: the first model."""
    engine, receiver = connected(models[0])
    send(publish(models[0], 1, "jet"), receiver)
    return engine, receiver


def expected_bytes(model: torch.nn.Module, policy: str = "jet") -> dict[str, bytes]:
    """What an engine must hold, by the trainer's operator alone."""
    arguments = scale_arguments(get_policy(policy).linear(DOWN).weight.scale)
    found = {}
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") in LINEARS:
            codes, scale = torch.ops.jetgraph.quantize(parameter.detach(), *arguments)
            found |= {name: raw(codes), f"{name}_scale_inv": raw(scale)}
        else:
            found[name] = raw(parameter)
    return found


def whole(model: torch.nn.Module, version: int) -> tuple[Sent, Manifest]:
    update = publish(model, version, "jet")
    return list(update), update.manifest


def deliver(receiver: Receiver, sent: Iterable[tuple[str, Tensor]], manifest: Manifest, version: int = 2) -> None:
    """`send` by hand, so that a test can change what is sent."""
    transaction = receiver.begin(version)
    for name, tensor in sent:
        transaction.put(name, tensor)
    transaction.commit(manifest)


# ------------------------------------------------------------------------------------------------ what is taken


def test_codes_scales_and_plain_tensors_are_the_trainers_bytes(models, serving):  # [JG017, V16]
    engine, receiver = serving
    assert engine.live_bytes() == expected_bytes(models[0])
    report = send(publish(models[1], 2, "jet"), receiver)
    assert engine.live_bytes() == expected_bytes(models[1])
    assert receiver.version == report.version == 2
    assert report.num_tensors == len(engine.slots) == 14 + len(LINEARS)
    assert report.num_bytes == sum(len(b) for b in expected_bytes(models[1]).values())
    assert 0 < report.stall_seconds <= report.seconds


def test_merged_parts_keep_their_own_grids_and_padding_is_not_written(models, serving):  # [W4, K16]
    engine, _ = serving
    qkv = [engine.slots[f"{name}.weight_scale_inv"].live for name in MERGED[0]]
    assert [tuple(scale.shape) for scale in qkv] == [(3, 3), (1, 3), (1, 3)]
    assert len({scale.untyped_storage().data_ptr() for scale in qkv}) == 1
    storage = engine.slots[EMBEDDING].live._base
    assert storage[500:].count_nonzero() == 0
    assert torch.equal(storage[:500], models[0].get_parameter(EMBEDDING))


@pytest.mark.parametrize("seed", range(4))
def test_any_order_gives_the_same_bytes(seed, models, second, serving):
    engine, receiver = serving
    sent, specs = list(second[0]), list(second[1].specs)
    for listed in (sent, specs):
        random.Random(seed).shuffle(listed)
    deliver(receiver, sent, Manifest(2, "jet", tuple(specs)))
    assert engine.live_bytes() == expected_bytes(models[1])
    assert receiver.manifest.digest == second[1].digest


def test_the_engine_computes_with_what_was_sent(models, serving):
    """What it derived from the weights is new too, not only the weights."""
    engine, receiver = serving
    send(publish(models[1], 2, "jet"), receiver)
    for name in LINEARS:
        master = models[1].get_parameter(f"{name}.weight").float()
        assert (engine.weight(name) - master).abs().max() <= master.abs().max() * 2**-4


def test_the_same_weights_three_times_move_nothing(models, serving):  # [N6, W1]
    engine, receiver = serving
    before, served = engine.live_bytes(), {n: t.clone() for n, t in engine.served.items()}
    for version in (2, 3, 4):
        report = send(publish(models[0], version, "jet"), receiver)
        assert all(changed == 0 for changed, _ in report.changed.values())
        assert engine.live_bytes() == before
        assert all(torch.equal(engine.served[n], served[n]) for n in served)
    assert receiver.version == 4


def test_a_second_sync_takes_the_new_scale_though_no_code_changes():  # [N6, W5]
    """0.01 and then 0.015 everywhere: every code is 448 both times, only the scale says which."""
    model = small_model()
    weight = model.get_parameter(f"{DOWN}.weight")
    engine, receiver = connected(model)
    counts = []
    for version, value in enumerate((0.01, 0.015), 1):
        with torch.no_grad():
            weight.fill_(value)
        counts.append(send(publish(model, version, "jet"), receiver).changed)
        assert (engine.slots[f"{DOWN}.weight"].live.float() == 448).all()
        rounded = torch.tensor(value).bfloat16().float()
        assert torch.allclose(engine.weight(DOWN), rounded, rtol=1e-6, atol=0)
    assert counts[1]["float8_e4m3fn"][0] == 0
    assert counts[1]["float32"][0] == 3 * 4  # the scales of this weight and of no other
    assert torch.allclose(engine.weight(DOWN), torch.tensor(0.015), rtol=2**-8)


def test_addresses_stay_and_the_report_says_so(models, serving):  # [W5]
    engine, receiver = serving
    addresses = receiver.verify_values().addresses
    for version in (2, 3):
        send(publish(models[version % 2], version, "jet"), receiver)
        report = receiver.verify_values().require()
        assert report.addresses == addresses == {n: s.live.data_ptr() for n, s in engine.slots.items()}
        assert report.version == version
        assert report.manifest == receiver.manifest.digest


def test_fp32_masters_are_cast_to_bf16_once_and_then_quantised(models):
    """[own-run numbers] codes of FP32 masters and of their BF16 copy differ; the trainer's forward uses the copy."""
    torch.manual_seed(0)
    masters = small_model(5).float()
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-4)
    engine, receiver = connected(masters)
    send(publish(masters, 1, "jet"), receiver)
    copy = small_model(5)
    copy.load_state_dict({n: p.bfloat16() for n, p in masters.state_dict().items()})
    assert engine.live_bytes() == expected_bytes(copy)
    straight, _ = torch.ops.jetgraph.quantize(
        masters.get_parameter(f"{DOWN}.weight").detach(), *scale_arguments(get_policy("jet").linear(DOWN).weight.scale)
    )
    assert raw(straight) != engine.live_bytes()[f"{DOWN}.weight"]


def test_changed_elements_are_counted(models, serving):  # [N9, A10]
    _, receiver = serving
    model = small_model(0)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[:7] += 1.0
    changed = send(publish(model, 2, "jet"), receiver).changed
    assert changed["bfloat16"][0] == 7
    assert changed["float8_e4m3fn"][0] == changed["float32"][0] == 0


# ------------------------------------------------------------------------------------------------ tied embeddings


def test_a_tied_head_is_one_tensor_by_either_name(models, second, serving):  # [W17, T9]
    sent, manifest = second
    assert "lm_head.weight" not in manifest.tensors
    renamed = {EMBEDDING: "lm_head.weight"}
    engine, receiver = serving
    specs = tuple(dataclasses.replace(s, name=renamed.get(s.name, s.name)) for s in manifest.specs)
    deliver(receiver, [(renamed.get(n, n), t) for n, t in sent], Manifest(2, "jet", specs))
    assert engine.live_bytes() == expected_bytes(models[1])
    assert EMBEDDING in receiver.manifest.tensors


def test_both_names_of_a_tied_tensor_must_have_one_value(models, second, serving):  # [W17]
    engine, receiver = serving
    before = engine.live_bytes()
    tensors, manifest = second
    embedding = dict(tensors)[EMBEDDING]
    spec = dataclasses.replace(manifest.tensors[EMBEDDING], name="lm_head.weight")
    both = Manifest(2, "jet", (*manifest.specs, spec))
    transaction = receiver.begin(2)
    transaction.put(EMBEDDING, embedding)
    with pytest.raises(SyncRefused, match="lm_head.weight and model.embed_tokens.weight are one tensor in the engine"):
        transaction.put("lm_head.weight", embedding + 1)
    assert engine.live_bytes() == before
    deliver(receiver, [*tensors, ("lm_head.weight", embedding)], both)
    assert engine.live_bytes() == expected_bytes(models[1])


# ------------------------------------------------------------------------------------------------ what is refused


def without(*names: str) -> Callable[[Sent], Sent]:
    return lambda sent: [(n, t) for n, t in sent if n not in names]


def replacing(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Sent], Sent]:
    return lambda sent: [(n, change(t) if n == name else t) for n, t in sent]


def flipped(tensor: Tensor) -> Tensor:
    """One bit of one element."""
    damaged = tensor.clone()
    damaged.view(torch.uint8).view(-1)[5] ^= 1
    return damaged


CODES, SCALE, NORM = f"{UP}.weight", f"{UP}.weight_scale_inv", "model.norm.weight"
REFUSED: dict[str, tuple[Callable[[Sent], Sent], str]] = {
    "scale-less [W3, N6]": (without(SCALE), f"{CODES} of version 2 came without {SCALE}"),
    "code-less": (without(CODES), f"{SCALE} of version 2 came without FP8 codes {CODES}, which is missing"),
    "partial": (without(CODES, SCALE), f"{CODES}, {SCALE} did not come: an update is complete or none"),
    "without a bias": (without(f"{LAYER}.self_attn.k_proj.bias"), "k_proj.bias did not come"),
    "nothing": (lambda sent: [], "model.embed_tokens.weight, .* did not come"),
    "wrong shape": (replacing(NORM, lambda t: t[:-1]), r"model.norm.weight has shape \[319\], the engine's \[320\]"),
    "transposed scales [W4]": (
        replacing(f"{DOWN}.weight_scale_inv", lambda t: t.t().contiguous()),
        r"has shape \[4, 3\], the engine's \[3, 4\].*row-major grid",
    ),
    "per-tensor scale [W4]": (replacing(SCALE, lambda t: t.amax().view(1, 1)), r"has shape \[1, 1\]"),
    "BF16 for FP8 [W11]": (replacing(CODES, lambda t: t.bfloat16()), "is bfloat16, the engine holds float8_e4m3fn"),
    "FP8 for BF16 [W11]": (
        replacing(NORM, lambda t: t.to(torch.float8_e4m3fn)),
        "model.norm.weight is float8_e4m3fn, the engine holds bfloat16",
    ),
    "BF16 scales [Q14]": (replacing(SCALE, lambda t: t.bfloat16()), f"{SCALE} is bfloat16, the engine holds float32"),
    "E5M2 codes": (replacing(CODES, lambda t: t.view(torch.float8_e5m2)), "is float8_e5m2, the engine holds"),
    "damaged codes": (replacing(CODES, flipped), f"{CODES} has digest .*damaged on the way"),
    "damaged scale": (replacing(SCALE, flipped), f"{SCALE} has digest .*damaged on the way"),
    "damaged norm": (replacing(NORM, flipped), f"{NORM} has digest .*damaged on the way"),
    "twice": (lambda sent: [*sent, sent[0]], "model.embed_tokens.weight came twice"),
    "prefixed names [N1, W11]": (
        lambda sent: [(f"model.language_{n}", t) for n, t in sent],
        "model.language_model.embed_tokens.weight has no place in the engine",
    ),
    "one too many": (lambda sent: [*sent, ("model.layers.9.x", sent[0][1])], "model.layers.9.x has no place"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_update_leaves_the_old_weights_serving(case, models, second, serving):
    change, message = REFUSED[case]
    engine, receiver = serving
    before, served, stops = engine.live_bytes(), engine.served, engine.num_stops
    sent, manifest = second
    with pytest.raises(SyncRefused, match=message) as refused:
        deliver(receiver, change(sent), manifest)
    assert str(refused.value).endswith("The engine serves version 1")
    assert engine.live_bytes() == before
    assert engine.served is served
    assert engine.num_stops == stops, "nobody has to stop for an update that is refused"
    assert receiver.version == 1
    receiver.verify_values().require()
    deliver(receiver, sent, manifest)
    assert engine.live_bytes() == expected_bytes(models[1])


def test_codes_of_another_scale_rule_are_refused(models, serving):  # [N2, Q9]
    """`jet_ue8m0` has the same dtypes and shapes; only the rule, which changes the values, tells them apart."""
    engine, receiver = serving
    before = engine.live_bytes()
    with pytest.raises(SyncRefused, match=r"q_proj.weight was made as f8e4m3\[128x128 .* pow2\], the engine reads it"):
        send(publish(models[1], 2, "jet_ue8m0"), receiver)
    assert engine.live_bytes() == before


def test_a_manifest_that_says_otherwise_is_refused(second, serving):
    engine, receiver = serving
    before = engine.live_bytes()
    sent, manifest = second
    less = Manifest(2, "jet", tuple(s for s in manifest.specs if s.name != NORM))
    more = Manifest(2, "jet", (*manifest.specs, dataclasses.replace(manifest.tensors[NORM], name="other")))
    later = dataclasses.replace(manifest, version=3)
    norm, embedding = manifest.tensors[NORM], manifest.tensors[EMBEDDING]
    others = tuple(s for s in manifest.specs if s.name != EMBEDDING)
    tied = dataclasses.replace(embedding, name="lm_head.weight")
    untied = dataclasses.replace(embedding, digest="0" * 64)
    shaped = tuple(s for s in manifest.specs if s.name != NORM)
    for wrong, message in (
        (Manifest(2, "jet", (*others, untied, tied)), "model.embed_tokens.weight has digest .*damaged"),
        (Manifest(2, "jet", (*others, embedding, dataclasses.replace(tied, digest="0"))), "lm_head.weight has digest"),
        (
            Manifest(2, "jet", (*shaped, dataclasses.replace(norm, shape=(1, 320)))),
            r"model.norm.weight is bfloat16 \[1, 320\] in the manifest, but came as bfloat16 \[320\]",
        ),
        (
            Manifest(2, "jet", (*shaped, dataclasses.replace(norm, dtype="float32"))),
            r"model.norm.weight is float32 \[320\] in the manifest, but came as bfloat16",
        ),
        (less, "model.norm.weight came but the manifest does not have them"),
        (more, "other is in the manifest but did not come"),
        (later, "the manifest is of version 3, the update of 2"),
    ):
        with pytest.raises(SyncRefused, match=message):
            deliver(receiver, sent, wrong)
        assert engine.live_bytes() == before


def test_a_manifest_pairs_codes_with_scales():  # [W3]
    codes = TensorSpec("a.weight", "float8_e4m3fn", (1, 1), "", "f8e4m3")
    scale = TensorSpec("a.weight_scale_inv", "float32", (1, 1), "", "f32")
    Manifest(1, "jet", (codes, scale))
    with pytest.raises(SyncRefused, match="a.weight of version 1 came without a.weight_scale_inv"):
        Manifest(1, "jet", (codes,))
    with pytest.raises(SyncRefused, match="a.weight_scale_inv of version 1 came without FP8 codes a.weight"):
        Manifest(1, "jet", (dataclasses.replace(codes, dtype="bfloat16"), scale))
    with pytest.raises(SyncRefused, match="a.weight is twice"):
        Manifest(1, "jet", (codes, codes, scale))


def test_a_manifest_is_plain_data(second):
    _, manifest = second
    again = Manifest.from_plain(json.loads(json.dumps(manifest.to_plain())))
    assert again == manifest
    assert again.digest == manifest.digest
    assert dataclasses.replace(again, version=8).digest == manifest.digest


# ----------------------------------------------------------------------------------------- repeated and interrupted


def test_versions_only_grow(models, serving):
    engine, receiver = serving
    before = engine.live_bytes()
    for version in (0, 1):
        with pytest.raises(SyncRefused, match=f"version {version} comes after version 1 is served"):
            send(publish(models[1], version, "jet"), receiver)
    assert engine.live_bytes() == before
    send(publish(models[1], 5, "jet"), receiver)
    assert receiver.version == 5


def test_an_open_transaction_is_replaced_only_by_a_newer_one(models, second, serving):
    """A trainer that died while sending must not block the next one; two trainers must not mix."""
    engine, receiver = serving
    before = engine.live_bytes()
    tensors, manifest = second
    dead = receiver.begin(2)
    dead.put(*tensors[0])
    with pytest.raises(SyncRefused, match="version 2 begins while version 2 is being sent"):
        receiver.begin(2)
    send(publish(models[1], 3, "jet"), receiver)
    assert not dead.staged, "memory of the dead"
    with pytest.raises(SyncRefused, match="the update to version 2 is over"):
        dead.put(*tensors[1])
    with pytest.raises(SyncRefused, match="the update to version 2 is over"):
        dead.commit(manifest)
    assert engine.live_bytes() == expected_bytes(models[1]) != before
    assert receiver.version == 3


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_trainer_that_dies_anywhere_in_the_stream_changes_nothing(error, models, serving):
    engine, receiver = serving
    before = engine.live_bytes()

    class Dying(Update):
        stop_at = 0

        def __iter__(self):
            for i, item in enumerate(super().__iter__()):
                if i == self.stop_at:
                    raise error("the trainer died")
                yield item

    for stop_at in range(0, len(engine.slots), 4):
        update = Dying(models[1], 2, "jet")
        update.stop_at = stop_at
        with pytest.raises(error, match="the trainer died"):
            send(update, receiver)
        assert engine.live_bytes() == before
        assert receiver._open is None
    with pytest.raises(RuntimeError, match="exists once every tensor was sent"):
        _ = update.manifest
    assert receiver.verify_values().require().version == 1


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError, SyncRefused), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_flip_that_fails_at_any_tensor_is_taken_back(error, raised, models, second, serving, monkeypatch):
    """The hard case: some tensors are new already.  Half of the failing tensor is even written."""
    from jetgraph.sync import receiver as module

    engine, receiver = serving
    before, served = engine.live_bytes(), {n: t.clone() for n, t in engine.served.items()}
    write = module.write
    for victim in list(engine.slots)[:: 3 if error is RuntimeError else 8]:

        def failing(live, new, name, victim=victim):
            if name == victim:
                live.view(-1)[: live.numel() // 2] = new.view(-1)[: live.numel() // 2]
                raise error("the device fell off")
            write(live, new, name)

        monkeypatch.setattr(module, "write", failing)
        with pytest.raises(raised, match="the device fell off"):
            deliver(receiver, *second)
        assert engine.live_bytes() == before, victim
        assert all(torch.equal(engine.served[n].nan_to_num(), served[n].nan_to_num()) for n in served), victim
        assert receiver.version == 1
    monkeypatch.setattr(module, "write", write)
    deliver(receiver, *second)
    assert engine.live_bytes() == expected_bytes(models[1])


@pytest.mark.parametrize("maker", ["empty", "empty_like"])
def test_a_device_without_room_refuses_and_says_what_to_do(maker, models, serving, monkeypatch):
    """For the update itself, and for the bytes that it replaces."""
    engine, receiver = serving
    before = engine.live_bytes()

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, maker, full)
    with pytest.raises(SyncRefused, match='no room for .*: attach with staging="cpu". The engine serves version 1'):
        send(publish(models[1], 2, "jet"), receiver)
    monkeypatch.undo()
    assert engine.live_bytes() == before
    assert receiver._open is None


def test_a_write_that_stores_something_else_is_noticed_and_taken_back(models, serving, monkeypatch):
    engine, receiver = serving
    before = engine.live_bytes()
    from jetgraph.sync import receiver as module

    write = module.write

    def one_byte_off(live, new, name):
        write(live, new, name)
        if name == NORM:
            live.view(-1).view(torch.uint8)[5] += 1

    monkeypatch.setattr(module, "write", one_byte_off)
    with pytest.raises(SyncRefused, match=f"{NORM} did not take the bytes it was given .1 of .*All was taken back"):
        send(publish(models[1], 2, "jet"), receiver)
    assert engine.live_bytes() == before
    receiver.require_serving()


class Stuck(Tensor):
    """Memory of which one number changes no more: what is written there is lost."""

    def copy_(self, *args, **kwargs):
        super().copy_(*args, **kwargs)
        self.view(-1)[3] = 7.0
        return self


def test_memory_that_takes_nothing_back_stops_serving(models, serving):
    """The fault that spoils the new bytes spoils the old ones too; "all was taken back" would be a lie."""
    engine, receiver = serving
    slot = engine.slots[NORM]
    engine.slots[NORM] = dataclasses.replace(slot, live=slot.live.as_subclass(Stuck))
    with pytest.raises(WeightsLost, match="model.norm.weight did not take the bytes .*so did undoing it"):
        send(publish(models[1], 2, "jet"), receiver)
    with pytest.raises(WeightsLost, match="send a complete update before generating"):
        receiver.require_serving()


def test_what_fails_while_changes_are_counted_fails_before_the_flip(models, serving, monkeypatch):
    engine, receiver = serving
    before = engine.live_bytes()
    from jetgraph.sync import receiver as module

    def no_memory(a, b):
        raise torch.OutOfMemoryError("no memory to compare")

    monkeypatch.setattr(module, "num_changed", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        send(publish(models[1], 2, "jet"), receiver)
    assert (engine.live_bytes(), receiver.version, engine.num_stops) == (before, 1, 1)


def test_a_refresh_that_fails_is_taken_back_or_stops_serving(models, serving):
    engine, receiver = serving
    before, refresh = engine.live_bytes(), engine.refresh
    calls = []

    def fails_once():
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        refresh()

    engine.refresh = fails_once
    with pytest.raises(SyncRefused, match="no memory. All was taken back. The engine serves version 1"):
        send(publish(models[1], 2, "jet"), receiver)
    assert engine.live_bytes() == before

    def fails():
        raise RuntimeError("no memory at all")

    engine.refresh = fails
    with pytest.raises(WeightsLost, match="so did undoing it"):
        send(publish(models[1], 2, "jet"), receiver)
    with pytest.raises(WeightsLost, match="send a complete update before generating"):
        receiver.require_serving()


def test_an_engine_that_cannot_stop_keeps_its_weights(models, serving):
    engine, receiver = serving
    before = engine.live_bytes()
    engine.stop_error = SyncRefused("2 batches are in flight")
    with pytest.raises(SyncRefused, match="2 batches are in flight"):
        send(publish(models[1], 2, "jet"), receiver)
    assert engine.live_bytes() == before
    engine.stop_error = None
    send(publish(models[1], 2, "jet"), receiver)
    assert receiver.version == 2


def test_staged_tensors_are_copies(models, second, serving):
    """The trainer steps on while the engine waits: what was sent is what was verified."""
    engine, receiver = serving
    transaction = receiver.begin(2)
    for name, tensor in second[0]:
        sent = tensor.clone()
        transaction.put(name, sent)
        sent.view(torch.uint8).zero_()
    transaction.commit(second[1])
    assert engine.live_bytes() == expected_bytes(models[1])


def test_tensors_made_under_inference_mode_take_updates(models, second, monkeypatch):
    """As an engine's may be: outside of that mode torch refuses to write them."""
    from jetgraph.sync import receiver as module

    with torch.inference_mode():
        engine, receiver = connected(models[0])
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        engine.slots[NORM].live.zero_()
    deliver(receiver, *second)
    assert engine.live_bytes() == expected_bytes(models[1])
    write = module.write

    def failing(live, new, name):
        write(live, new, name)
        if name == NORM:
            raise RuntimeError("too late")

    monkeypatch.setattr(module, "write", failing)
    with pytest.raises(SyncRefused, match="All was taken back"):
        send(publish(models[0], 3, "jet"), receiver)
    assert engine.live_bytes() == expected_bytes(models[1])


def test_values_that_something_else_wrote_are_found(serving):
    engine, receiver = serving
    engine.slots[SCALE].live[0, 0] *= 2
    report = receiver.verify_values()
    assert report.differing == (SCALE,)
    assert report.moved == ()
    with pytest.raises(WeightsLost, match=f"{SCALE}: not the bytes of version 1"):
        report.require()
    receiver.require_serving()  # a report changes nothing
    with pytest.raises(WeightsLost, match=f"{SCALE}: not the bytes of version 1"):
        receiver.require_values()
    with pytest.raises(WeightsLost, match="send a complete update before generating"):
        receiver.require_serving()


def test_a_tensor_that_moved_is_found(serving):  # [W5]
    engine, receiver = serving
    engine.slots[NORM] = dataclasses.replace(engine.slots[NORM], live=engine.slots[NORM].live.clone())
    report = receiver.verify_values()
    assert report.differing == ()
    assert report.moved == (NORM,)
    with pytest.raises(WeightsLost, match="model.norm.weight: moved in memory"):
        report.require()


# ------------------------------------------------------------------------------------------ zeros, NaN and infinity


def test_zero_blocks_arrive_without_nan():  # [N5a, Q1]
    """One 1 in a weight of zeros: code 448 with scale 1/448, every other block codes 0 and a finite scale."""
    model = small_model()
    with torch.no_grad():
        model.get_parameter(f"{UP}.weight").zero_()[0, 0] = 1
    engine, receiver = connected(model)
    send(publish(model, 1, "jet"), receiver)
    codes, scale = engine.slots[CODES].live.float(), engine.slots[SCALE].live
    assert not codes.isnan().any()
    assert codes[0, 0] == 448
    assert codes.count_nonzero() == 1
    assert scale[0, 0] == torch.tensor(1.0) / torch.tensor(448.0)
    assert (scale.view(-1)[1:] == torch.tensor(1e-12) / torch.tensor(448.0)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [f"{UP}.weight", "model.norm.weight", f"{LAYER}.self_attn.q_proj.bias"])
def test_a_master_that_is_not_finite_never_reaches_the_engine(value, name, serving):  # [N5b, N5c, Q6]
    engine, receiver = serving
    before = engine.live_bytes()
    model = small_model(1)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = value
    with pytest.raises(ValueError, match=f"{name} holds 1 values that are not finite, the first at .*5"):
        send(publish(model, 2, "jet"), receiver)
    assert engine.live_bytes() == before


def test_powers_of_two_arrive_as_powers_of_two():  # [N5d, N2]
    """Amax 3.5 is 448 · 2⁻⁷ exactly; the next BF16 number above it needs 2⁻⁶."""
    model = small_model()
    weight = model.get_parameter(f"{UP}.weight")
    with torch.no_grad():
        weight.zero_()
        weight[0, 0], weight[0, 200] = 3.5, 3.515625
    engine, receiver = connected(model, "jet_ue8m0")
    send(publish(model, 1, "jet_ue8m0"), receiver)
    scale = engine.slots[SCALE].live
    assert (scale[0, 0], scale[0, 1]) == (2.0**-7, 2.0**-6)
    assert (torch.frexp(scale)[0] == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_masters_of_another_dtype_are_refused(dtype, serving):
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is torch.float\d+: expected torch.bfloat16 or"):
        send(publish(small_model(1).to(dtype), 2, "jet"), serving[1])


def test_a_model_without_a_policy_must_say_which(models):
    with pytest.raises(ValueError, match="which policy"):
        publish(models[0], 1)


# ------------------------------------------------------------------------------------------------ between processes


def test_an_update_travels_as_a_folder(models, serving, tmp_path):
    engine, receiver = serving
    manifest = write_update(publish(models[1], 2, "jet"), tmp_path)
    send(StoredUpdate(tmp_path), receiver)
    assert engine.live_bytes() == expected_bytes(models[1])
    assert receiver.manifest.digest == manifest.digest
    write_update(publish(models[0], 3, "jet"), tmp_path)  # over the old one
    send(StoredUpdate(tmp_path), receiver)
    assert engine.live_bytes() == expected_bytes(models[0])
    assert receiver.version == 3


def test_a_folder_whose_writer_died_holds_no_update(models, serving, tmp_path):
    engine, receiver = serving
    before = engine.live_bytes()
    write_update(publish(models[1], 2, "jet"), tmp_path)
    broken = small_model(1)
    with torch.no_grad():
        broken.get_parameter("model.norm.weight")[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        write_update(publish(broken, 3, "jet"), tmp_path)
    with pytest.raises(SyncRefused, match="holds no complete update"):
        StoredUpdate(tmp_path)
    assert engine.live_bytes() == before
    assert receiver.version == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1000], "cannot be read"),
        (lambda data: data[:-1000] + bytes(b ^ 1 for b in data[-1000:]), "damaged on the way"),
        (lambda data: b"", "cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused(damage, message, models, serving, tmp_path):
    engine, receiver = serving
    before = engine.live_bytes()
    write_update(publish(models[1], 2, "jet"), tmp_path)
    tensors = tmp_path / "update.safetensors"
    tensors.write_bytes(damage(tensors.read_bytes()))
    with pytest.raises(SyncRefused, match=message):
        send(StoredUpdate(tmp_path), receiver)
    assert engine.live_bytes() == before
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SyncRefused, match="is not a manifest"):
        send(StoredUpdate(tmp_path), receiver)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(version=2.0),
        lambda d: d.update(version="2"),
        lambda d: d.update(policy=["jet"]),
        lambda d: d["tensors"][0].update(name=5),
        lambda d: d["tensors"][0].update(digest=5),
        lambda d: d["tensors"][0].update(dtype=None),
        lambda d: d["tensors"][0].update(shape="ab"),
        lambda d: d["tensors"].append(dict(d["tensors"][0])),
        lambda d: d.pop("tensors"),
    ],
)
def test_a_manifest_of_another_form_is_refused(change, second, serving, tmp_path):
    data = json.loads(json.dumps(second[1].to_plain()))
    change(data)
    for text in (json.dumps(data), "{", "[]", "null"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(SyncRefused, match="is not a manifest .* write the update again"):
            send(StoredUpdate(tmp_path), serving[1])


# ----------------------------------------------------------------------------------------------------------- sleep


def guarded(engine: FakeEngine, receiver: Receiver, *, restores: bool = True) -> SleepGuard:
    """Level 1 moves weights to the host and back; level 2 discards them and, as W7 has it, the rest with them."""
    host: dict[str, Tensor] = {}

    def suspend(level: int) -> None:
        if level == 1:
            host.update({name: slot.live.clone() for name, slot in engine.slots.items()})
        for slot in engine.slots.values():
            slot.live.view(torch.uint8).fill_(0xFF)
        for tensor in engine.rest.values():
            tensor.fill_(torch.nan)

    def resume(tags: list[str] | None) -> None:
        if restores and (tags is None or "weights" in tags):
            for name, saved in host.items():
                engine.slots[name].live.copy_(saved)

    return SleepGuard(receiver, engine.rest, suspend, resume)


def rest_is_there(engine: FakeEngine) -> bool:
    return torch.equal(engine.rest["rotary"], torch.arange(64.0)) and engine.rest["k_scale"] == 1.5


def test_level_1_brings_back_what_was_served(models, serving):
    engine, receiver = serving
    before = engine.live_bytes()
    guard = guarded(engine, receiver)
    guard.sleep(1)
    with pytest.raises(WeightsLost, match="sleeps at level 1: wake it before generating"):
        receiver.require_serving()
    with pytest.raises(SyncRefused, match="sleeps at level 1: wake it"):
        send(publish(models[1], 2, "jet"), receiver)
    with pytest.raises(ValueError, match="sleeps at level 1 already"):
        guard.sleep(2)
    guard.wake_up()
    receiver.require_serving()
    assert engine.live_bytes() == before
    assert rest_is_there(engine)
    send(publish(models[1], 2, "jet"), receiver)


def test_level_1_that_brings_back_garbage_is_found(serving):  # [W7]
    engine, receiver = serving
    guard = guarded(engine, receiver, restores=False)
    guard.sleep(1)
    with pytest.raises(WeightsLost, match="not the bytes of version 1"):
        guard.wake_up()
    with pytest.raises(WeightsLost):
        receiver.require_serving()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_fails_half_way_serves_nothing(level, models, serving):
    engine, receiver = serving
    guard = guarded(engine, receiver)
    suspend = guard._suspend

    def fails(level: int) -> None:
        suspend(level)
        raise RuntimeError("the allocator failed")

    guard._suspend = fails
    with pytest.raises(RuntimeError, match="the allocator failed"):
        guard.sleep(level)
    with pytest.raises(WeightsLost, match=f"sleeps at level {level}"):
        receiver.require_serving()
    guard.wake_up()
    assert rest_is_there(engine)
    if level == 2:
        with pytest.raises(WeightsLost, match="send a complete update"):
            receiver.require_serving()
        send(publish(models[1], 2, "jet"), receiver)
    receiver.require_serving()


def test_level_2_serves_nothing_before_a_complete_update(models, serving):  # [W7]
    """Sleep(2), wake, sync: the bytes of a fresh engine, the rotary table included; generating before it raises."""
    engine, receiver = serving
    guard = guarded(engine, receiver)
    addresses = receiver.addresses
    guard.sleep(2)
    guard.wake_up()
    assert rest_is_there(engine)
    with pytest.raises(WeightsLost, match="send a complete update before generating"):
        receiver.require_serving()
    sent, manifest = whole(models[0], 2)
    with pytest.raises(SyncRefused, match="did not come"):
        deliver(receiver, sent[:-1], manifest)
    with pytest.raises(WeightsLost):
        receiver.require_serving()
    deliver(receiver, sent, manifest)
    receiver.require_serving()
    assert engine.live_bytes() == expected_bytes(models[0])
    assert receiver.verify_values().require().addresses == addresses


def test_lost_weights_may_come_again_under_their_own_version(models, second, serving):  # [W7]
    """A trainer that did not step sends what was served; other bytes under that version are refused."""
    engine, receiver = serving
    deliver(receiver, *second)
    guard = guarded(engine, receiver)
    guard.sleep(2)
    guard.wake_up()
    other, manifest = whole(models[0], 2)
    with pytest.raises(SyncRefused, match="version 2 was served with other weights: send these as 3"):
        deliver(receiver, other, manifest)
    with pytest.raises(SyncRefused, match="version 1 comes after version 2"):
        receiver.begin(1)
    deliver(receiver, *second)
    receiver.require_serving()
    assert engine.live_bytes() == expected_bytes(models[1])


def test_an_engine_that_wakes_in_parts_serves_when_its_weights_are_there(serving):
    engine, receiver = serving
    before, guard = engine.live_bytes(), guarded(engine, receiver)
    guard.sleep(1)
    guard.wake_up(["kv_cache"])
    with pytest.raises(WeightsLost, match="sleeps at level 1"):
        receiver.require_serving()
    guard.wake_up(["weights"])
    receiver.require_serving()
    assert engine.live_bytes() == before


def test_there_are_two_levels(serving):
    guard = guarded(*serving)
    with pytest.raises(ValueError, match="sleep level 3"):
        guard.sleep(3)
    guard.wake_up()  # of an engine that is awake: nothing
