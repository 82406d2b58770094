"""Replaces how Lightning handles signals: `_signal_connector`, `_broadcast_sigterm_tensor`.

It saves in mid-step, broadcasts inside a signal handler or requeues, and has no public switch. Here a signal only sets
a flag; the ranks agree on it, save one checkpoint together, and stop.
"""

import logging
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.ranks.collectives import gather_objects
from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.resume_point import ends_epoch, ends_step, epoch_of, is_validation_epoch, steps_are_over
from lockstep.runs import signals
from lockstep.runs.errors import Interrupted
from lockstep.runs.output import duration

log = logging.getLogger(__name__)

VOTE_INTERVAL_S = 1.0
MOST_STEPS = 100  # between two votes: quick steps may be followed by slow ones


class Vote:
    """Agree on a flag between ranks, with one small collective about once a second and none in other steps.

    Each vote also decides how many steps later the next one comes: as many as the slowest rank makes in a second.
    """

    def __init__(self, world_size: int, group: Any = None) -> None:
        self.world_size, self.group = world_size, group
        self.count, self.last_count, self.next_at, self.voted_at = 0, 0, 1, time.monotonic()

    def __call__(self, flag: bool) -> bool:
        """Call once per step on every rank: True on all of them at the same step."""
        self.count += 1
        if self.world_size == 1 or self.count < self.next_at:
            return flag and self.world_size == 1
        speed = (self.count - self.last_count) / max(time.monotonic() - self.voted_at, 1e-4)
        ballot = torch.tensor([int(flag), -max(1, min(MOST_STEPS, int(VOTE_INTERVAL_S * speed)))])
        torch.distributed.all_reduce(ballot, op=torch.distributed.ReduceOp.MAX, group=self.group)
        self.voted_at, self.last_count, self.next_at = time.monotonic(), self.count, self.count - int(ballot[1])
        return bool(ballot[0])


class Interruption(pl.Callback):
    """Finish the step on a signal, save, and raise Interrupted on all ranks (exit code 75).

    Args:
        timeout_s: seconds until a vote fails, as for every collective.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s, self.reason = timeout_s, ""
        self._previous: dict[int, Any] = {}

    def ask(self, reason: str) -> None:
        """Stop at the next step boundary; safe to call from a signal handler or another thread."""
        self.reason = self.reason or reason

    def _on_signal(self, number: int, _frame: Any) -> None:
        signals.note(number)
        self.ask(signal.Signals(number).name)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop  # Lightning's handlers and broadcasts
        connector.register_signal_handlers = loop._broadcast_sigterm_tensor = lambda: None
        self._previous = self._previous or signals.on_stop(self._on_signal)
        if signals.asked:  # before, in the middle of an import that went on
            self.ask(signal.Signals(signals.asked[0]).name)
        group = None
        if trainer.world_size > 1 and torch.distributed.is_initialized():  # a vote never waits for a GPU
            group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        self.votes = {stage: Vote(trainer.world_size, group) for stage in ("train", "evaluate", "time")}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if signals.interrupt not in self._previous.values():  # a notebook, which goes on
            self.teardown(trainer, pl_module, "")
            self.reason = ""
            signals.asked.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        # An epoch that ends without a validation is saved when all have had their turn: the next step votes
        if ends_step(trainer) and not (ends_epoch(trainer) and not is_validation_epoch(trainer)):
            self._vote(trainer, "train")

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._vote(trainer, "evaluate")

    on_test_batch_end = on_validation_batch_end

    def _vote(self, trainer: pl.Trainer, kind: str) -> None:
        """Stop if any rank was asked to; after the last step only in the test, as a resume would not validate it."""
        is_fit = trainer.state.fn == "fit"
        if (is_fit and steps_are_over(trainer)) or not self.votes[kind](bool(self.reason)):
            return
        for callback in trainer.callbacks:
            if isinstance(callback, Checkpoints) and is_fit and not trainer.sanity_checking:
                if callback.saved_step != trainer.global_step:
                    callback.save(trainer, "last")
                callback.finish_together()  # exit code 75 promises it
        stop = Interrupted(self.reason or "another rank was asked to stop")
        asked = gather_objects((trainer.node_rank, bool(self.reason)), self.votes[kind].group)
        stop.agreed, stop.elsewhere = True, (trainer.node_rank, True) not in asked
        raise stop


class MaxTime(pl.Callback):
    """End training after a step once its time is over, as after the last epoch: with a validation and a test.

    Args:
        seconds: limit for all starts of the run together.
        elapsed: returns the seconds so far on rank 0, whose clock counts, and 0 elsewhere.
    """

    def __init__(self, seconds: float, elapsed: Callable[[], float], interruption: Interruption) -> None:
        self.seconds, self.elapsed, self.interruption, self.is_over = seconds, elapsed, interruption, False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        is_last = trainer.current_epoch + 1 == trainer.max_epochs and ends_epoch(trainer)
        if not ends_step(trainer) or is_last or steps_are_over(trainer):
            return
        if not self.interruption.votes["time"](self.elapsed() >= self.seconds):
            return
        self.is_over = trainer.should_stop = True
        trainer.check_val_every_n_epoch = 1  # validate it also in an epoch that would have none
        if trainer.is_global_zero:
            log.info(
                f"trainer.max_time: the limit of {duration(self.seconds)} is reached at step {trainer.global_step}, "
                f"in epoch {epoch_of(trainer)}: it ends here."
            )

    def record_fields(self) -> dict[str, object]:
        return {"ended_by": "max_time"} if self.is_over else {}
