"""Replaces how Lightning handles signals: `_signal_connector`, `_broadcast_sigterm_tensor`.

Lightning saves in the middle of a step, broadcasts inside a signal handler or requeues, and has no
public switch for it. Here a signal only sets a flag. The ranks agree on the flag, save one
checkpoint together, and stop.
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
from lightning.pytorch.callbacks import WeightAveraging
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
# Slow steps may follow quick ones, and would delay the next vote.
MAX_STEPS_BETWEEN_VOTES = 100


class Vote:
    """Agree on a flag between ranks, by one small collective in about a second.

    Each vote also decides after how many steps the next one comes: as many as the slowest rank
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
        """Return True on all ranks at the same step. Every rank calls this once a step."""
        if self.world_size == 1:
            return flag
        self.step += 1
        if self.step < self.next_step:
            return False
        return self._vote(flag)

    def _vote(self, flag: bool) -> bool:
        seconds = max(time.monotonic() - self.last_time, 1e-4)
        steps = int(VOTE_INTERVAL_S * (self.step - self.last_step) / seconds)
        steps = max(1, min(MAX_STEPS_BETWEEN_VOTES, steps))

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
        # An evaluation votes after this many first batches of each loader.
        self.batches_with_vote = math.inf
        # Whether a notebook or a plain script runs, and no command such as train.py.
        self.is_in_notebook = False
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
            # A command has installed `signals.interrupt`, and reports the signal itself.
            self.is_in_notebook = signals.interrupt not in self._previous_handlers.values()
        if signals.received:
            # An exception that a signal raised in the middle of an import may be lost.
            self.request_stop(signals.first_signal_name())

        kinds = ("train", "evaluate", "time", "save")
        self.votes = {kind: Vote(trainer.world_size, group) for kind in kinds}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore_handlers()
        if self.is_in_notebook:
            self._forget_signals()

    def _forget_signals(self) -> None:
        """Forget a signal that has come, so that it does not stop the next fit of a notebook."""
        self.reason = ""
        self.stops_after_epoch = False
        signals.received.clear()

    def _restore_handlers(self) -> None:
        signals.restore_handlers(self._previous_handlers)
        self._previous_handlers = {}

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self.is_in_notebook:
            self._restore_handlers()
            self._forget_signals()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if not ends_step(trainer):
            return
        if ends_epoch(trainer) and not is_validation_epoch(trainer):
            # Checkpoints saves the end of the epoch, after all callbacks have had their turn.
            self.stops_after_epoch = self._vote_on_stop(trainer, "train")
            if self.stops_after_epoch:
                for checkpoints in checkpoints_of(trainer):
                    checkpoints.stop_after_epoch()
            return
        if self._vote_on_stop(trainer, "train"):
            call_after_module_hook(pl_module, lambda: self._stop(trainer, "train"))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.stops_after_epoch:
            self._stop(trainer, "train")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and any(map(exchanges_weights, trainer.callbacks)):
            # A checkpoint would hold the average in place of the weights. The next step stops.
            self.batches_with_vote = 0
        elif trainer.world_size > 1:
            # A vote waits for all ranks, and a rank with a shorter loader would miss the last ones.
            group = self.votes["evaluate"].group
            self.batches_with_vote = min(gather_objects(fewest_batches(trainer), group))
        else:
            self.batches_with_vote = math.inf

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
        """Return whether any rank was asked to stop. All ranks call this and get one answer."""
        if trainer.state.fn == "fit" and steps_are_over(trainer):
            # A resume would not validate the last step. The run stops in the test that follows.
            return False
        return self.votes[kind](bool(self.reason))

    def _stop(self, trainer: pl.Trainer, kind: str) -> None:
        """Save a checkpoint if the run trains, and end it by Interrupted."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            save_last(trainer)
        stop = Interrupted(self.reason or "another rank was asked to stop")
        requests = gather_objects((trainer.node_rank, bool(self.reason)), self.votes[kind].group)
        stop.is_agreed = True
        stop.is_of_other_nodes = (trainer.node_rank, True) not in requests
        raise stop


def exchanges_weights(callback: pl.Callback) -> bool:
    """Return whether a callback of Lightning's replaces the weights by an average in validations.

    Lockstep's own one puts both at their places in a checkpoint.
    """
    return isinstance(callback, WeightAveraging) and not hasattr(callback, "is_exchanged")


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
    """Save this step as last, and wait until the checkpoint is complete: exit code 75 means it."""
    for checkpoints in checkpoints_of(trainer):
        if checkpoints.saved_step != trainer.global_step:
            checkpoints.save(trainer, "last")
        checkpoints.finish_together(trainer)


def checkpoints_of(trainer: pl.Trainer) -> list[Checkpoints]:
    """Return the callbacks that save checkpoints."""
    return [callback for callback in trainer.callbacks if isinstance(callback, Checkpoints)]


class MaxTime(pl.Callback):
    """End training after the step in which its time is over. Validation and test follow.

    Args:
        seconds: the limit for all starts of the run together.
        elapsed: a function that returns the seconds of training so far on rank 0, and 0 on others.
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
        # The epoch is validated even if check_val_every_n_epoch leaves it out.
        trainer.check_val_every_n_epoch = 1
        if trainer.is_global_zero:
            log.info(
                f"trainer.max_time: the limit of {format_duration(self.seconds)} is reached at "
                f"step {trainer.global_step}, in epoch {epoch_text(trainer)}: training ends."
            )

    def record_fields(self) -> dict[str, object]:
        if not self.has_reached_max_time:
            return {}
        return {"ended_by": "max_time"}
