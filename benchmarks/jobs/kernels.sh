#!/usr/bin/env bash
# Benchmarks that need no engine:   [STEPS=abc] benchmarks/jobs/kernels.sh [SECONDS]
#
#   a  block, and memory       b  quant       c  scaling       d  compile, 36 layers through Inductor
#   e  GEMM choice         f  other tiles of exact kernels and of WGRAD
#
# Each writes $OUT/NAME.json.
. "$(dirname "$0")/common.sh"
begin "${1:-590}"
step doctor 90 python3 -m jetgraph.cli doctor
wanted a && step block 300 python3 -m benchmarks.block --arm bf16 --arm torchao --arm jet --json "$OUT/block.json" \
  --memory "$OUT/memory.json"
wanted b && step quant 60 python3 -m benchmarks.quant --json "$OUT/quant.json"
wanted c && step scaling 100 python3 -m benchmarks.scaling --repeats 3 --json "$OUT/scaling.json"
wanted d && step compile 180 python3 -m benchmarks.compile --only-inductor --json "$OUT/compile.json"
wanted e && step gemm 280 python3 -m benchmarks.gemm --repeats 5 --json "$OUT/gemm.json"
wanted f && step exact 90 python3 -m benchmarks.exact --sweep gemm attention --json "$OUT/exact_sweep.json"
wanted f && step wgrad 60 python3 -m benchmarks.gemm --sweep --json "$OUT/wgrad_sweep.json"
