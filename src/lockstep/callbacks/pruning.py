"""Report each validation to the study of a search, and end a trial that its pruner gives up."""

import logging
import math

import lightning.pytorch as pl

from lockstep.callbacks.training_log import ValidationInterval
from lockstep.checkpoints.resume_point import (
    ends_epoch,
    epoch_text,
    micro_batches_done,
    steps_are_over,
)
from lockstep.records.trial import Trial

log = logging.getLogger(__name__)


class Pruning(pl.Callback):
    """End a training after a validation if the search's pruner says so, on all ranks together.

    The run ends as after its last epoch: it is saved, and recorded as `ended_by: pruned`.

    Args:
        trial: the trial of the search.
        metric: the metric that the search optimises.
    """

    def __init__(self, trial: Trial, metric: str) -> None:
        self.trial = trial
        self.metric = metric
        self.is_pruned = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        is_given_up = False
        if trainer.is_global_zero:
            is_given_up = self._report(trainer)
        is_given_up = trainer.strategy.broadcast(is_given_up)
        if is_given_up and not is_last_validation(trainer):
            self._end_training(trainer)

    def _report(self, trainer: pl.Trainer) -> bool:
        """Report the metric on rank 0; return whether the pruner gives the trial up."""
        if self.metric not in trainer.callback_metrics:
            return False
        value = float(trainer.callback_metrics[self.metric])
        try:
            return self.trial.report(number_of_validation(trainer), value)
        except (OSError, KeyError, ValueError) as error:
            # The trial is worth more than its report.
            log.warning(f"The search's journal {self.trial.journal} cannot be used: {error}.")
            return False

    def _end_training(self, trainer: pl.Trainer) -> None:
        self.is_pruned = True
        trainer.should_stop = True
        if trainer.is_global_zero:
            log.info(
                f"Trial {self.trial.number} is pruned ({self.trial.pruner}) at step "
                f"{trainer.global_step}, in epoch {epoch_text(trainer)}."
            )

    def record_fields(self) -> dict[str, object]:
        return {"ended_by": "pruned"} if self.is_pruned else {}


def is_last_validation(trainer: pl.Trainer) -> bool:
    """Return whether the training ends after this validation anyhow."""
    if trainer.should_stop or steps_are_over(trainer):
        return True
    return ends_epoch(trainer) and trainer.current_epoch + 1 == trainer.max_epochs


def number_of_validation(trainer: pl.Trainer) -> int:
    """Return the number of this validation in the run, from 1, whatever was resumed before it."""
    epochs = trainer.current_epoch // (trainer.check_val_every_n_epoch or 1)
    interval = trainer.val_check_batch
    if not isinstance(interval, int):
        # The data have no length, or the clock says when to validate.
        return epochs + 1
    if isinstance(trainer.val_check_interval, int):
        # ValidationInterval changes val_check_batch, and leaves this value.
        interval = trainer.val_check_interval

    if trainer.check_val_every_n_epoch is None or trainer.num_training_batches == math.inf:
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return scheduled_validations(trainer, interval, batches - 1) + 1
    validations_per_epoch = scheduled_validations(
        trainer, interval, int(trainer.num_training_batches)
    )
    validations_in_epoch = scheduled_validations(trainer, interval, micro_batches_done(trainer) - 1)
    return epochs * validations_per_epoch + validations_in_epoch + 1


def scheduled_validations(trainer: pl.Trainer, interval: int, batches: int) -> int:
    """Return how many validations fall within the first `batches` micro-batches."""
    count = batches // interval
    # ValidationInterval validates at the end of an epoch, too.
    if any(isinstance(callback, ValidationInterval) for callback in trainer.callbacks):
        epoch = int(trainer.num_training_batches)
        count += batches // epoch - batches // math.lcm(interval, epoch)
    return count
