"""Importing this registers every expansion of `jetgraph.lift`."""

import jetgraph.lift.aten
import jetgraph.lift.attention
import jetgraph.lift.fused
import jetgraph.lift.gemm
import jetgraph.lift.model
import jetgraph.lift.norm  # noqa: F401
