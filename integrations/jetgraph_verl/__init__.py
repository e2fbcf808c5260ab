"""jetgraph inside VeRL: a run that takes both precision graphs and does not start without a proof.

    python -m jetgraph_verl.main_ppo jetgraph.policy=jet …    # everything else as for verl.trainer.main_ppo

Nothing of VeRL is forked.  In the order of a run: `options` reads the one option and fits the rest of the configuration
to it; `main_ppo` starts the run; `trainer` is the synchronous trainer with the gate before step 1; `worker` and `actor`
are the training side, `rollout` and `engine_worker` the vLLM side; `cpu` lets VeRL run where there is no accelerator.
docs/verl.md lists every hook and every patch.
"""

from __future__ import annotations

SUPPORTED_VERL = ("0.9.1",)
"""Versions whose registries and methods this integration was written against and tested with."""


class UnsupportedVerl(RuntimeError):
    """The installed VeRL is one whose internals this integration has not been checked against."""


def check_version(version: str) -> None:
    """
    Raises:
        UnsupportedVerl: ``version`` is not one of `SUPPORTED_VERL`.
    """
    if version not in SUPPORTED_VERL:
        raise UnsupportedVerl(f"jetgraph_verl does not know verl {version}: install one of {', '.join(SUPPORTED_VERL)}")
