"""Hydra plugin for against=baseline: run each seed or fold with and without the recipe's overrides.

    python src/train.py -m experiment=quickstart seed=1,2,3 against=baseline optimizer.lr=0.01

Hydra finds it here; which overrides the baseline omits is in lockstep/sweeps/against.py.
"""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lockstep.sweeps.against import expand_arms


class PairedSweep(Sweeper):
    """Run the jobs of the baseline, then those of the other arms."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        parser = OverridesParser.create(config_loader=self.loader)
        jobs = expand_arms(parser.parse_overrides(arguments))
        self.launcher.launch(jobs, initial_job_idx=0)
