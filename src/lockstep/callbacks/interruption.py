"""Replaces how Lightning handles signals: `_signal_connector`, `_broadcast_sigterm_tensor`, `_checkpoint_connector`.

They save in mid-step, broadcast inside a signal handler or requeue, and have no public switch. Here a signal only sets
a flag; the ranks agree on it, save one checkpoint together, and stop.
"""

import signal
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.resume_point import ends_step
from lockstep.runs import signals
from lockstep.runs.errors import Interrupted

VOTE_INTERVAL_S = 1.0
MOST_STEPS = 100  # between two votes: quick steps may be followed by slow ones


def silence_lightning(trainer: pl.Trainer) -> None:
    """Take Lightning's handlers, per-step broadcast and hpc checkpoints out of this trainer.

    tests/lockstep/callbacks/test_interruption.py fails if a release renames them.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    connector.register_signal_handlers = loop._broadcast_sigterm_tensor = lambda: None
    trainer._checkpoint_connector.__class__ = _NoHpcCheckpoints


class _NoHpcCheckpoints(_CheckpointConnector):
    """Never resumes from a checkpoint that the user did not name."""

    @property
    def _hpc_resume_path(self) -> None:
        return None


class Vote:
    """Agree on a flag between ranks, with one small collective about once a second and none in other steps.

    Each vote also decides how many steps later the next one comes: as many as the slowest rank makes in a second.
    """

    def __init__(self, world_size: int, group: Any = None, clock: Any = time.monotonic) -> None:
        self.world_size, self.group, self.clock = world_size, group, clock
        self.next_at, self.count, self.voted_at, self.last_count = 1, 0, clock(), 0

    def __call__(self, flag: bool) -> bool:
        """Call once per step on every rank: True on all of them at the same step."""
        self.count += 1
        if self.world_size == 1:
            return flag
        if self.count < self.next_at:
            return False
        elapsed = max(self.clock() - self.voted_at, 1e-4)
        steps = max(1, min(MOST_STEPS, int(VOTE_INTERVAL_S * (self.count - self.last_count) / elapsed)))
        ballot = torch.tensor([int(flag), -steps])
        torch.distributed.all_reduce(ballot, op=torch.distributed.ReduceOp.MAX, group=self.group)
        stop, wish = ballot.tolist()
        self.voted_at, self.last_count = self.clock(), self.count
        self.next_at = self.count - wish
        return bool(stop)


class Interruption(Callback):
    """On a signal finish this step, save, and raise Interrupted on all ranks (exit code 75).

    Args:
        timeout_s: of a vote, as of every collective.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self.reason: str | None = None
        self._previous: dict[int, Any] = {}

    def ask(self, reason: str) -> None:
        """Stop at the next step boundary; safe to call from a signal handler or another thread."""
        self.reason = self.reason or reason

    def _on_signal(self, number: int, _frame: Any) -> None:
        signals.note(number)
        self.ask(signal.Signals(number).name)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not self._previous:
            self._previous = signals.on_stop(self._on_signal)
            if signals.asked:  # before, in the middle of an import that went on
                self.ask(signal.Signals(signals.asked[0]).name)
        group = None
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            group = torch.distributed.new_group(  # of its own, so that a vote never waits for a GPU
                backend="gloo", timeout=timedelta(seconds=self.timeout_s)
            )
        self.votes = {stage: Vote(trainer.world_size, group) for stage in ("train", "evaluate")}

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if ends_step(trainer):
            self._vote(trainer, "train")

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._vote(trainer, "evaluate")

    on_test_batch_end = on_validation_batch_end

    def _vote(self, trainer: pl.Trainer, kind: str) -> None:
        """Stop if any rank was asked to; after the last step only in the test, as a resume would not validate it."""
        if trainer.state.fn == "fit" and trainer.global_step == trainer.max_steps:
            return
        if self.votes[kind](self.reason is not None):
            self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        training = trainer.state.fn == "fit" and not trainer.sanity_checking
        for callback in trainer.callbacks:
            if training and isinstance(callback, Checkpoints):
                if callback.saved_step != trainer.global_step:
                    callback.save_last(trainer)
                callback.finish_writing()  # exit code 75 promises it
        stop = Interrupted(self.reason or "another rank was asked to stop")
        stop.agreed = True
        stop.elsewhere = not self._asked_here(trainer)
        raise stop

    def _asked_here(self, trainer: pl.Trainer) -> bool:
        """Whether any rank of this node was: of several, one alone may see a notice or a signal."""
        if trainer.num_nodes == 1:
            return True
        asked = torch.zeros(trainer.num_nodes, dtype=torch.int64)
        asked[trainer.node_rank] = int(self.reason is not None)
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX, group=self.votes["train"].group)
        return bool(asked[trainer.node_rank])
