#!/usr/bin/env bash
# benchmarks.rl, what precision does to RL, as far as the time goes:   benchmarks/jobs/rl.sh [SECONDS [LENGTH [ARGUMENT…]]]
#
# Three arms and three seeds, answers of at most LENGTH tokens (256, or 2048 on problems that ask for steps).  The same call
# goes on where the last one ended: on the same machine from $WORK; on another from $KIT/rl-LENGTH.state.*, which every call
# leaves in $OUT in parts of 15 MB.  $OUT also has rl-LENGTH.json, .svg and -steps.json, of all steps so far.  What follows
# LENGTH goes to benchmarks.rl: `--arms jet --steps 20`.
#
# $MPS=1 lets the processes' kernels run beside each other (NVIDIA's Multi-Process Service, for the time of this job).
. "$(dirname "$0")/common.sh"
. benchmarks/jobs/prepare.sh
begin "${1:-560}"
LENGTH=${2:-256}
COLLECT=20                 # seconds of the end,
ENDING=$((40 + LENGTH / 40)) # and of a step that has begun, of saving trainers, of the report
WORK=${WORK:-$SITE/rl-$LENGTH}

if [ ! -d "$WORK" ]; then
  mkdir -p "$WORK"
  compgen -G "${KIT:-}/rl-$LENGTH.state.*" >/dev/null && cat "$KIT/rl-$LENGTH.state".* | tar -xJ -C "$WORK"
fi

# Reckoned, not measured: three processes keep a GPU busy; each takes 11 GB for answers of 256 tokens, 17 for 2,048, for its
# cache, its logits and its trainer.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
spread=(--together 3)
((gpus > 1)) && spread=(--split-seeds --together $((gpus < 3 ? 3 * gpus : 9)))

mps() { nvidia-cuda-mps-control "$@"; }
if [ -n "${MPS:-}" ]; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  mps -d
  if ! timeout 40 python3 -c 'import torch; torch.ones(1, device="cuda").item()'; then
    echo "no MPS here: processes take turns" | tee -a "$LOG"
    echo quit | mps
    unset MPS CUDA_MPS_PIPE_DIRECTORY
  fi
fi

prepare
rm -f "$OUT/rl-$LENGTH".*
rl=(python3 -m benchmarks.rl --model "$SMOLLM2" --work "$WORK" --length "$LENGTH"
  --json "$OUT/rl-$LENGTH.json" --picture "$OUT/rl-$LENGTH.svg")
problems=${RL_DATA:?the folder of short.json and long.json that pack_rl.sh writes}/$( ((LENGTH > 1000)) && echo long || echo short).json
left=$((LEFT_UNTIL - SECONDS - COLLECT))
TAIL=40 step rl "$left" "${rl[@]}" --problems "$problems" --micro-batch 8192 "${spread[@]}" \
  --minutes "$(awk "BEGIN { print ($left - $ENDING) / 60 }")" "${@:3}"
[ -n "${MPS:-}" ] && echo quit | mps
[ -f "$OUT/rl-$LENGTH.json" ] || step report 60 "${rl[@]}" --only-report # what was killed at its limit has none yet
(cd "$WORK" && tar -cf - $(compgen -G "settings.json"; compgen -G "*.jsonl"; compgen -G "*.journal")) |
  xz -T0 -6 | split -b 15000000 -d - "$OUT/rl-$LENGTH.state."
