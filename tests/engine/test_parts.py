"""Where the parts of a merged weight and their scales go, and every message of the loader."""

from __future__ import annotations

import pytest
import torch
from jetgraph_vllm.parts import PartLoader, check_loaded, check_loaded_in_pairs, lay_out

from jetgraph.lowering import reference

FP8 = torch.float8_e4m3fn
SIZES = [576, 192, 192]
NAMES = ("q_proj", "k_proj", "v_proj")


def loaders(sizes: list[int] = SIZES, num_in: int = 576) -> tuple[PartLoader, PartLoader]:
    parts = lay_out(NAMES[: len(sizes)], sizes, 128)
    weights = PartLoader(parts, "weight", num_in, FP8, scales=False)
    scales = PartLoader(parts, "weight_scale_inv", -(-num_in // 128), torch.float32, scales=True)
    return weights, scales


def test_every_part_has_its_own_grid_of_scales() -> None:
    parts = lay_out(NAMES, SIZES, 128)
    assert [part.scale_rows for part in parts] == [(0, 5), (5, 7), (7, 9)]
    assert [part.rows for part in parts] == [(0, 576), (576, 768), (768, 960)]


def test_scales_are_placed_at_the_summed_rounded_up_rows() -> None:
    _, scales = loaders()
    target = torch.zeros(9, 5)
    given = {"q": torch.full((5, 5), 1.0), "k": torch.full((2, 5), 2.0), "v": torch.full((2, 5), 3.0)}
    for shard in ("v", "q", "k"):  # the order in which a checkpoint lists them does not matter
        scales.place(target, given[shard], shard)
    assert target[:, 0].tolist() == [1, 1, 1, 1, 1, 2, 2, 3, 3]


def test_dequantising_the_merged_weight_part_by_part_gives_the_parts() -> None:
    weights, scales = loaders()
    codes, scale = torch.zeros(960, 576, dtype=FP8), torch.zeros(9, 5)
    originals = []
    for shard, part in zip(("q", "k", "v"), weights.parts, strict=True):
        w = torch.randn(part.num_rows, 576, dtype=torch.bfloat16)
        part_codes, part_scale = reference.quantize(w, 128, 128, 448.0, 1e-12, "div", False)
        weights.place(codes, part_codes, shard)
        scales.place(scale, part_scale, shard)
        originals.append(reference.dequantize(part_codes, part_scale, 128, 128))
    check_loaded_in_pairs(weights, scales)
    for part, original in zip(weights.parts, originals, strict=True):
        part_codes, part_scale = codes[slice(*part.rows)], scale[slice(*part.scale_rows)]
        assert torch.equal(reference.dequantize(part_codes, part_scale, 128, 128), original)


def test_gate_and_up_are_numbered() -> None:
    parts = lay_out(("gate_proj", "up_proj"), [448, 448], 128)
    loader = PartLoader(parts, "weight_scale_inv", 1, torch.float32, scales=True)
    target = torch.zeros(8, 1)
    loader.place(target, torch.ones(4, 1), 1)
    assert target[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_loading_a_weight_again_drops_its_pinned_image() -> None:
    weights, _ = loaders([128], 128)
    codes = torch.zeros(128, 128, dtype=FP8)
    reference.pin_weight(codes)
    weights.place(codes, torch.ones(128, 128).to(FP8))
    assert reference._pinned_image(codes, 128).eq(1).all()


def test_a_bf16_weight_is_refused() -> None:
    weights, _ = loaders()
    with pytest.raises(ValueError, match="q_proj.weight is bfloat16, expected float8_e4m3fn"):
        weights.place(torch.zeros(960, 576, dtype=FP8), torch.zeros(576, 576, dtype=torch.bfloat16), "q")


def test_a_scale_that_is_not_float32_is_refused() -> None:
    _, scales = loaders()
    with pytest.raises(ValueError, match="k_proj.weight_scale_inv is bfloat16, expected float32"):
        scales.place(torch.zeros(9, 5), torch.zeros(2, 5, dtype=torch.bfloat16), "k")


def test_a_parameter_that_would_round_the_scale_is_refused() -> None:
    _, scales = loaders()
    with pytest.raises(TypeError, match="would round float32"):
        scales.place(torch.zeros(9, 5, dtype=torch.bfloat16), torch.zeros(2, 5), "k")


@pytest.mark.parametrize("shape", [(1, 5), (3, 5), (2, 4)])
def test_scales_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    _, scales = loaders()
    with pytest.raises(ValueError, match=r"k_proj.weight_scale_inv has shape .* expected \(2, 5\)"):
        scales.place(torch.zeros(9, 5), torch.zeros(shape), "k")


def test_a_fused_weight_is_refused() -> None:
    weights, _ = loaders()
    with pytest.raises(ValueError, match="expected the separate weights q_proj, k_proj, v_proj"):
        weights.place(torch.zeros(960, 576, dtype=FP8), torch.zeros(960, 576).to(FP8))


def test_a_weight_without_its_scale_is_refused() -> None:
    weights, scales = loaders([128], 128)
    with pytest.raises(ValueError, match="q_proj.weight is not in the checkpoint"):
        check_loaded(weights)
    weights.place(torch.zeros(128, 128, dtype=FP8), torch.zeros(128, 128).to(FP8))
    with pytest.raises(ValueError, match="must come with its scale"):
        check_loaded_in_pairs(weights, scales)
    scales.place(torch.zeros(1, 1), torch.ones(1, 1))
    check_loaded_in_pairs(weights, scales)


def test_a_weight_renewed_without_its_scale_is_refused() -> None:
    weights, scales = loaders([128], 128)
    for _ in range(2):
        weights.place(torch.zeros(128, 128, dtype=FP8), torch.zeros(128, 128).to(FP8))
    scales.place(torch.zeros(1, 1), torch.ones(1, 1))
    with pytest.raises(ValueError, match="weight loaded 2 times, weight_scale_inv 1 times"):
        check_loaded_in_pairs(weights, scales)


def test_trainer_exporter_and_engine_hold_the_same_bytes() -> None:  # [N3, V16]
    """randn 4096x4096 BF16: 0 differing bytes between training's operand, the checkpoint and the engine's parameter."""
    from jetgraph.export import export_linear
    from jetgraph.lowering.torch_ops import scale_arguments
    from jetgraph.policy import get_policy

    weight = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    precision = get_policy("jet").linear("model.layers.0.mlp.up_proj")
    trained, trained_scale = torch.ops.jetgraph.quantize(weight, *scale_arguments(precision.weight.scale))
    exported = export_linear("up_proj.weight", weight, precision)
    parts = lay_out(("up_proj",), [4096], 128)
    held = torch.zeros(4096, 4096, dtype=FP8), torch.full((32, 32), torch.nan)
    PartLoader(parts, "weight", 4096, FP8, scales=False).place(held[0], exported["up_proj.weight"])
    PartLoader(parts, "weight_scale_inv", 32, torch.float32, scales=True).place(
        held[1], exported["up_proj.weight_scale_inv"]
    )
    assert (held[0].view(torch.uint8) != trained.view(torch.uint8)).sum() == 0
    assert torch.equal(held[1], trained_scale)
