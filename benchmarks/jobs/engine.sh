#!/usr/bin/env bash
# The vLLM side on one GPU:   benchmarks/jobs/engine.sh STEPS [SECONDS]
#
# STEPS are letters, and commas between groups: the steps of a group run at once, groups one after another.  What is timed
# wants the machine for itself.  In brackets the seconds that a step is reckoned to take on an H200, alone and cold.
#
#   a  plugin: eager, pieces, full CUDA graphs, a spawned worker, `vllm serve`, bit for bit      (130)
#   b  pair: trainer and our engine captured and verified       p  the same, stock engine followed    (150 each)
#   c  audits of live engines, ours and stock (100)             d  weight sync into a live engine, sleep (150)
#   m  mismatch: 3 or 4 pairs on one or two models (330)        f  the shortest of a and c, for another vLLM (90)
#   r  speed of BF16, stock FP8, ours (300; timed)              i  speed of ours and batch-invariant (200; timed)
#   s  what a sync costs (180; timed)
#   v  diverge: a live engine, ours and stock in BF16, beside training; its engines take the whole GPU (500)
#
# Calls, most valuable first; each fits a machine of ten minutes, and r's and s's models stay in $WORK for the next call:
#   engine.sh abpcd 360      engine.sh r,i 570      engine.sh m,s 570      engine.sh f 180 (with the other vLLM)
#   engine.sh v 590
#
# vLLM is installed, or on PYTHONPATH; step d needs pytest (the kit `base`).  SmolLM2's weights are those of $SMOLLM2, or of
# $KIT; without them only random models run.  TINY=1 rehearses everything on any machine, and its figures mean nothing.
# Results: engine.tar.gz in $OUT, written anew after every group, and log.txt.
STEPS=${1:?which steps? See the head of this file}
. "$(dirname "$0")/common.sh"
begin "${2:-570}"
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip VLLM_NO_USAGE_STATS=1
export TORCHINDUCTOR_COMPILE_THREADS=4 # of each of a dozen processes
WORK=${WORK:-out/work}
RESULTS=$(mktemp -d)
mkdir -p "$WORK"
small=${SMALL:-4} device=cuda tiny=() plugin=() followed=jet slower=1
# stock vLLM has no FP8 kernels on a CPU that training can follow
[ -n "${TINY:-}" ] && small=2 device=cpu tiny=(--tiny) plugin=(--longest 40 --tokens 8) followed=bf16 slower=4

keep() { tar -C "$RESULTS" -czf "$OUT/engine.tar.gz" .; }
logs=$(mktemp -d)
trap 'keep; finish; rm -rf "$RESULTS" "$logs"' EXIT

try() { # as `step`, with more time where it is only rehearsed
  local name=$1 limit=$2
  step "$name" $((limit * slower)) "${@:3}"
}

models() { # of few layers, which a to d and f share
  [ -f "$WORK/jet-$small/config.json" ] || try models 60 python3 -m benchmarks.jobs.model "$WORK" "$small" "${tiny[@]}"
}

run() {
  local bf16=$WORK/bf16-$small jet=$WORK/jet-$small out=$RESULTS
  case $1 in
    a) try plugin 240 python3 -m benchmarks.jobs.plugin "$jet" "${plugin[@]}" --json "$out/plugin.json" ;;
    b) try pair 270 python3 -m benchmarks.jobs.pair "$bf16" "$WORK/pair" "$out/pair" ;;
    p) try pair-stock 270 python3 -m benchmarks.jobs.pair "$bf16" "$WORK/pair-stock" "$out/pair-stock" \
      --engine vllm-stock --policy "$followed" ;;
    c) try audits 240 python3 -m benchmarks.jobs.audits "$bf16" "$WORK" --json "$out/audits.json" ;;
    d) try sync-live 270 python3 -m pytest -o addopts= -q -ra --tb=short -p no:cacheprovider -p no:warnings \
      --basetemp "$WORK/sync" tests/engine/test_sync.py ;;
    m) try mismatch 420 python3 -m benchmarks.mismatch "${tiny[@]}" "${smollm2[@]}" --work "$WORK/mismatch" \
      --json "$out/mismatch.json" --picture "$out/mismatch.svg" ;;
    r) try rollout 420 python3 -m benchmarks.rollout "${tiny[@]}" --work "$WORK/speed" --arms bf16 fp8 jet \
      --json "$out/rollout.json" ;;
    i) try rollout-invariant 330 python3 -m benchmarks.rollout "${tiny[@]}" --work "$WORK/speed" \
      --arms jet "jet, batch-invariant" --json "$out/rollout_invariant.json" ;;
    s) try sync 300 python3 -m benchmarks.sync "${tiny[@]}" --work "$WORK/speed" --staging device --turns "${TURNS:-3}" \
      --json "$out/sync.json" ;;
    v)
      try diverge 300 python3 -m jetgraph.cli diverge "$bf16" --device "$device" --tokens 24 --work "$WORK/diverge"
      try diverge-stock 300 python3 -m jetgraph.cli diverge "$bf16" --device "$device" --tokens 24 --policy bf16 --stock \
        --work "$WORK/diverge" # 1: it differs, and where is named
      ;;
    f)
      try plugin 150 python3 -m benchmarks.jobs.plugin "$jet" "${plugin[@]}" --arms eager full --json "$out/plugin.json"
      try audits 90 python3 -m benchmarks.jobs.audits "$bf16" "$WORK" --arms ours --json "$out/audits.json"
      ;;
    *) echo "$1: no such step" >>"$SUMMARY" ;;
  esac
}

if [ -n "${KIT:-}" ]; then # once a machine
  . benchmarks/jobs/prepare.sh
  [ -f "$WORK/prepared" ] || { prepare && touch "$WORK/prepared"; }
fi
smollm2=()
[ -f "${SMOLLM2:-}/config.json" ] && smollm2=(--smollm2 "$SMOLLM2")

for group in ${STEPS//,/ }; do
  [[ $group == *[abpcdfv]* ]] && models
  if ((${#group} == 1)); then
    run "$group"
  else # each with a log of its own, so that they do not mix
    for letter in $(fold -w 1 <<<"$group"); do
      (LOG=$logs/$letter; : >"$LOG"; run "$letter") &
    done
    wait
    cat "$logs"/* >>"$LOG"
    rm -f "$logs"/*
  fi
  keep
done
