"""Uploads a run in the background: checkpoints from the outbox, then its small files; training never waits for it.

One thread, at most one waiting item of each kind: a newer best replaces the one that waits. After a failure
everything waits a growing while, and it says when it tries next. `flush` at the end waits for what is left.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from lockstep.runs.folder import RunFolder
from lockstep.storage.background import lower_priority
from lockstep.storage.checkpoint_files import Sidecar
from lockstep.storage.object_store import StoredObject, StoreError
from lockstep.storage.outbox import Item, Outbox
from lockstep.storage.run_bucket import RunBucket, Superseded
from lockstep.storage.sender import Sender

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (1, 2, 4, 8, 15, 30, 60)
RETRY_DELAY_AT_END_S = 10.0
ORDER = {"best": 0, "last": 1, "files": 2}


@dataclass(frozen=True)
class UploadStatus:
    """Of the best checkpoint: where it is in the bucket, and what is still to be sent.

    uri, sha256, step: of the newest best that is there; None where none is.
    seconds: that its upload took; None where an earlier process did it.
    error: why the newest best is not there; None where it is, or there is none.
    left: which kinds still wait, e.g. ["best", "last"].
    """

    uri: str | None = None
    sha256: str | None = None
    seconds: float | None = None
    step: int | None = None
    error: str | None = None
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Sent:
    uri: str | None
    sha256: str | None
    step: int
    seconds: float | None = None
    at: float = 0.0


class Uploader:
    """
    Args:
        run: the run's place in the bucket; prepared by the thread where the caller has not.
        rank: every rank uploads its own files of a sharded checkpoint; rank 0 moves the pointers.
        last_interval_s: at least so long between two uploads of `last`.
        files_interval_s: between two looks at record, metrics and TensorBoard files.
    """

    def __init__(
        self,
        run: RunBucket,
        folder: RunFolder,
        *,
        rank: int = 0,
        last_interval_s: float = 600.0,
        files_interval_s: float = 60.0,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.rank, self.clock = run, rank, clock
        self.last_interval_s, self.files_interval_s = last_interval_s, files_interval_s
        self.retry_delays_s = retry_delays_s
        self.outbox = Outbox(folder.path / "upload", rank)
        self.sender = Sender(run, folder, self.outbox, rank)
        self._wake = threading.Condition()
        self._waiting: dict[str, Item] = {}
        self._current: Item | None = None
        self._failures, self._retry_at, self._started_at = 0, 0.0, clock()
        self._flushing = self._cancelled = self._stopped = self._urgent = False
        self._sent: dict[str, _Sent] = {}
        self._errors: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        for item in self.outbox.left():
            self._waiting[item.kind] = item
            self._errors[item.kind] = "not uploaded yet"

    def start(self) -> None:
        """Begin, with what an earlier process of this run left in the outbox."""
        if self.rank == 0:
            self._waiting["files"] = Item("files")
        self._thread = threading.Thread(target=self._work, name="s3-upload", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def offer(self, kind: str, path: Path, sidecar: Sidecar) -> None:
        """Take a complete checkpoint for upload; costs a hard link, and the caller may delete its own name for it.

        Args:
            kind: best, or last, which goes at most every `last_interval_s` until `hurry`.
            sidecar: on another rank than 0, of a sharded checkpoint, the step alone.
        """
        with self._wake:
            if self._stopped:
                return
            if replaced := self._waiting.pop(kind, None):
                self.outbox.drop(replaced)
            if kind == "last" and self._is_best(sidecar):
                return
            self._errors.setdefault(kind, "not uploaded yet")
            try:
                item = self.outbox.add(kind, path, sidecar, self.run.generation)
            except OSError as error:
                self._errors[kind] = f"{path.name} cannot be read ({error.strerror})"
                log.info(f"s3: {self._errors[kind]}; training goes on without this upload.")
                return
            if item.entry is None:
                log.info("s3: the disk is full; uploading the checkpoint from where it lies.")
            item.urgent = kind == "last" and self._urgent
            if kind == "last" and not item.urgent and not self._flushing:
                sent_at = self._sent["last"].at if "last" in self._sent else self._started_at
                item.not_before = sent_at + self.last_interval_s
            self._waiting[kind] = item
            self._wake.notify_all()

    def _is_best(self, sidecar: Sidecar) -> bool:
        """The last is often a second name for the best, and once is enough; who holds shards alone cannot tell."""
        if not sidecar.sha256:
            return False
        waiting = [item for item in (self._waiting.get("best"), self._current) if item and item.kind == "best"]
        known = [item.sidecar.sha256 for item in waiting]
        best = self._best_sent()
        return sidecar.sha256 in known or (best is not None and best.sha256 == sidecar.sha256)

    def _best_sent(self) -> _Sent | None:
        before = self.sender.best_before
        found = _Sent(self._uri(before.key), before.sha256, before.step) if before else None
        return self._sent.get("best", found)

    def _uri(self, key: str) -> str:
        return self.run.store.root + key

    def hurry(self) -> None:
        """From now on `last` is sent at once and before anything else: this machine is about to go."""
        with self._wake:
            self._urgent, self._retry_at = True, 0.0
            if "last" in self._waiting:
                self._waiting["last"].urgent, self._waiting["last"].not_before = True, 0.0
            self._wake.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Send all that waits, `last` and changed files too; False where something is left after `timeout_s`."""
        deadline = self.clock() + timeout_s
        with self._wake:
            if self._stopped or self._thread is None:
                return not self._errors
            self._flushing, self._retry_at = True, 0.0
            if self.rank == 0:
                self._waiting["files"] = Item("files")
            for item in self._waiting.values():
                item.not_before = 0.0
            self._wake.notify_all()
            while (self._waiting or self._current) and not self._stopped and self.clock() < deadline:
                self._wake.wait(min(1.0, max(0.0, deadline - self.clock())))
            self._flushing = False
            done = not (self._waiting or self._current or self._stopped)
            if self.rank == 0:
                self._waiting.setdefault("files", Item("files", not_before=self.clock() + self.files_interval_s))
            return done

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; what is on its way is broken off and stays in the outbox."""
        with self._wake:
            self._cancelled = self._stopped = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def status(self) -> UploadStatus:
        with self._wake:
            waiting = {item.kind for item in [*self._waiting.values(), self._current] if item and item.kind != "files"}
            error, left = self._errors.get("best"), tuple(sorted(waiting))
            if best := self._best_sent():
                return UploadStatus(best.uri, best.sha256, best.seconds, best.step, error, left)
            return UploadStatus(error=error, left=left)

    # The thread

    def _work(self) -> None:
        lower_priority()
        while (item := self._take()) is not None:
            started = self.clock()
            try:
                stored = self._send(item)
            except StoreError as error:
                self._failed(item, self._after_sweep(error))
            except Exception as error:  # a mistake of ours must not end the uploads of this run
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}"
                self._failed(item, StoreError("busy", f"the uploader failed ({place})"))
            else:
                self._done(item, stored, self.clock() - started)

    def _take(self) -> Item | None:
        """The most important item that is due; waits for it. None: stop."""
        with self._wake:
            while not self._stopped:
                now = self.clock()
                due = [item for item in self._waiting.values() if max(item.not_before, self._retry_at) <= now]
                if due:
                    self._current = min(due, key=lambda item: (not item.urgent, ORDER[item.kind]))
                    return self._waiting.pop(self._current.kind)
                times = [max(item.not_before, self._retry_at) for item in self._waiting.values()]
                self._wake.wait(min(times, default=now + 60.0) - now)
            return None

    def _send(self, item: Item) -> StoredObject | None:
        return self.sender.send(item, lambda: self._cancelled)

    def _after_sweep(self, error: StoreError) -> StoreError:
        """An unfinished upload that vanished was swept by a newer start of this run; say so where it is true."""
        if error.kind != "aborted" or self._cancelled:
            return error
        try:
            self.run.check_current()
        except StoreError as other:
            return other
        return error

    def _done(self, item: Item, stored: StoredObject | None, seconds: float) -> None:
        self.outbox.drop(item)
        with self._wake:
            self._failures, self._current = 0, None
            if item.kind == "files":
                if not self._flushing:
                    self._waiting.setdefault("files", Item("files", not_before=self.clock() + self.files_interval_s))
            else:
                uri, sha256 = (self._uri(stored.key), stored.sha256) if stored else (None, None)
                self._sent[item.kind] = _Sent(uri, sha256, item.step, round(seconds, 3), self.clock())
                if item.kind not in self._waiting:
                    self._errors.pop(item.kind, None)
            self._wake.notify_all()

    def _failed(self, item: Item, error: StoreError) -> None:
        what = "the run's files" if item.kind == "files" else f"{item.kind} checkpoint of step {item.step}"
        if isinstance(error, Superseded):
            self._give_up(str(error))
        elif error.kind == "local" and item.kind != "files":
            self.outbox.drop(item)
            self._errors[item.kind] = str(error)
            log.info(f"s3: {what} cannot be uploaded: {error}.")
        elif not self._cancelled:
            delay_s = self.retry_delays_s[min(self._failures, len(self.retry_delays_s) - 1)]
            delay_s = min(delay_s, RETRY_DELAY_AT_END_S) if self._flushing else delay_s
            self._failures += 1
            self._errors[item.kind] = str(error)
            at = datetime.now() + timedelta(seconds=delay_s)
            log.info(f"s3: {what} not uploaded: {error}; next try in {delay_s:g} s, at {at:%H:%M:%S}.")
            self._retry_at = self.clock() + delay_s
            self._put_back(item)
        with self._wake:
            self._current = None
            self._wake.notify_all()

    def _put_back(self, item: Item, delay_s: float = 0.0) -> None:
        """Unless a newer one of its kind has come meanwhile."""
        with self._wake:
            self._current = None
            if item.kind in self._waiting:
                self.outbox.drop(item)
            else:
                item.not_before = self.clock() + delay_s
                self._waiting[item.kind] = item
            self._wake.notify_all()

    def _give_up(self, error: str) -> None:
        """For good: a newer start of this run has taken over, and nothing of ours is wanted any more."""
        log.info(f"s3: {error}; this process uploads nothing more.")
        with self._wake:
            for item in [*self._waiting.values(), self._current]:
                if item is not None:
                    self.outbox.drop(item)
                    if item.kind != "files":
                        self._errors[item.kind] = error
            self._waiting.clear()
            self._stopped = True
