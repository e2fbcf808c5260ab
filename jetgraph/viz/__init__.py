"""Pictures of precision graphs: one HTML page, single SVGs, a table for terminals.  No torch, no network, no proof.

`layers` cuts a graph into sections and folds equal layers (`apart` says why one is not); `matching` finds each rollout
node's partner; `study` holds both with the differences; `condense` makes boxes of nodes, `layered` places them, `scene`
joins both sides; `svg`, `html` (with `page_data` and the scripts of `page/`) and `table` draw.  `window`, `png`, `dot`,
`model_explorer`, `netron` and `notebook` are further forms; `compare` and `compare_report` say what changed between any
two graphs.
"""

from jetgraph.viz.differences import Difference, from_faults
from jetgraph.viz.html import render_html, write_html
from jetgraph.viz.svg import write_layer_svg, write_overview_svg
from jetgraph.viz.table import as_json, print_summary, text

__all__ = [
    "Difference",
    "as_json",
    "from_faults",
    "print_summary",
    "render_html",
    "text",
    "write_html",
    "write_layer_svg",
    "write_overview_svg",
]
