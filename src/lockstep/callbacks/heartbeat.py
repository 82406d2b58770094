"""Nobody hangs in silence: each rank shows a heartbeat over its own connection, and ends when another has failed.

A thread talks to the run's store beside the collectives, so it works where a collective never returns. The first
rank that fails publishes its error before it ends; where one dies without a word, its missing heartbeat names it.
A second thread watches the first: an operation on the store of a stopped or unreachable host never returns either.
"""

import contextlib
import faulthandler
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks import flight_recorder
from lockstep.callbacks.beats import Beats, error_of
from lockstep.callbacks.interruption import Interruption
from lockstep.distributed.failures import RankError
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, Diverged, Interrupted, UserError
from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RunFolder

log = logging.getLogger(__name__)

BEAT_INTERVAL_S = 1.0
SILENT_AFTER_S = 5.0  # a rank whose heart has not beaten for so long when another fails is the one to blame
GRACE_S = 6.0  # for this rank to end by itself after another has failed
READ_WITHIN_S = 10.0  # rank 0, which holds the store, stays so long for the others to read its error
SPEAK_INTERVAL_S = 15.0
LEAVE_TOGETHER_S = 90.0  # an interrupted run's other ranks wait so long for rank 0, which may have to upload
ERROR, STOP, LEFT = "error", "stop", "left"


class Watch(Callback):
    """
    Args:
        run_folder: where stacks and the error go when this rank has to be ended.
        timeout_s: a rank not heard of for so long ends the run.
        report: called with the error when this rank has to be ended, in place of whoever catches its exceptions.
        supervisor: the line to the one that started this rank; a beat goes there too, so that a stopped rank is missed.
    """

    def __init__(
        self,
        run_folder: str | Path,
        timeout_s: float = 300.0,
        report: Callable[[RankError | None], Any] | None = None,
        supervisor: socket.socket | None = None,
    ) -> None:
        self.folder, self.timeout_s = RunFolder(Path(run_folder)), timeout_s
        self.report, self.supervisor = report or self._write_error, supervisor
        self.phase, self.batches = "start", 0
        self.store: Any = None
        self.ended, self.leaving = threading.Event(), threading.Lock()
        self.stop_seen_s: float | None = None  # how long ago another rank was asked to stop
        self.rank_zero_host = "its host"
        self.stopping = False  # this rank has left its training by itself
        self.unanswered_s = 0.0  # while this process ran: it may itself have been stopped for hours
        self.explained: BaseException | None = None

    # Life

    def begin(self, store: Any, rank: int, world_size: int, interruption: Interruption | None) -> None:
        """Start the threads; `store` is a connection of its own."""
        self.store, self.rank, self.world_size, self.interruption = store, rank, world_size, interruption
        self.beats = Beats(store, rank, world_size)
        self.beats.show(self.phase, self.batches)
        for name, work in (("watch", self._watch), ("watch-the-watch", self._guard)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def end(self) -> None:
        self.ended.set()

    def wait_for_all(self, what: str) -> None:
        """Until every rank has come here, however long the slowest takes (a node that downloads and decodes first).

        A collective would give up after its timeout; here nobody does while all hearts beat, which rank 0 looks after.

        Raises:
            Interrupted: another rank was asked to stop.
            RuntimeError: another rank has failed or died; `explain` finds out which.
        """
        self.store.set(f"{what}/{self.rank}", "1")
        keys, pause_s = [f"{what}/{rank}" for rank in range(self.world_size)], 0.02
        speak_at = time.monotonic() + SPEAK_INTERVAL_S
        while not self.store.check(keys):
            if self._stopped_elsewhere():
                stop = Interrupted("another rank was asked to stop")
                stop.elsewhere = True
                raise stop
            if self._error() is not None:
                raise RuntimeError("connection closed: another rank has failed")
            if self.rank == 0 and time.monotonic() > speak_at:
                speak_at += SPEAK_INTERVAL_S
                hosts = {beat.host for rank, beat in self.beats.latest().items() if not self.store.check([keys[rank]])}
                log.info(f"Waiting for the images and weights of {', '.join(sorted(hosts))} …")
            time.sleep(pause_s)
            pause_s = min(0.5, 1.3 * pause_s)

    def _watch(self) -> None:
        lost_since = None
        while not self.ended.wait(BEAT_INTERVAL_S):
            try:
                self.beats.show(self.phase, self.batches)
                error = self._error()
                if error is not None:
                    return self._leave(error)
                if self.store.check(["beat/0"]):  # known before its host is gone
                    self.rank_zero_host = self.beats.latest()[0].host
                if self.store.check([STOP]):
                    self._stop()
                if self.rank == 0:
                    self._look_for_silence()
                lost_since, self.unanswered_s = None, 0.0
            except (RuntimeError, dist.DistError) as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > SILENT_AFTER_S:
                    return self._leave(self._facts(0, f"died, or its host: its store is gone ({_first_line(error)})"))
            except (UserError, ValueError, TypeError, LookupError) as error:  # a stranger has written into the store
                return self._leave(self._facts(self.rank, _first_line(error), "UserError"))

    def _guard(self) -> None:
        """Ends this rank where the thread above hangs in an operation on the store."""
        while not self.ended.wait(BEAT_INTERVAL_S):
            self._tell_supervisor()
            self.unanswered_s += BEAT_INTERVAL_S
            if self.unanswered_s > self.timeout_s:
                message = f"not heard of for {self.unanswered_s:.0f} s: stopped, or the network to its host cut"
                return self._leave(self._facts(0, message, "silence"))
            if self.stop_seen_s is not None and not self.stopping:
                self.stop_seen_s += BEAT_INTERVAL_S
                if self.stop_seen_s > GRACE_S:  # it waits in a collective for a rank that has gone
                    return self._leave(None)

    def _tell_supervisor(self) -> None:
        if self.supervisor is not None:
            with contextlib.suppress(OSError):  # it is gone, or stopped and its line full
                self.supervisor.send(self.phase.encode())

    def _look_for_silence(self) -> None:
        """Of a rank, or of all where one of them keeps the others waiting."""
        beats = self.beats.latest()
        seconds, rank = self.beats.silent(beats)[0]
        if seconds > self.timeout_s:
            message = f"not heard of for {seconds:.0f} s: stopped, or the network to its host cut"
            self._publish(error_of(rank, beats[rank], message, "silence"))
        elif (waited_s := self.beats.unmoved_s(beats)) > self.timeout_s and (
            to_blame := self.beats.holds_up(beats, waited_s)
        ):
            self._publish(to_blame)

    def _stop(self) -> None:
        if self.stop_seen_s is None:
            self.stop_seen_s = 0.0
            self.store.set(f"seen/{self.rank}", "1")
        if self.interruption is not None:
            self.interruption.ask("another rank was asked to stop")

    # Failure

    def _facts(self, rank: int, message: str, kind: str = "lost") -> RankError:
        host = socket.gethostname() if rank == self.rank else self.rank_zero_host
        return {"rank": rank, "host": host, "phase": self.phase, "message": message, "kind": kind, "time": time.time()}

    def _publish(self, facts: RankError) -> RankError:
        """The first error of the run wins; returns that one."""
        first = json.loads(self.store.compare_set(ERROR, "", json.dumps(facts)))
        self.store.set(f"seen/{self.rank}", "1")
        return first

    def _error(self) -> RankError | None:
        """What the first rank to fail has published."""
        if not self.store.check([ERROR]):
            return None
        self.store.set(f"seen/{self.rank}", "1")
        return json.loads(self.store.get(ERROR))

    def _leave(self, facts: RankError | None) -> None:
        """Another rank has failed (None: was stopped): wait a little, then end this process, whatever it hangs in."""
        if self.ended.wait(GRACE_S) or not self.leaving.acquire(blocking=False):
            return
        try:
            with self.folder.stack(self.rank).open("a") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
            flight_recorder.dump(self.folder, self.rank)
            self.report(None if self.stop_seen_s is not None else facts)
        finally:
            os._exit(EXIT_FAILED if self.stop_seen_s is None else EXIT_INTERRUPTED)

    def _write_error(self, facts: RankError | None) -> None:
        if facts is not None:
            write_atomically(self.folder.rank_error(self.rank), lambda file: file.write(json.dumps(facts)))

    def explain(self, exception: BaseException) -> BaseException:
        """What this rank's exception means for the run; its `culprit` says which rank is to blame, where and when.

        Returns:
            The same exception, or Interrupted where it is only the echo of another rank's.
        """
        if self.store is None:
            return exception
        self.stopping = self.stopping or isinstance(exception, Interrupted)
        if self.explained is None:
            self.explained = self._explain(exception)
            if not isinstance(self.explained, Interrupted | UserError):
                flight_recorder.dump(self.folder, self.rank)
            self.explained.__cause__ = None if self.explained is exception else exception
        return self.explained

    def _explain(self, exception: BaseException) -> BaseException:
        own = self._facts(self.rank, str(exception) or type(exception).__name__, type(exception).__name__)
        echo = _is_of_the_network(exception)
        lost = self._facts(0, "died or was stopped, or its host or network: its store is gone")
        exception.culprit = lost if echo and self.rank else own
        try:
            if self.unanswered_s > SILENT_AFTER_S:
                return exception
            if echo and self._stopped_elsewhere():
                exception = Interrupted("another rank was asked to stop")
                exception.elsewhere = True
            if isinstance(exception, Interrupted):
                exception.culprit = None
                self.store.set(STOP, "1")
            else:
                exception.culprit = self._publish((self._to_blame(exception) if echo else None) or own)
            self._leave_together(exception)
        except (RuntimeError, dist.DistError, UserError) as error:
            log.info(f"rank {self.rank} cannot tell the others ({_first_line(error)}).")
        return exception

    def _stopped_elsewhere(self) -> bool:
        return self.stop_seen_s is not None or bool(self.store.check([STOP]))

    def _to_blame(self, exception: BaseException) -> RankError | None:
        """For a broken collective: who has died, or after a timeout who lives and did not come."""
        dead = self._look_for_the_dead()
        timed_out = any(words in str(exception).lower() for words in ("timed out", "timeout"))
        return dead or (self.beats.holds_up(self.beats.latest(), self.timeout_s, but=self.rank) if timed_out else None)

    def _look_for_the_dead(self) -> RankError | None:
        """A collective broke: whose heart has stopped, or who has said so already?"""
        deadline = time.monotonic() + SILENT_AFTER_S + 3 * BEAT_INTERVAL_S
        while time.monotonic() < deadline:
            if (error := self._error()) is not None:
                return error
            beats = self.beats.latest()
            for seconds, rank in self.beats.silent(beats):
                if rank != self.rank and seconds > SILENT_AFTER_S:
                    message = f"died, was stopped or cut off without a word {seconds:.0f} s ago"
                    return error_of(rank, beats[rank], message, "lost")
            time.sleep(0.2)
        return None

    def _leave_together(self, exception: BaseException) -> None:
        """Rank 0 holds the store: it stays until the others have read the error; after an interruption they wait
        until it has uploaded, because launchers end a node's ranks soon after the first has gone."""
        if self.rank == 0:
            self.store.set(LEFT, "1")
        elif getattr(exception, "agreed", False):
            self._wait_for([LEFT], LEAVE_TOGETHER_S)
        self.store.set(f"seen/{self.rank}", "1")
        if self.rank == 0:
            culprit = getattr(exception, "culprit", None) or {"rank": 0}  # who perhaps never reads it
            others = [rank for rank in range(self.world_size) if rank != culprit["rank"]]
            self._wait_for([f"seen/{rank}" for rank in others], READ_WITHIN_S)

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As early as can be: others may already wait in a collective for this rank."""
        self.stopping = isinstance(exception, Interrupted)
        if not self.stopping:
            self.explain(exception)

    # Where the run is

    def _moves(self, *_: Any) -> None:
        self.batches += 1

    on_train_batch_start = on_train_batch_end = _moves
    on_validation_batch_start = on_validation_batch_end = on_test_batch_start = on_test_batch_end = _moves

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._tell_supervisor()  # at once: a death without a word is soon

    def on_train_start(self, *_: Any) -> None:
        self._enter("training")

    on_validation_end = on_train_start

    def on_validation_start(self, *_: Any) -> None:
        self._enter("validation")

    def on_test_start(self, *_: Any) -> None:
        self._enter("test")


def _is_of_the_network(exception: BaseException) -> bool:
    """A collective that broke because of somebody else, by the words of gloo, NCCL and the store."""
    if isinstance(exception, UserError | Diverged):
        return False
    if isinstance(exception, dist.DistError):
        return True
    words = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "gloo", "nccl")
    return isinstance(exception, RuntimeError) and any(word in str(exception).lower() for word in words)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
