#!/usr/bin/env bash
# VeRL itself under policy jet, behind the gate:   benchmarks/jobs/verl.sh [SECONDS [STEPS [RECIPE_ARGUMENT…]]]
#
# examples/rl/grpo.py: SmolLM2, GRPO, chain sums.  If the gate refuses, its counterexample is kept and the time that is left
# goes to the same run with enforcement=warn; if the run breaks before its first step, to one that asks for less: nothing
# captured, training's graphs run operator by operator.  $OUT has verl.json (benchmarks.verl_report) and, of each start,
# verl-NAME.tar.xz: both graphs, certificate or counterexample, manifest, syncs, metrics, output, Ray's logs.
#
# $RL_DATA is a folder of chain_sum.py's files, by default $KIT's; without either they are made here.
. "$(dirname "$0")/common.sh"
. benchmarks/jobs/prepare.sh
begin "${1:-560}"
NUM_STEPS=${2:-24}
COLLECT=25 # seconds of the end
RUNS=${RUNS:-$(mktemp -d)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
unset VLLM_ENABLE_V1_MULTIPROCESSING # what wants an engine in its own process sets it; VeRL's has processes of its own
export RAY_memory_monitor_refresh_ms=0 # a machine whose memory grows as it is used looks full to it
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}

# ended NAME: kill -9 whatever the start left, which is whatever has its mark in its environment
ended() {
  local folder
  for folder in /proc/[0-9]*; do
    grep -qz "^JETGRAPH_JOB_RUN=$RUNS/$1\$" "$folder/environ" 2>/dev/null && kill -9 "${folder#/proc/}" 2>/dev/null
  done
  rm -rf "/tmp/jgr-$$-$1"
}
trap 'for name in start warn off; do ended $name; done; finish' EXIT

# start NAME ENFORCEMENT ARGUMENT…: one start of the recipe until it ends or the time does; then what it left, packed
start() {
  local name=$1 enforcement=$2 folder=$RUNS/$1 ray=/tmp/jgr-$$-$1 # a short path: sockets lie below it
  shift 2
  mkdir -p "$folder" "$ray"
  RAY_TMPDIR=$ray JETGRAPH_JOB_RUN=$folder step "$name" $((LEFT_UNTIL - SECONDS - COLLECT)) \
    python3 examples/rl/grpo.py --folder "$folder" --model "$SMOLLM2" ${RL_DATA:+--data "$RL_DATA"} --steps "$NUM_STEPS" \
    --enforcement "$enforcement" "$@"
  cp -r "$ray"/ray/session_latest/logs "$folder/ray-logs" 2>/dev/null
  ended "$name"
  find "$folder/ray-logs" -size +1M -delete 2>/dev/null
  tar -C "$RUNS" --exclude checkpoints --exclude data --exclude 'model-*' -cf - "$name" | xz -T0 -3 >"$OUT/verl-$name.tar.xz"
}

prepare
SIZES=(--prompts 16 --samples 8 --micro-batch 64 --prompt-length 96 --response-length 128)
start start start "${SIZES[@]}" "${@:3}"
last=start
if [ ! -s "$RUNS/start/metrics.jsonl" ]; then # no step
  if ((LEFT_UNTIL - SECONDS < 150)); then
    echo "no second start: too little time is left" >>"$SUMMARY"
  elif [ -e "$RUNS/start/jetgraph-run/counterexample.txt" ]; then
    last=warn
    start warn warn "${SIZES[@]}" "${@:3}"
  else
    last=off
    start off off "${SIZES[@]}" "${@:3}" jetgraph.codegen=fx
  fi
fi
TAIL=40 step report 20 python3 -m benchmarks.verl_report "$RUNS/$last" --json "$OUT/verl.json"
