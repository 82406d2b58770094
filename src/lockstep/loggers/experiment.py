"""Let a module draw into every logger of a run: what a logger cannot do is skipped with one line.

Projects call `self.logger.experiment.add_image(…)`, or do so in a loop over `self.loggers`. The
methods are those of the one tracker that the project was written for, and a run has others too.
"""

import contextlib
import functools
import logging
import re
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)

# Methods by which TensorBoard, wandb, MLflow, Comet and Neptune take scalars, images and figures.
METHODS = re.compile(r"(add|log)(_\w+)?|append|upload|track|watch")


class Skipping:
    """Skip methods of other trackers that an experiment does not have."""

    skips_for = "logger"

    def __getattr__(self, name: str) -> Any:
        if not METHODS.fullmatch(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(_skip, self.skips_for, name)


@rank_zero_only
def _skip(logger: str, method: str, *_args: Any, **_kwargs: Any) -> None:
    _log_once(logger, method)


@functools.cache
def _log_once(logger: str, method: str) -> None:
    log.info(f"logger.{logger} has no {method}: what the module gives it there is skipped.")


def skip_other_methods(logger: Any, name: str) -> None:
    """Give a logger an `experiment` that skips methods of other trackers.

    The logger and its experiment stay instances of their classes.
    """
    cls = type(logger)

    def experiment(self: Any) -> Any:
        inner = cls.experiment.__get__(self, cls) if hasattr(cls, "experiment") else None
        return _tolerant_experiment(inner, name)

    tolerant = type(cls.__name__, (cls,), {"experiment": property(experiment)})
    tolerant.__module__ = cls.__module__
    logger.__class__ = tolerant


def _tolerant_experiment(experiment: Any, name: str) -> Any:
    if experiment is None:
        experiment = Skipping()
        experiment.skips_for = name
    cls = type(experiment)
    # Such a class answers to any method itself, as Lightning's of other ranks does.
    if not hasattr(cls, "__getattr__"):
        attributes = {"skips_for": name, "__module__": cls.__module__}
        # A class written in C stays as it is.
        with contextlib.suppress(TypeError):
            experiment.__class__ = type(cls.__name__, (cls, Skipping), attributes)
    return experiment


class SkippingLogger(Skipping, Logger):
    """The logger of an evaluation, whose results are in its record: a module's figures are skipped.

    Args:
        folder: of the evaluation.
    """

    skips_for = "evaluation"
    name = "evaluation"
    version = ""
    save_dir: str | None = None

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.save_dir = folder

    @property
    def log_dir(self) -> str | None:
        return self.save_dir

    @property
    def experiment(self) -> Any:
        return _tolerant_experiment(None, self.skips_for)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Do nothing: the record has them."""

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the run has them."""
