"""Check and log the metric that a task's ReduceLROnPlateau goes by (scheduler.monitor).

Lightning takes it from the metrics that are logged at an epoch's end. A task counts its training
metrics itself, so that they are exact over a resume. They are logged only for the schedule.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lockstep.process.errors import UserError
from lockstep.records.metric_names import is_metric_of


def check_before_training(trainer: pl.Trainer, module: Any) -> None:
    """Refuse a metric of the validation in a training that has none."""
    for monitor in _monitors(trainer, module):
        if is_metric_of("val", monitor) and not trainer.enable_validation:
            raise UserError(
                f"scheduler.monitor={monitor} is a metric of the validation, and this training has "
                "none. Pass scheduler.monitor=train/loss, or another schedule, as scheduler=cosine."
            )


def check_sanity_metrics(trainer: pl.Trainer, module: Any) -> None:
    """Refuse a metric that the sanity check, a validation before training, has not logged."""
    validations = [name for name in trainer.callback_metrics if is_metric_of("val", name)]
    for monitor in _monitors(trainer, module):
        # With several loaders Lightning has no metrics before the training.
        if validations and is_metric_of("val", monitor) and monitor not in validations:
            raise UserError(_not_logged_message(monitor, [*validations, "train/loss"]))


def log_training_metrics(trainer: pl.Trainer, module: Any, epoch_means: dict[str, float]) -> None:
    """Log the training metric that a schedule goes by, and refuse one that does not exist.

    Args:
        epoch_means: the means over the epoch that ends and over all ranks, by metric.
    """
    for monitor in _monitors(trainer, module, at_epoch=trainer.current_epoch + 1):
        if monitor in epoch_means:
            module.log_exactly({monitor: epoch_means[monitor]})
            continue
        # A module of the user's may log the metric itself, even after this callback.
        is_logged = monitor in trainer.callback_metrics
        if not is_logged and not is_overridden("on_train_epoch_end", module):
            raise UserError(_not_logged_message(monitor, [*trainer.callback_metrics, *epoch_means]))


def _monitors(trainer: pl.Trainer, module: Any, at_epoch: int = 0) -> list[str]:
    """Return the metrics that a task's schedules go by; none for modules that log them themselves.

    Args:
        at_epoch: take only schedules that step at the end of this epoch, from 1; 0: take all.
    """
    if not hasattr(module, "log_exactly"):
        return []
    monitors = []
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and at_epoch % config.frequency == 0:
            monitors.append(str(config.monitor))
    return monitors


def _not_logged_message(monitor: str, names: list[str]) -> str:
    metrics = ", ".join(sorted(set(names)))
    return f"scheduler.monitor={monitor} is not logged. Pass one of {metrics}."
