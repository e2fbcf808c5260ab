"""``python -m jetgraph_vllm JOB.json`` with one GEMM for all parts of a linear where a GPU's engine has one."""

from __future__ import annotations

import sys

from jetgraph_vllm.__main__ import main
from jetgraph_vllm.engine import set_environment


def merge() -> None:
    set_environment()
    from jetgraph_vllm.linear import Fp8BlockLinearMethod
    from jetgraph_vllm.parts import merged

    load = Fp8BlockLinearMethod.process_weights_after_loading

    def load_and_merge(self, layer) -> None:
        load(self, layer)
        whole = merged(self.parts, self.block_rows)
        self.products = self.parts if whole is None else (whole,)

    Fp8BlockLinearMethod.process_weights_after_loading = load_and_merge


if __name__ == "__main__":
    merge()
    sys.exit(main(sys.argv[1:]))
