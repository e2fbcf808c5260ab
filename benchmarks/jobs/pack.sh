#!/usr/bin/env bash
# Packs what the jobs need on a GPU machine without a network:   pack.sh OUT_DIR   writes OUT_DIR/base.tar.xz (about 12 MB)
#
# DeepGEMM as vLLM's wheel carries it (it is the build for torch 2.11), and the packages of requirements.txt; Python 3.12.
# Engines are not in it: a machine for `engine.sh` or `verl.sh` has vLLM or VeRL installed, or on PYTHONPATH.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=()
for n in 39 35 34 31 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)
fetch() {
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$work/wheels" "$@"
}
fetch -c "$here/../../constraints.txt" -r "$here/requirements.txt"
for wheel in "$work"/wheels/*.whl; do unzip -qo "$wheel" -d "$work/site"; done
fetch vllm==0.26.0
unzip -qo "$work"/wheels/vllm-*.whl 'vllm/third_party/deep_gemm/*' -d "$work/vllm"
mv "$work/vllm/vllm/third_party/deep_gemm" "$work/site/deep_gemm"
rm -f "$work"/site/deep_gemm/_C.cpython-31[0134]*
tar -C "$work/site" -cf - . | xz -T0 -6 >"$out/base.tar.xz"
ls -l "$out/base.tar.xz"
