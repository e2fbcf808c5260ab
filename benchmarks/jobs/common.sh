# shellcheck shell=bash
# Sourced by the jobs of this folder.  A job is a row of steps: each has its own limit, and none stops those
# after it.  What comes of it lies in $OUT (out/jobs), with all that was printed in log.txt; the last lines are the summary.
#
#   begin SECONDS          what the whole job may take
#   wanted LETTER          true if the caller's letters ($STEPS) have it, or there are none
#   step NAME LIMIT CMD…   run CMD for at most LIMIT seconds, or what is left; not started if less than a third of LIMIT is left
#
# $KIT is a folder of what `pack.sh` made, and of `caches.*` that an earlier job left: unpacked if it is there.

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
OUT=$(mkdir -p "${OUT:-out/jobs}" && cd "${OUT:-out/jobs}" && pwd)
SITE=${SITE:-${TMPDIR:-/tmp}/jetgraph-site}
CACHES=${CACHES:-${TMPDIR:-/tmp}/jetgraph-caches}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TRITON_CACHE_DIR=$CACHES/triton DG_JIT_CACHE_DIR=$CACHES/deep_gemm JETGRAPH_CACHE=$CACHES/jetgraph
LOG=$OUT/log.txt
SUMMARY=$(mktemp)
mkdir -p "$CACHES" "$SITE"
if [ -n "${KIT:-}" ]; then
  [ -f "$KIT/base.tar.xz" ] && [ ! -d "$SITE/deep_gemm" ] && tar -xJf "$KIT/base.tar.xz" -C "$SITE"
  compgen -G "$KIT/caches.*" >/dev/null && [ ! -d "$CACHES/triton" ] && cat "$KIT"/caches.* | tar -xJ -C "$CACHES"
fi
if ! python3 -c 'import importlib.metadata as m, jetgraph_vllm; m.version("jetgraph")' 2>/dev/null; then
  python3 benchmarks/jobs/entry_points.py "$SITE"
  export PYTHONPATH="$PWD:$PWD/integrations:$SITE${PYTHONPATH:+:$PYTHONPATH}"
fi

finish() {
  [ -n "${STEP:-}" ] && kill -KILL -- "-$STEP" 2>/dev/null # the job itself was interrupted
  if [ -n "${KEEP_CACHES:-}" ]; then # in parts of 15 MB, for the next machine
    tar -C "$CACHES" -cf - . | xz -T0 -3 | split -b 15000000 -d - "$OUT/caches."
  fi
  echo
  tee -a "$LOG" <"$SUMMARY"
}
trap finish EXIT

begin() {
  SECONDS=0
  LEFT_UNTIL=$1
  : >"$LOG"
}

wanted() {
  [[ -z ${STEPS:-} || $STEPS == *$1* ]]
}

step() {
  local name=$1 limit=$2 start=$SECONDS left before status
  shift 2
  left=$((LEFT_UNTIL - SECONDS))
  if ((left < limit / 3)); then
    echo "$name: not started, $left s left of $LEFT_UNTIL" >>"$SUMMARY"
    return
  fi
  limit=$((left < limit ? left : limit))
  echo "== $name, at most $limit s: $*" | tee -a "$LOG"
  before=$(stat -c %s "$LOG")
  # A session of its own: one interrupt, for the program alone (two would break off what it still writes); then all that it
  # started is killed, because the next step wants the machine for itself.
  setsid timeout --foreground -s INT -k 20 "$limit" "$@" >>"$LOG" 2>&1 </dev/null &
  STEP=$!
  wait "$STEP"
  status=$?
  kill -KILL -- "-$STEP" 2>/dev/null
  tail -c "+$((before + 1))" "$LOG" | tail -n "${TAIL:-12}"
  echo "$name: exit $status after $((SECONDS - start)) s" >>"$SUMMARY"
}
