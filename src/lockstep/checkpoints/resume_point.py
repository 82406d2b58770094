"""Store the position of a checkpoint in training, and compute the loop state to resume there.

Lightning infers from its progress counters whether a validation is skipped or repeated, and the
counters change their meaning with accumulate_grad_batches. Checkpoints of this project therefore
store the position, and `loop_state` computes the counters from it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping

TRAINING = "training"
VALIDATION = "validation"
EPOCH_END = "epoch_end"
STAGE_NAMES = {
    "train": TRAINING,
    "validate": VALIDATION,
    "sanity_check": VALIDATION,
    "test": "test",
}
# A checkpoint stores these fields of a ResumePoint under other keys.
STORED_KEYS = {
    "steps_done": "batches_done",
    "missing_micro_batches": "lacking",
    "limits_when_ended": "ended",
    "max_time_when_ended_s": "over_at",
}


@dataclass(frozen=True)
class ResumePoint:
    """A position in training, which a checkpoint stores as a dict.

    Args:
        epoch: the current epoch from 0; at EPOCH_END the epoch that has just ended.
        steps_done: the optimizer steps done in this epoch.
        phase: TRAINING resumes after `steps_done`, VALIDATION repeats the whole validation at
            that point, EPOCH_END starts the next epoch.
        is_last: whether the last step of the epoch is done.
        missing_micro_batches: how many micro-batches the last step of the epoch has fewer than
            accumulate_grad_batches.
        limits_when_ended: max_epochs, max_steps and the patience of EarlyStopping in a training
            that a callback ended.
        max_time_when_ended_s: trainer.max_time in seconds, if it ended the training.
    """

    epoch: int
    steps_done: int
    phase: str
    is_last: bool = False
    missing_micro_batches: int = 0
    limits_when_ended: list[int | None] | None = None
    max_time_when_ended_s: float | None = None

    @classmethod
    def from_checkpoint(cls, stored: Mapping[str, Any]) -> "ResumePoint":
        """Return the point of a checkpoint, which another version may have written."""
        keys = {field.name: STORED_KEYS.get(field.name, field.name) for field in fields(cls)}
        return cls(**{name: stored[key] for name, key in keys.items() if key in stored})

    def to_checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint stores, with keys that version 2.0 reads too."""
        return {STORED_KEYS.get(name, name): value for name, value in asdict(self).items()}


def stage_name(trainer: pl.Trainer) -> str:
    """Return what the trainer does now: "training", "validation", "test", or else "start"."""
    stage = trainer.state.stage
    if stage is None:
        return "start"
    return STAGE_NAMES.get(str(stage.value), "start")


def micro_batches_done(trainer: pl.Trainer) -> int:
    """Return the micro-batches of this epoch so far, with the one that has just ended."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def ends_step(trainer: pl.Trainer) -> bool:
    """Return whether the batch that has just ended was the last one of an optimizer step."""
    if micro_batches_done(trainer) % trainer.accumulate_grad_batches == 0:
        return True
    return ends_epoch(trainer)


def ends_epoch(trainer: pl.Trainer) -> bool:
    """Return whether the batch that has just ended was the last one of the epoch."""
    if trainer.num_training_batches == math.inf:
        # Where data have no length, Lightning sets this flag at their end.
        return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return micro_batches_done(trainer) >= trainer.num_training_batches


def epoch_text(trainer: pl.Trainer) -> str:
    """Return "1/3", or "1" where trainer.max_epochs names no last epoch."""
    epoch = trainer.current_epoch + 1
    last_epoch = trainer.max_epochs or -1
    if last_epoch < 0:
        return str(epoch)
    return f"{min(epoch, last_epoch)}/{last_epoch}"


def steps_are_over(trainer: pl.Trainer) -> bool:
    """Return whether trainer.max_steps are done. Several optimizers may do more steps."""
    return 0 <= trainer.max_steps <= trainer.global_step


def is_validation_epoch(trainer: pl.Trainer) -> bool:
    """Return whether this epoch has validations: at its end, or where val_check_interval says."""
    interval = trainer.check_val_every_n_epoch or 1
    return trainer.enable_validation and (trainer.current_epoch + 1) % interval == 0


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Return whether Lightning validates after the batch that has just ended."""
    if not is_validation_epoch(trainer):
        return False
    interval = trainer.val_check_batch
    if interval == math.inf:
        return ends_epoch(trainer)
    if not interval:
        return False
    if trainer.check_val_every_n_epoch is None:
        return trainer.fit_loop.epoch_loop.batch_progress.total.ready % interval == 0
    return micro_batches_done(trainer) % interval == 0


def point_in_epoch(trainer: pl.Trainer, validated_step: int) -> ResumePoint:
    """Return the point after the batch that has just ended.

    Args:
        validated_step: the optimizer step of the latest validation.
    """
    micro_batches = micro_batches_done(trainer)
    accumulate = trainer.accumulate_grad_batches
    is_last = ends_epoch(trainer)
    steps = micro_batches // accumulate
    missing = 0
    phase = TRAINING
    if is_last:
        steps = math.ceil(micro_batches / accumulate)
        missing = -micro_batches % accumulate
        phase = EPOCH_END
    if is_validation_due(trainer) and validated_step != trainer.global_step:
        phase = VALIDATION

    epoch = trainer.current_epoch
    point = ResumePoint(epoch, steps, phase, is_last=is_last, missing_micro_batches=missing)
    return add_end(point, trainer) if has_left_epoch(trainer) else point


def has_left_epoch(trainer: pl.Trainer) -> bool:
    """Return whether Lightning has left the epoch, as it does after the last validation."""
    return trainer.fit_loop.epoch_progress.current.processed > trainer.current_epoch


def point_after_epoch(trainer: pl.Trainer, epoch: int) -> ResumePoint:
    """Return the point after an epoch."""
    return add_end(ResumePoint(epoch, 0, EPOCH_END), trainer)


def is_ended_by_callback(trainer: pl.Trainer) -> bool:
    """Return whether a callback has ended the training, and not max_steps or max_time."""
    return trainer.should_stop and not steps_are_over(trainer) and not is_out_of_time(trainer)


def stops_now(trainer: pl.Trainer) -> bool:
    """Return whether a callback ends the training, and min_epochs and min_steps let it."""
    epochs = trainer.fit_loop.epoch_progress.current.processed
    has_epochs = epochs >= (trainer.min_epochs or 0)
    has_steps = trainer.global_step >= (trainer.min_steps or 0)
    return trainer.should_stop and has_epochs and has_steps


def is_out_of_time(trainer: pl.Trainer) -> bool:
    """Return whether trainer.max_time has ended the training."""
    clock = find_max_time(trainer)
    return clock is not None and clock.has_reached_max_time


def find_max_time(trainer: pl.Trainer) -> Any:
    """Return the callback MaxTime, or None without trainer.max_time. Its file imports this one."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    clocks = [callback for callback in callbacks if hasattr(callback, "has_reached_max_time")]
    return clocks[0] if clocks else None


def _limits_of(trainer: pl.Trainer) -> list[int | None]:
    """Return max_epochs, max_steps and the patience of each EarlyStopping, also Lightning's own."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    stoppers = [one for one in callbacks if isinstance(one, EarlyStopping)]
    return [trainer.max_epochs, trainer.max_steps, *(one.patience for one in stoppers)]


def add_end(point: ResumePoint, trainer: pl.Trainer) -> ResumePoint:
    """Return the point with the limits of a training that a callback or max_time has ended."""
    if is_ended_by_callback(trainer):
        return replace(point, limits_when_ended=_limits_of(trainer))
    if is_out_of_time(trainer):
        return replace(point, max_time_when_ended_s=find_max_time(trainer).seconds)
    return point


def restore_end(trainer: pl.Trainer, point: ResumePoint) -> None:
    """End a training that had ended at this point, unless this start has other limits."""
    earlier_limits = point.limits_when_ended
    # Checkpoints of earlier versions have the first two.
    limits = _limits_of(trainer)[: len(earlier_limits or ())]
    trainer.should_stop = bool(limits) and earlier_limits == limits
    clock = find_max_time(trainer)
    earlier_limit_s = point.max_time_when_ended_s
    if clock is not None and earlier_limit_s is not None and clock.seconds <= earlier_limit_s:
        clock.has_reached_max_time = True
        trainer.should_stop = True


def loop_state(fit_loop: dict[str, Any], point: ResumePoint, accumulate: int) -> dict[str, Any]:
    """Return the state of Lightning's `loops.fit_loop` that resumes at `point`.

    | phase      | micro-batches ready           | completed | epochs ended |
    |------------|-------------------------------|-----------|--------------|
    | TRAINING   | steps × accumulate            | ready - 1 | epoch        |
    | VALIDATION | steps × accumulate - missing  | ready     | epoch        |
    | EPOCH_END  | 0 (the next epoch's)          | 0         | epoch + 1    |

    In VALIDATION, `is_last` says that the epoch's last batch has been trained.
    """
    epochs_started = point.epoch + 1
    epochs_ended = epochs_started if point.phase == EPOCH_END else point.epoch
    ready, completed = micro_batch_counts(point, accumulate)
    is_validation = point.phase == VALIDATION

    # Add the batches of earlier epochs, which check_val_every_n_epoch=null needs.
    saved_progress = fit_loop["epoch_loop.batch_progress"]
    earlier_batches = saved_progress["total"]["ready"]
    if point.phase != EPOCH_END:
        earlier_batches -= saved_progress["current"]["ready"]

    batch_progress = counter_state(ready, ready, completed, earlier_batches)
    is_last = is_validation and point.is_last
    val_progress = counter_state(int(is_validation), 0, 0)
    return {
        **fit_loop,
        "epoch_progress": counter_state(epochs_started, epochs_ended, epochs_ended),
        "epoch_loop.batch_progress": {**batch_progress, "is_last_batch": is_last},
        "epoch_loop.val_loop.batch_progress": {**val_progress, "is_last_batch": False},
    }


def micro_batch_counts(point: ResumePoint, accumulate: int) -> tuple[int, int]:
    """Return how many micro-batches of the current epoch have begun, and how many are completed.

    Lightning's counters call them ready and completed.
    """
    if point.phase == EPOCH_END:
        # The next epoch is the current one now.
        return 0, 0
    ready = point.steps_done * accumulate
    if point.phase == TRAINING:
        # This is how Lightning recognises a checkpoint saved in on_train_batch_end.
        return ready, ready - 1
    ready -= point.missing_micro_batches
    return ready, ready


def counter_state(ready: int, processed: int, completed: int, earlier: int = 0) -> dict[str, Any]:
    """Return the state of a progress counter of Lightning, with `earlier` ones in its total."""
    current = {"ready": ready, "started": ready, "processed": processed, "completed": completed}
    total = {name: earlier + count for name, count in current.items()}
    return {"total": total, "current": current}
