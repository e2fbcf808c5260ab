"""Linears and the head as vLLM methods: each checkpoint part is one GEMM of the trainer's own operator.

T tokens, K input features, N output features of a part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from jetgraph.lowering import reference, torch_ops
from jetgraph.precision import BF16, Precision
from jetgraph_vllm.declaration import Declaration
from jetgraph_vllm.parts import Part, PartLoader, check_loaded, check_loaded_in_pairs, lay_out


class Fp8BlockLinearMethod(LinearMethodBase):
    """x [T, K] bf16 → one quantisation of x → per part one FP8 GEMM [T, N] → the parts side by side."""

    def __init__(self, declaration: Declaration, prefix: str, part_names: tuple[str, ...]) -> None:
        scale = declaration.activation.scale
        granularity = declaration.weight.scale.granularity  # type: ignore[union-attr]
        self.weight_precision: Precision = declaration.weight
        self.prefix = prefix
        self.part_names = part_names
        self.block_rows, self.group = int(granularity.rows or 0), int(granularity.cols or 0)
        self.activation_arguments = torch_ops.scale_arguments(scale)  # type: ignore[arg-type]
        self.parts: tuple[Part, ...] = ()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        refuse_tensor_parallel(self.prefix, input_size, input_size_per_partition, output_size, output_partition_sizes)
        num_in, num_groups = input_size, -(-input_size // self.group)
        self.parts = lay_out(self.part_names, output_partition_sizes, self.block_rows)
        num_rows, num_scale_rows = self.parts[-1].rows[1], self.parts[-1].scale_rows[1]
        self.weights = PartLoader(self.parts, "weight", num_in, torch.float8_e4m3fn, scales=False)
        self.scales = PartLoader(self.parts, "weight_scale_inv", num_groups, torch.float32, scales=True)
        codes = torch.zeros(num_rows, num_in, dtype=torch.float8_e4m3fn)
        scale = torch.full((num_scale_rows, num_groups), torch.nan, dtype=torch.float32)  # a hole stays loud
        self.weights.synced = starts_without_weights()
        add_parameter(layer, "weight", codes, self.weights)
        add_parameter(layer, "weight_scale_inv", scale, self.scales)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        check_loaded_in_pairs(self.weights, self.scales)
        for part in self.parts:
            pin(layer.weight.data[slice(*part.rows)], self.group)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x if x.ndim == 2 else x.flatten(0, -2)
        codes, scale = torch.ops.jetgraph.quantize(flat, *self.activation_arguments)
        outs = []
        for part in self.parts:
            start, stop = part.rows
            weight = layer.weight[start:stop]
            weight_scale = layer.weight_scale_inv[part.scale_rows[0] : part.scale_rows[1]]
            part_bias = None if bias is None else bias[start:stop]
            outs.append(
                torch.ops.jetgraph.fp8_gemm(codes, scale, weight, weight_scale, part_bias, self.block_rows, self.group)
            )
        out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
        return out if x.ndim == 2 else out.unflatten(0, x.shape[:-1])


class RowTileLinearMethod(LinearMethodBase):
    """x [T, K] bf16 @ weight [N, K].T per part, row-invariant; a bias is added in FP32, before the one rounding."""

    weight_precision = BF16

    def __init__(self, prefix: str, part_names: tuple[str, ...]) -> None:
        self.prefix = prefix
        self.part_names = part_names
        self.parts: tuple[Part, ...] = ()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        refuse_tensor_parallel(self.prefix, input_size, input_size_per_partition, output_size, output_partition_sizes)
        self.parts = lay_out(self.part_names, output_partition_sizes, 1)
        self.weights = PartLoader(self.parts, "weight", input_size, torch.bfloat16, scales=False)
        weight = torch.zeros(self.parts[-1].rows[1], input_size, dtype=torch.bfloat16)
        self.weights.synced = starts_without_weights()
        add_parameter(layer, "weight", weight, self.weights)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        check_loaded(self.weights)
        for part in self.parts:
            pin(layer.weight.data[slice(*part.rows)])

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        outs = []
        for part in self.parts:
            start, stop = part.rows
            part_bias = None if bias is None else bias[start:stop]
            outs.append(torch.ops.jetgraph.row_tile_gemm(x, layer.weight[start:stop], part_bias))
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


class RowTileEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding as vLLM has it; the (tied) head multiplies by the same bf16 weight, row-invariant."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weight as it is: vLLM's own method would pack a copy of it for oneDNN."""
        pin(layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.jetgraph.row_tile_gemm(x, layer.weight, bias)


def pin(weight: Tensor, group: int = reference.GROUP) -> None:
    """Keep the widened weight that the reference kernels multiply by; a GPU's kernels read the weight itself."""
    if weight.device.type == "cpu":
        reference.pin_weight(weight, group)


def starts_without_weights() -> bool:
    """``load_format="dummy"``: a trainer will send the weights, and nothing may be generated before it has."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


def add_parameter(layer: torch.nn.Module, name: str, data: Tensor, loader: PartLoader) -> None:
    parameter = torch.nn.Parameter(data, requires_grad=False)
    parameter.weight_loader = loader.place  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)


def refuse_tensor_parallel(prefix: str, num_in: int, num_in_here: int, num_out: int, num_out_here: list[int]) -> None:
    if num_in != num_in_here or num_out != sum(num_out_here):
        raise ValueError(
            f"{prefix}: split over tensor-parallel ranks, which changes the order of sums: use tensor_parallel_size=1"
        )


def keep_plain_linears() -> None:
    """Make vLLM's unquantised CPU linears plain `F.linear` on a weight that stays in place (JETGRAPH_PLAIN_LINEAR=1).

    Stock vLLM packs the weight for oneDNN behind an opaque handle and drops it, so neither can the graph be captured
    nor the weight be loaded again.
    """
    import importlib

    for name in ("utils", "linear", "vocab_parallel_embedding"):
        module = importlib.import_module(f"vllm.model_executor.layers.{name}")
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = _dispatch_plain_linear


def _dispatch_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear
