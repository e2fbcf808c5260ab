#!/usr/bin/env bash
# A job that takes longer than one call to its machine:
#
#   benchmarks/jobs/detached.sh start FOLDER JOB ARGUMENT…    begins it; FOLDER becomes its $OUT, and it outlives the call
#   benchmarks/jobs/detached.sh wait FOLDER SECONDS           waits that long for its end, and copies FOLDER into $OUT
#
# The status of `wait` is the job's, or 75 while it still runs.
set -u
if (($# < 3)); then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
folder=$(mkdir -p "$2" && cd "$2" && pwd)
case $1 in
  start)
    OUT=$folder nohup setsid bash -c '"$@"; echo $? >"$OUT/ended"' "$3" "${@:3}" >"$folder/said.txt" 2>&1 </dev/null &
    ;;
  wait)
    for ((i = 0; i < $3; i++)); do
      [ -f "$folder/ended" ] && break
      sleep 1
    done
    mkdir -p "${OUT:=out/jobs}"
    cp -r "$folder/." "$OUT/"
    tail -n "${TAIL:-30}" "$folder/said.txt"
    [ -f "$folder/ended" ] || exit 75
    exit "$(cat "$folder/ended")"
    ;;
  *)
    echo "$1: expected start or wait" >&2
    exit 2
    ;;
esac
