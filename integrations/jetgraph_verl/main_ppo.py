"""``verl.trainer.main_ppo`` with the gate in front: ``python -m jetgraph_verl.main_ppo jetgraph.policy=jet …``.

Every option is VeRL's own, under its own name.  Without ``jetgraph.policy`` this is VeRL and nothing else.
"""

from __future__ import annotations

import hydra
import ray
import verl
from omegaconf import DictConfig
from verl.trainer import main_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from jetgraph_verl import check_version
from jetgraph_verl.options import prepare


class TaskRunner(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[name-defined, misc]
    """VeRL's driver actor, in whose process the trainer and the rollout replicas are chosen."""

    def run(self, config: DictConfig) -> None:
        from jetgraph_verl import rollout, trainer

        rollout.install_replica()
        trainer.install()
        super().run(config)


def run(config: DictConfig) -> None:
    """Run what ``config`` asks for.

    Raises:
        OptionsError: before anything is started, if the precision flow cannot hold under this configuration.
        RayTaskError: with `jetgraph.admission.NotAdmitted`, if the run may not start.
    """
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    if prepare(config) is None:
        main_ppo.run_ppo(config, task_runner_class=main_ppo.TaskRunnerV1)
        return
    check_version(verl.__version__)
    main_ppo.run_ppo(config, task_runner_class=ray.remote(TaskRunner))


@hydra.main(config_path="config", config_name="ppo_jetgraph", version_base=None)
def main(config: DictConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
