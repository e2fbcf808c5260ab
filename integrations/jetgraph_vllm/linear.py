"""Linears and the head as vLLM methods: each checkpoint part is one GEMM of the trainer's own operator.

T tokens, K input features, N output features of a part.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from jetgraph.lowering import reference, registry, torch_ops
from jetgraph.lowering.provider import Gemm, Quantizer
from jetgraph.precision import BF16, Precision
from jetgraph_vllm.declaration import Declaration
from jetgraph_vllm.defaults import plain_defaults
from jetgraph_vllm.parts import Part, PartLoader, check_loaded, check_loaded_in_pairs, lay_out, merged


class Fp8BlockLinearMethod(LinearMethodBase):
    """x [T, K] bf16 → one quantisation of x → per part one FP8 GEMM [T, N] → the parts side by side.

    On a GPU one GEMM does all parts if no block of scales straddles two of them and one provider runs each as it runs
    the whole: a column of the product is the sum of its own products, in an order that K decides.
    """

    def __init__(self, declaration: Declaration, prefix: str, part_names: tuple[str, ...]) -> None:
        scale = declaration.activation.scale
        granularity = declaration.weight.scale.granularity  # type: ignore[union-attr]
        self.weight_precision: Precision = declaration.weight
        self.prefix = prefix
        self.part_names = part_names
        self.block_rows, self.group = int(granularity.rows or 0), int(granularity.cols or 0)
        self.activation_arguments = torch_ops.scale_arguments(scale)  # type: ignore[arg-type]
        self.parts: tuple[Part, ...] = ()
        self.products: tuple[Part, ...] = ()
        """What one GEMM computes each: the parts, or all of them as one."""
        self.providers: dict[Part, str] = {}
        """Whose kernel computes each product, as the operator and the captured graph name it; empty on a CPU."""

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
        self.parts = self.products = lay_out(self.part_names, output_partition_sizes, self.block_rows)
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
        self.renew(layer)
        if layer.weight.is_cuda:
            self.providers = self._choose(layer)
            self.products = tuple(self.providers)

    def renew(self, layer: torch.nn.Module) -> None:
        """What is derived from the numbers of the weight, which have changed."""
        pin(layer.weight.data, self.parts, self.group)

    def _choose(self, layer: torch.nn.Module) -> dict[Part, str]:
        """What each GEMM computes, and its provider.

        Self-tests run now, that of the quantiser too: later might be in the middle of a CUDA graph.
        """
        whole = merged(self.parts, self.block_rows)
        depth, device, bias = layer.weight.shape[1], layer.weight.device, getattr(layer, "bias", None) is not None
        rows, cols, *rule = self.activation_arguments

        def provider(part: Part) -> str:
            return registry.choose(Gemm(part.num_rows, depth, self.block_rows, self.group, bias), device).name

        with plain_defaults():
            registry.choose(Quantizer(rows, cols, tuple(rule)), device)
            chosen = {part: provider(part) for part in self.parts}
            if whole is not None and set(chosen.values()) == {provider(whole)}:
                return {whole: provider(whole)}
        return chosen

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x if x.ndim == 2 else x.flatten(0, -2)
        codes, scale = torch.ops.jetgraph.quantize(flat, *self.activation_arguments)
        grid = self.block_rows, self.group
        outs = []
        for part, operands in zip(self.products, self._operands(layer, bias), strict=True):
            named = (self.providers[part],) if part in self.providers else ()
            outs.append(torch.ops.jetgraph.fp8_gemm(codes, scale, *operands, *grid, *named))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
        return out if x.ndim == 2 else out.unflatten(0, x.shape[:-1])

    def _operands(self, layer: torch.nn.Module, bias: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Codes, scales and bias of each product."""
        if len(self.products) == 1:
            return [(layer.weight, layer.weight_scale_inv, bias)]
        found = []
        for part in self.products:
            (start, stop), (scale_start, scale_stop) = part.rows, part.scale_rows
            part_bias = None if bias is None else bias[start:stop]
            found.append((layer.weight[start:stop], layer.weight_scale_inv[scale_start:scale_stop], part_bias))
        return found


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
        self.renew(layer)

    def renew(self, layer: torch.nn.Module) -> None:
        pin(layer.weight.data, self.parts)

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
        self.renew(layer)

    def renew(self, layer: torch.nn.Module) -> None:
        pin(layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.jetgraph.row_tile_gemm(x, layer.weight, bias)


def pin(weight: Tensor, parts: Iterable[Part] = (), group: int = reference.GROUP) -> None:
    """Keep the widened weight, part by part, that the reference kernels multiply by; a GPU's read the weight itself."""
    if weight.device.type == "cpu":
        for rows in [slice(*part.rows) for part in parts] or [slice(None)]:
            reference.pin_weight(weight[rows], group)


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
