"""The SVG files and the terminal view: well formed, self-contained, and literal about hostile names."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from jetgraph.viz import as_json, text, write_layer_svg, write_overview_svg

from .conftest import HOSTILE, differing, tiny


def test_svg_files_are_well_formed_and_self_contained(tmp_path):
    train, infer, found = differing()
    for path in (
        write_overview_svg(tmp_path / "o.svg", train, infer, found, title=HOSTILE.replace("\u2028", "")),
        write_layer_svg(tmp_path / "l.svg", train, infer, 1, found),
        write_layer_svg(tmp_path / "one.svg", train),
    ):
        root = ElementTree.parse(path).getroot()
        assert "var(--" not in path.read_text(encoding="utf-8")
        assert float(root.get("width")) > 100
    assert "differs" in (tmp_path / "l.svg").read_text(encoding="utf-8")


def test_missing_layer_is_named():
    with pytest.raises(ValueError, match="layer 9: tiny has no such layer"):
        write_layer_svg("unwritten.svg", tiny(), layer=9)


def test_terminal_view_fits_80_columns_and_folds():
    shown = text(tiny(layers=12))
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert "proj (0–11)" in shown
    assert "f8e4m3[1x128] × f8e4m3[128x128]" in shown
    assert "aten::odd" in shown


def test_terminal_json_is_plain():
    facts = json.loads(json.dumps(as_json(tiny())))
    assert facts["linears"][0]["operands"] == ["f8e4m3[1x128]", "f8e4m3[128x128]"]
    assert facts["linears"][0]["layers"] == [0, 1, 2]
    assert facts["unknown"] == ["aten::odd"]


def test_pictures_need_no_torch():
    code = "import sys, jetgraph.viz; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------------------------------------- a browser
