"""Every example runs as a user would run it, on a small random model folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = sorted(p.name for p in (REPOSITORY / "examples").glob("[0-9]*.py"))
SAYS = {
    "01_compile.py": ["2 equal blocks, 1 compile", "WGRAD  self_attn.q_proj", "float8_e4m3fn"],
    "02_precision_graph.py": ["unknown operators: none", "logits bit for bit: True", "gradients bit for bit: 20 of 20"],
    "03_verify_a_pair.py": ["CONTAINED", "exits with 0"],
    "04_counterexample.py": ["VIOLATED", "JG014", "out/counterexample.html"],
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    from tests.core.small_models import SMOLLM2_SIZES, random_model

    folder = tmp_path_factory.mktemp("model")
    random_model("llama", tied=True, sizes=SMOLLM2_SIZES).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.engine if "pair" in n else pytest.mark.slow) for n in EXAMPLES],
)
def test_example(name: str, small_model: Path, tmp_path: Path) -> None:
    lines = (REPOSITORY / "examples" / name).read_text().splitlines()
    assert len(lines) < 80
    run = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / name), str(small_model)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for text in SAYS[name]:
        assert text in run.stdout, run.stdout


def test_every_example_is_here() -> None:
    assert set(EXAMPLES) == set(SAYS)
