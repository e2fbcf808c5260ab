"""Importing this registers every expansion of `jetgraph.lift`."""

import jetgraph.lift_aten
import jetgraph.lift_attention
import jetgraph.lift_fused
import jetgraph.lift_gemm
import jetgraph.lift_model
import jetgraph.lift_norm  # noqa: F401
