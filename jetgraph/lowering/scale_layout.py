"""How scales of groups lie in memory: as the libraries' GEMM kernels read them, so that none has to copy.

DeepGEMM and cuBLASLt load a column of scales, one group of many rows, at a time: rows are neighbours, and DeepGEMM's
columns start at multiples of 16 bytes.  Quantisers of whole tiles write them so without a detour.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 4
"""FP32 scales in 16 bytes."""


def row_scales(x: Tensor, num_rows: int, num_groups: int) -> Tensor:
    """Empty scales [num_rows, num_groups] of groups along the features, strides (1, num_rows rounded up to 4)."""
    aligned = (num_rows + ALIGNED - 1) // ALIGNED * ALIGNED
    return x.new_empty_strided((num_rows, num_groups), (1, aligned), dtype=torch.float32)


def token_scales(x: Tensor, num_features: int, num_groups: int) -> Tensor:
    """Empty scales [num_features, num_groups] of groups along the tokens, strides (1, num_features)."""
    return x.new_empty_strided((num_features, num_groups), (1, num_features), dtype=torch.float32)


def lies_in_columns(scale: Tensor) -> bool:
    """Whether ``scale`` lies as `row_scales` does."""
    return scale.stride() == (1, -(-scale.shape[0] // ALIGNED) * ALIGNED)
