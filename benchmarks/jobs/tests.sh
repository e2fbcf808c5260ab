#!/usr/bin/env bash
# tests/gpu on every GPU of the machine:   benchmarks/jobs/tests.sh [SECONDS [PYTEST_ARGUMENT…]]
#
# First the self-tests of the kernels (`jetgraph doctor`), whose findings every process then recalls.
. "$(dirname "$0")/common.sh"
begin "${1:-300}"
step doctor 90 python3 -m jetgraph.cli doctor
workers=$(($(nproc) * 7 / 8)) # a core in eight is left to Triton's own processes
# A worker that took a thread of torch's and of Inductor's for every core would make a dozen workers slower than one.
# nproc believes this variable, so it was asked before.
export OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=2
TAIL=60 step tests 400 python3 -m pytest -o addopts= -q -ra --tb=short --show-capture=no --durations=15 -p no:warnings -p no:cacheprovider \
  -n "$workers" --dist loadgroup "${@:2}" tests/gpu
