"""Replaces how Lightning handles signals: `_signal_connector`, `_broadcast_sigterm_tensor`.

It saves in mid-step, broadcasts inside a signal handler or requeues, and has no public switch. Here
a signal only sets a flag; the ranks agree on it, save one checkpoint together, and stop.
"""

import logging
import math
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import IterableDataset

from lockstep.callbacks.checkpoints import Checkpoints, call_after_module_hook
from lockstep.checkpoints.loader_state import loaders_in
from lockstep.checkpoints.resume_point import (
    ends_epoch,
    ends_step,
    epoch_text,
    is_validation_epoch,
    steps_are_over,
)
from lockstep.process import signals
from lockstep.process.errors import Interrupted
from lockstep.process.output import format_duration
from lockstep.ranks.collectives import gather_objects
from lockstep.ranks.process_group import all_or_none

log = logging.getLogger(__name__)

VOTE_INTERVAL_S = 1.0
# Quick steps may be followed by slow ones.
MOST_STEPS_BETWEEN_VOTES = 100


class Vote:
    """Agree on a flag between ranks by one small collective a second, and by none in other steps.

    Each vote also decides how many steps later the next one comes: as many as the slowest rank
    makes in a second.
    """

    def __init__(self, world_size: int, group: Any = None) -> None:
        self.world_size = world_size
        self.group = group
        self.step = 0
        self.next_step = 1
        self.last_step = 0
        self.last_time = time.monotonic()

    def __call__(self, flag: bool) -> bool:
        """Return True on all ranks at the same step; every rank calls it once a step."""
        if self.world_size == 1:
            return flag
        self.step += 1
        if self.step < self.next_step:
            return False
        return self._vote(flag)

    def _vote(self, flag: bool) -> bool:
        seconds = max(time.monotonic() - self.last_time, 1e-4)
        steps = int(VOTE_INTERVAL_S * (self.step - self.last_step) / seconds)
        steps = max(1, min(MOST_STEPS_BETWEEN_VOTES, steps))

        # The maximum of the negative steps is the slowest rank's.
        ballot = torch.tensor([int(flag), -steps])
        maximum = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(ballot, op=maximum, group=self.group)

        self.last_time = time.monotonic()
        self.last_step = self.step
        self.next_step = self.step - int(ballot[1])
        return bool(ballot[0])


class Interruption(pl.Callback):
    """Finish the step on a signal, save, and raise Interrupted on all ranks (exit code 75).

    Args:
        timeout_s: seconds until a vote fails, as for every collective.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self.reason = ""
        # Whether the run stops before the next epoch.
        self.stops_after_epoch = False
        self.votes: dict[str, Vote] = {}
        # The batches of each loader of an evaluation that end with a vote.
        self.batches_with_vote = math.inf
        self._previous_handlers: dict[int, Any] = {}  # signal handlers before this callback's

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary; safe to call from a signal handler or another thread."""
        self.reason = self.reason or reason

    def _on_signal(self, number: int, _frame: Any) -> None:
        signals.record_signal(number)
        self.request_stop(signal.Signals(number).name)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer._signal_connector.register_signal_handlers = do_nothing
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = do_nothing

        group = None
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            # A vote on the CPU never waits for a GPU.
            timeout = timedelta(seconds=self.timeout_s)
            with all_or_none():
                group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        if not self._previous_handlers:
            self._previous_handlers = signals.install_stop_handler(self._on_signal)
        if signals.received:
            # A signal has come in the middle of an import.
            self.request_stop(signals.first_signal_name())

        kinds = ("train", "evaluate", "time")
        self.votes = {kind: Vote(trainer.world_size, group) for kind in kinds}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_in_notebook():
            self._forget_signals()
        else:
            self._restore_handlers()

    def _is_in_notebook(self) -> bool:
        """Return whether `setup` replaced the handlers of a notebook or a plain script.

        A command, as train.py, has installed `signals.interrupt`, and reports the signal itself.
        """
        handlers = self._previous_handlers.values()
        return bool(handlers) and signals.interrupt not in handlers

    def _forget_signals(self) -> None:
        """Forget a signal of the last step, which must not stop the next fit of a notebook."""
        self._restore_handlers()
        self.reason = ""
        self.stops_after_epoch = False
        signals.received.clear()

    def _restore_handlers(self) -> None:
        signals.restore_handlers(self._previous_handlers)
        self._previous_handlers = {}

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._is_in_notebook():
            self._forget_signals()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if not ends_step(trainer):
            return
        if ends_epoch(trainer) and not is_validation_epoch(trainer):
            # The epoch's end is saved when all callbacks have had their turn.
            self.stops_after_epoch = self._vote_on_stop(trainer, "train")
            for callback in trainer.callbacks:
                if self.stops_after_epoch and isinstance(callback, Checkpoints):
                    callback.stop_after_epoch()
            return
        if self._vote_on_stop(trainer, "train"):
            call_after_module_hook(pl_module, lambda: self._stop(trainer, "train"))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.stops_after_epoch:
            self._stop(trainer, "train")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A vote waits for all ranks, and a rank whose loader is shorter would not come.
        if trainer.world_size > 1:
            group = self.votes["evaluate"].group
            self.batches_with_vote = min(gather_objects(fewest_batches(trainer), group))

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        out: Any,
        batch: Any,
        batch_idx: int,
        *_: Any,
    ) -> None:
        if batch_idx < self.batches_with_vote and self._vote_on_stop(trainer, "evaluate"):
            self._stop(trainer, "evaluate")

    on_test_batch_end = on_validation_batch_end

    def _vote_on_stop(self, trainer: pl.Trainer, kind: str) -> bool:
        """Return whether any rank was asked to stop. All ranks call it, and get one answer."""
        if trainer.state.fn == "fit" and steps_are_over(trainer):
            # A resume would not validate the last step. The test stops instead.
            return False
        return self.votes[kind](bool(self.reason))

    def _stop(self, trainer: pl.Trainer, kind: str) -> None:
        """Save a checkpoint of a training, and end the run."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            save_last(trainer)
        stop = Interrupted(self.reason or "another rank was asked to stop")
        requests = gather_objects((trainer.node_rank, bool(self.reason)), self.votes[kind].group)
        stop.is_agreed = True
        stop.is_of_other_nodes = (trainer.node_rank, True) not in requests
        raise stop


def fewest_batches(trainer: pl.Trainer) -> float:
    """Return the batches of the shortest loader of this evaluation, or 0 if one is a stream."""
    if trainer.testing:
        loaders = loaders_in(trainer.test_dataloaders)
        batches = trainer.num_test_batches
    else:
        loaders = loaders_in(trainer.val_dataloaders)
        batches = trainer.num_val_batches
    if trainer.sanity_checking:
        batches = trainer.num_sanity_val_batches

    if all(has_sure_length(loader) for loader in loaders):
        return min(batches)
    return 0


def has_sure_length(loader: Any) -> bool:
    """Return whether a loader counts its batches; a stream may end before the length it claims."""
    data = getattr(loader, "dataset", loader)
    return sized_len(loader) is not None and not isinstance(data, IterableDataset)


def do_nothing() -> None:
    """Take the place of Lightning's methods that handle signals."""


def save_last(trainer: pl.Trainer) -> None:
    """Save a last checkpoint of this step, and wait for it, as exit code 75 promises one."""
    for callback in trainer.callbacks:
        if isinstance(callback, Checkpoints):
            if callback.saved_step != trainer.global_step:
                callback.save(trainer, "last")
            callback.finish_together(trainer)


class MaxTime(pl.Callback):
    """End training after a step once its time is over, as after the last epoch: validated, tested.

    Args:
        seconds: limit for all starts of the run together.
        elapsed: returns the seconds so far on rank 0, whose clock counts, and 0 elsewhere.
    """

    def __init__(
        self, seconds: float, elapsed: Callable[[], float], interruption: Interruption
    ) -> None:
        self.seconds = seconds
        self.elapsed = elapsed
        self.interruption = interruption
        self.has_reached_max_time = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if not ends_step(trainer) or steps_are_over(trainer):
            return
        if ends_epoch(trainer) and trainer.current_epoch + 1 == trainer.max_epochs:
            return
        vote = self.interruption.votes["time"]
        if not vote(self.elapsed() >= self.seconds):
            return

        self.has_reached_max_time = True
        trainer.should_stop = True
        # Validate it also in an epoch that would have no validation.
        trainer.check_val_every_n_epoch = 1
        if trainer.is_global_zero:
            log.info(
                f"trainer.max_time: the limit of {format_duration(self.seconds)} is reached at "
                f"step {trainer.global_step}, in epoch {epoch_text(trainer)}: it ends here."
            )

    def record_fields(self) -> dict[str, object]:
        if not self.has_reached_max_time:
            return {}
        return {"ended_by": "max_time"}
