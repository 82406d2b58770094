"""Where a training is validated within an epoch, and when its time ends it."""

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks.interruption import Interruption, Vote
from lockstep.callbacks.resume_point import ends_epoch, ends_step
from lockstep.runs.durations import in_words

log = logging.getLogger(__name__)


class ValidationInterval(Callback):
    """Validates within an epoch and at its end, which Lightning leaves out where the interval does not divide it.

    Args:
        batches: micro-batches from one validation to the next, counted in each epoch anew.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Also of a run that goes on in the validation at an epoch's end."""
        trainer.val_check_batch = trainer.num_training_batches if ends_epoch(trainer) else self.batches

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)


class MaxTime(Callback):
    """Ends training after a step, once its time is over: what comes then (validation, best checkpoint, test) is as
    after the last epoch.

    Args:
        seconds: of all starts of the run together.
        elapsed: seconds so far, on rank 0, whose clock counts; 0 elsewhere.
        interruption: whose ranks agree about once a second.
    """

    def __init__(self, seconds: float, elapsed: Callable[[], float], interruption: Interruption) -> None:
        self.seconds, self.elapsed, self.interruption = seconds, elapsed, interruption
        self.is_over = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.vote = Vote(trainer.world_size, self.interruption.votes["train"].group)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
        if not ends_step(trainer) or trainer.global_step == trainer.max_steps or (last_epoch and ends_epoch(trainer)):
            return
        if not self.vote(self.elapsed() >= self.seconds):
            return
        self.is_over = trainer.should_stop = True
        trainer.check_val_every_n_epoch = 1  # validate it also in an epoch that would have none
        if trainer.is_global_zero:
            log.info(
                f"trainer.max_time: {in_words(self.seconds)} of training are over at step {trainer.global_step}, in "
                f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}: it ends here."
            )

    def record_fields(self) -> dict[str, object]:
        return {"ended_by": "max_time"} if self.is_over else {}
