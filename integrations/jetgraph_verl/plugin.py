"""What ``import verl`` loads (entry point group ``verl.plugins``), in every process of a run."""

from __future__ import annotations

from jetgraph_verl import cpu

cpu.refuse_the_stock_entry_point()
