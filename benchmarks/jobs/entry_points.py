"""Makes plugins found where jetgraph is on PYTHONPATH and not installed:  python3 entry_points.py FOLDER

Writes jetgraph's metadata into FOLDER, which goes on PYTHONPATH too: vLLM, VeRL and jetgraph look there.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"] | {"console_scripts": project["scripts"]}
    lines = [f"[{group}]\n" + "\n".join(f"{n} = {v}" for n, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
