"""Nobody hangs in silence: each rank shows a heartbeat over its own connection, and ends when another has failed.

A thread talks to the run's store beside the collectives, so it works where a collective never returns. The first
rank that fails publishes its error before it ends; where one dies without a word, its missing heartbeat names it.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from callbacks.interruption import Interruption
from errors import EXIT_FAILED, Diverged, Interrupted, UserError
from run_files import RunFolder, write_atomically

BEAT_INTERVAL_S = 1.0
SILENT_AFTER_S = 5.0  # a rank whose heart has not beaten for so long when another fails is the one to blame
GRACE_S = 10.0  # for this rank to end by itself after another has failed
ERROR, STOP = "lockstep/error", "lockstep/stop"


class Watch(Callback):
    """
    Args:
        run_folder: where stacks and the error go when this rank has to be ended.
        timeout_s: a rank not heard of for so long ends the run.
    """

    def __init__(self, run_folder: str | Path, timeout_s: float = 300.0) -> None:
        self.folder, self.timeout_s = RunFolder(Path(run_folder)), timeout_s
        self.phase = "start"
        self.store: Any = None
        self.ended = threading.Event()

    # Life

    def begin(self, store: Any, rank: int, world_size: int, interruption: Interruption | None) -> None:
        """Start the thread; `store` is a connection of its own."""
        self.store, self.rank, self.world_size, self.interruption = store, rank, world_size, interruption
        self.heard: dict[int, tuple[str, float]] = {}
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.ended.set()

    def _watch(self) -> None:
        lost_since = None
        while not self.ended.wait(BEAT_INTERVAL_S):
            try:
                self._beat()
                lost_since = None
                if self.store.check([ERROR]):
                    return self._leave(json.loads(self.store.get(ERROR)))
                if self.interruption is not None and self.store.check([STOP]):
                    self.interruption.ask("another rank was asked to stop")
                if self.rank == 0:
                    self._look_for_silence()
            except (RuntimeError, dist.DistError) as error:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > SILENT_AFTER_S:
                    return self._leave(self._facts(0, f"its store cannot be reached ({_first_line(error)})"))

    def _beat(self) -> None:
        self.store.set(f"lockstep/beat/{self.rank}", json.dumps([time.time(), socket.gethostname(), self.phase]))

    def _beats(self) -> dict[int, list[Any]]:
        """The latest heartbeat of each rank that has shown one."""
        keys = [f"lockstep/beat/{rank}" for rank in range(self.world_size)]
        return {rank: json.loads(self.store.get(key)) for rank, key in enumerate(keys) if self.store.check([key])}

    def _silent(self, beats: dict[int, list[Any]]) -> list[tuple[float, int]]:
        """(seconds, rank) of each rank, by this host's clock: how long its heartbeat has not changed."""
        now = time.monotonic()
        for rank, (stamp, *_) in beats.items():
            if rank not in self.heard or self.heard[rank][0] != stamp:
                self.heard[rank] = (stamp, now)
        return sorted(((now - at, rank) for rank, (_, at) in self.heard.items()), reverse=True)

    def _look_for_silence(self) -> None:
        beats = self._beats()
        seconds, rank = self._silent(beats)[0]
        if seconds > self.timeout_s:
            message = f"not heard of for {seconds:.0f} s: stopped, or its network cut"
            self._publish({"rank": rank, "host": beats[rank][1], "phase": beats[rank][2], "message": message,
                           "kind": "silence", "time": time.time()})  # fmt: skip

    # Failure

    def _facts(self, rank: int, message: str, kind: str = "lost") -> dict[str, Any]:
        host, phase = (socket.gethostname(), self.phase) if rank == self.rank else ("its host", self.phase)
        return {"rank": rank, "host": host, "phase": phase, "message": message, "kind": kind, "time": time.time()}

    def _publish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The first error of the run wins; returns that one."""
        return json.loads(self.store.compare_set(ERROR, "", json.dumps(facts)))

    def _leave(self, facts: dict[str, Any]) -> None:
        """Another rank has failed: wait a little, then end this process, whatever it hangs in."""
        if self.ended.wait(GRACE_S):
            return
        with self.folder.stack(self.rank).open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
        write_atomically(self.folder.rank_error(self.rank), lambda file: file.write(json.dumps(facts)))
        os._exit(EXIT_FAILED)

    def explain(self, exception: BaseException) -> dict[str, Any] | None:
        """Who is to blame for an exception on this rank: itself, or the one whose death it noticed."""
        if self.store is None:
            return None
        own = self._facts(self.rank, str(exception) or type(exception).__name__, type(exception).__name__)
        try:
            if isinstance(exception, Interrupted):
                self.store.set(STOP, "1")
                return None
            if not _is_of_the_network(exception):
                return self._publish(own)
            return self._publish(self._look_for_the_dead() or own)
        except (RuntimeError, dist.DistError):
            return self._facts(0, "its store is gone: rank 0 or its host died") if self.rank else own

    def _look_for_the_dead(self) -> dict[str, Any] | None:
        """A collective broke: whose heart has stopped, or who has said so already?"""
        deadline = time.monotonic() + SILENT_AFTER_S + 3 * BEAT_INTERVAL_S
        while time.monotonic() < deadline:
            if self.store.check([ERROR]):
                return json.loads(self.store.get(ERROR))
            beats = self._beats()
            for seconds, rank in self._silent(beats):
                if rank != self.rank and seconds > SILENT_AFTER_S:
                    return {"rank": rank, "host": beats[rank][1], "phase": beats[rank][2],
                            "message": "died or was cut off without a word", "kind": "lost", "time": time.time()}  # fmt: skip
            time.sleep(0.2)
        return None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        facts = self.explain(exception)
        if facts is not None:
            exception.culprit = facts  # who writes the record reads it

    # Where the run is

    def on_train_start(self, *_: Any) -> None:
        self.phase = "training"

    on_validation_end = on_train_start

    def on_validation_start(self, *_: Any) -> None:
        self.phase = "validation"

    def on_test_start(self, *_: Any) -> None:
        self.phase = "test"


def _is_of_the_network(exception: BaseException) -> bool:
    """A collective that broke because of somebody else, by the words of gloo, NCCL and the store."""
    if isinstance(exception, UserError | Diverged):
        return False
    words = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "gloo", "nccl", "socket")
    return any(word in str(exception).lower() for word in words)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def own_connection(host: str, port: int, timeout_s: float) -> Any:
    """A second connection to the run's store, for the watching thread alone."""
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
