"""From a recorded program to a precision graph: every operator is expanded into terms, none is recognised.  No torch.

`lifter` runs a record; `aten`, `attention`, `gemm`, `model`, `norm` and `fused` hold the expansions; importing `all`
registers them.  Both sides share them: the trainer's lift is in `jetgraph.trainer`, an engine's in its plugin.
"""
