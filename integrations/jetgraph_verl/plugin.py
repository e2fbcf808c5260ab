"""What ``import verl`` loads (entry point group ``verl.plugins``), in every process of a run."""

from __future__ import annotations

import sys

from jetgraph_verl import cpu  # noqa: F401  (registers the platform)


def refuse_the_stock_entry_point() -> None:
    """``verl.trainer.main_ppo jetgraph.policy=…`` would silently run without a gate.

    Raises:
        SystemExit: that is what was typed.
    """
    asked = any(argument.lstrip("+").startswith(("jetgraph.", "jetgraph=")) for argument in sys.argv[1:])
    if asked and any(part.endswith(("verl.trainer.main_ppo", "verl/trainer/main_ppo.py")) for part in sys.orig_argv):
        sys.exit("jetgraph.* needs jetgraph's entry point: python -m jetgraph_verl.main_ppo, with the same options")


refuse_the_stock_entry_point()
