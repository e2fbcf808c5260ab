"""How a graph shows itself in a notebook: the folded overview as inline SVG, without a script.

Text for frontends that draw nothing is short: a notebook file keeps what it shows.
"""

from __future__ import annotations

from html import escape

from jetgraph.graph import PrecisionGraph
from jetgraph.viz.study import study
from jetgraph.viz.svg import overview_svg
from jetgraph.viz.tree import folded_title, sections


def mimebundle(graph: PrecisionGraph) -> dict[str, str]:
    """``text/html`` and ``text/plain`` for IPython's display protocol."""
    known = study(graph)
    flow = " → ".join(folded_title(section) for section in sections(known))
    policy = f", policy {graph.meta['policy']}" if graph.meta.get("policy") else ""
    sizes = f"{len(graph.nodes):,} nodes, {graph.num_edges:,} edges"
    title = f"Precision flow of {graph.meta.get('model', graph.name)}"
    picture = overview_svg(known, title).replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)
    head = f"<b>{escape(graph.name + policy)}</b>: {sizes}; semantic digest <code>{graph.semantic_digest[:16]}</code>"
    page = f'<div style="overflow-x:auto"><div>{head}</div>{picture}</div>'
    return {"text/html": page, "text/plain": f"PrecisionGraph {graph.name}{policy}: {sizes}\n{flow}"}
