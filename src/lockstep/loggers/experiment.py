"""Let a module draw into every logger of a run; a method that a logger lacks is skipped.

Projects call `self.logger.experiment.add_image(…)`, or do so in a loop over `self.loggers`. The
methods belong to the one tracker that the project was written for, and a run has others, too. The
first call of a method that is skipped is logged.
"""

import contextlib
import functools
import logging
import re
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)

# Methods by which TensorBoard, wandb, MLflow, Comet and Aim take scalars, images and figures.
METHODS = re.compile(r"(add|log)(_\w+)?|track|watch")


class SkipMethodsMixin:
    """Skip methods of other trackers that an experiment does not have.

    Attributes:
        name_in_log: the logger's name in the line about a skipped method.
    """

    name_in_log = "logger"

    def __getattr__(self, name: str) -> Any:
        if not METHODS.fullmatch(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(_skip, self.name_in_log, name)


@rank_zero_only
def _skip(logger: str, method: str, *_args: Any, **_kwargs: Any) -> None:
    _log_once(logger, method)


@functools.cache
def _log_once(logger: str, method: str) -> None:
    log.info(f"logger.{logger} has no {method}: what the module gives it there is skipped.")


def skip_other_methods(logger: Any, name: str) -> None:
    """Let the experiment of a logger skip methods of other trackers.

    The logger gets a subclass of its class, and so does its experiment: modules and Lightning ask
    isinstance(logger, TensorBoardLogger), and a wrapper would not be an instance of it.
    """
    logger_class = type(logger)

    def read_experiment(self: Any) -> Any:
        # Some loggers have none.
        original = None
        if hasattr(logger_class, "experiment"):
            original = super(tolerant_class, self).experiment  # type: ignore[misc]
        return _add_skip_methods(original, name)

    tolerant_class: Any = type(
        logger_class.__name__, (logger_class,), {"experiment": property(read_experiment)}
    )
    tolerant_class.__module__ = logger_class.__module__
    logger.__class__ = tolerant_class


def _add_skip_methods(experiment: Any, logger_name: str) -> Any:
    """Return the experiment with SkipMethodsMixin among its bases, or a new one for None."""
    if experiment is None:
        experiment = SkipMethodsMixin()
        experiment.name_in_log = logger_name
    cls = type(experiment)
    # Such a class answers to any method itself, as Lightning's experiment of other ranks does.
    if not hasattr(cls, "__getattr__"):
        attributes = {"name_in_log": logger_name, "__module__": cls.__module__}
        # A class written in C stays as it is.
        with contextlib.suppress(TypeError):
            experiment.__class__ = type(cls.__name__, (cls, SkipMethodsMixin), attributes)
    return experiment


class SkippingLogger(SkipMethodsMixin, Logger):
    """The logger of an evaluation. It skips a module's figures: the results are in the record.

    Args:
        folder: the run folder of the evaluation.
    """

    name_in_log = "evaluation"
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
        return _add_skip_methods(None, self.name_in_log)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Do nothing: the record has them."""

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the run has them."""
