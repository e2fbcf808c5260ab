"""The refutation cases build their graphs with the toy transformer of tests/verify."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "verify"))
