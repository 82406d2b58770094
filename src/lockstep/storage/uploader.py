"""Upload a run in the background: its best checkpoint, its last one, its small files. Training never waits for it.

One thread has one slot per kind, in which a newer checkpoint replaces the one that waits. A checkpoint waits under a
second name in `<run folder>/upload/`, so that training may delete its own. After a failure everything waits, longer
each time, and is tried again. Imports no torch.
"""

import logging
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from lockstep.runs.folder import RunFolder
from lockstep.runs.record import Upload
from lockstep.storage.checkpoint_files import Sidecar, complete, link, read_sidecar, remove
from lockstep.storage.errors import S3Error
from lockstep.storage.pointer import KINDS, Pointer, Superseded, move, read_pointer, take_over
from lockstep.storage.s3 import Bucket, Progress

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (1, 2, 4, 8, 15, 30, 60)
RETRY_DELAY_AT_END_S = 5.0
LAST_INTERVAL_S = 600.0
FILES_INTERVAL_S = 60.0
ORDER = {"best": 0, "last": 1, "files": 2}
SUFFIXES = (".yaml", ".json", ".csv", ".md", ".svg", ".png", ".txt", ".diff", ".log")


class _Stopped(Exception):
    """The upload is broken off; the checkpoint stays in the folder."""


@dataclass
class _Slot:
    """What waits: a checkpoint under its second name, or the small files (path is None).

    Args:
        not_before: time.monotonic().
        adopted: an earlier process left it, and it must not replace a later step in the bucket.
    """

    kind: str
    path: Path | None = None
    sidecar: Sidecar | None = None
    not_before: float = 0.0
    adopted: bool = False

    @property
    def key(self) -> str:
        assert self.sidecar is not None
        return f"checkpoints/{self.kind}-step{self.sidecar.step:08d}-{self.sidecar.sha256[:8]}.ckpt"

    def __str__(self) -> str:
        return "the run's files" if self.sidecar is None else f"{self.kind} checkpoint of step {self.sidecar.step}"


class Uploader:
    """
    Args:
        run: the run's own place in the bucket.
        start: the time at which the run was started, by which an older process knows that it is superseded.
        last_interval_s: at least so long between two uploads of `last`.
        files_interval_s: between two looks at record, metrics and TensorBoard files.
        takes_over: this is a new start of the run; false to send what a start has left.
    """

    def __init__(
        self,
        run: Bucket,
        folder: RunFolder,
        start: float,
        last_interval_s: float = LAST_INTERVAL_S,
        files_interval_s: float = FILES_INTERVAL_S,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        takes_over: bool = True,
    ) -> None:
        self.run, self.folder, self.start_time = run, folder, start
        self.last_interval_s, self.files_interval_s = last_interval_s, files_interval_s
        self.retry_delays_s, self.takes_over = retry_delays_s, takes_over
        self.outbox = folder.path / "upload"
        self.record = Upload()
        self.errors: dict[str, str] = {}  # why a kind is not in the bucket
        self._slots: dict[str, _Slot] = {}
        self._current: _Slot | None = None
        self._sent_files: dict[str, tuple[int, int]] = {}
        self._wake, self._thread = threading.Condition(), threading.Thread(target=self._work, name="s3", daemon=True)
        self._failures, self._retry_at, self._last_sent_at = 0, 0.0, time.monotonic()
        self._began = self._flushing = self._stopped = self._urgent = False
        self._progress: Progress | None = None
        for kind in KINDS:
            for path, sidecar in list(complete(self.outbox, kind)):
                if kind in self._slots:
                    remove(path)
                else:
                    self._slots[kind] = _Slot(kind, path, sidecar, adopted=True)
                    self.errors[kind] = "not uploaded yet"

    def start(self) -> None:
        self._slots["files"] = _Slot("files")
        self._thread.start()

    def offer(self, path: Path, kind: str, adopted: bool = False) -> None:
        """Take a complete checkpoint for upload; the caller may delete its own name for it afterwards.

        Args:
            kind: best; or last, which goes at most every `last_interval_s` until `hurry` or `flush`.
        """
        with self._wake:
            if self._stopped:
                return
            if (waiting := self._slots.pop(kind, None)) and waiting.path:
                remove(waiting.path)
            sidecar = read_sidecar(path)
            if sidecar is None or (kind == "last" and self._is_best(sidecar.sha256)):
                return
            second = self.outbox / path.name
            if second.exists():  # the thread may be sending it
                second = second.with_name(path.name.replace("-step", "-before-step"))
            try:
                self.outbox.mkdir(parents=True, exist_ok=True)
                link(path, second)
            except OSError as error:
                self.errors[kind] = f"{path.name} cannot be kept for the upload ({error.strerror})"
                log.info(f"s3: {self.errors[kind]}; training goes on without this upload.")
                return
            self.errors[kind] = "not uploaded yet"
            waits = kind == "last" and not (self._urgent or self._flushing)
            not_before = self._last_sent_at + self.last_interval_s if waits else 0.0
            self._slots[kind] = _Slot(kind, second, sidecar, not_before, adopted)
            self._wake.notify_all()

    def _is_best(self, sha256: str) -> bool:
        """The last checkpoint is often a second name for the best, which is uploaded once."""
        slots = (self._slots.get("best"), self._current)
        waiting = [slot.sidecar.sha256 for slot in slots if slot and slot.kind == "best" and slot.sidecar]
        return sha256 in (*waiting, self.record.sha256)

    def hurry(self) -> None:
        """Send `last` at once and first from now on, because this machine is about to go."""
        with self._wake:
            self._urgent, self._retry_at = True, 0.0
            for slot in self._slots.values():
                slot.not_before = 0.0
            self._wake.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Send all that waits, and log the progress; return False if something is left after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            if self._stopped or not self._thread.is_alive():
                return not self.errors
            self._flushing, self._retry_at = True, 0.0
            self._slots["files"] = _Slot("files")
            for slot in self._slots.values():
                slot.not_before = 0.0
            self._wake.notify_all()
            if self._progress:
                log.info(f"s3: {self._progress.line()}")
            while (self._slots or self._current) and not self._stopped and time.monotonic() < deadline:
                self._wake.wait(min(1.0, max(0.0, deadline - time.monotonic())))
            self._flushing = False
            return not (self._slots or self._current or self._stopped)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; what is being sent is broken off and stays in the folder."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def status(self) -> Upload:
        """Return what is known of the best checkpoint in the bucket, and which kinds still wait."""
        with self._wake:
            waiting = {slot.kind for slot in (*self._slots.values(), self._current) if slot}
            known = {**vars(self.record), "error": self.errors.get("best"), "left": sorted(waiting - {"files"})}
            return Upload(**known)

    # --- the thread

    def _work(self) -> None:
        while (slot := self._next()) is not None:
            started = time.monotonic()
            try:
                self._send(slot)
            except Superseded as error:
                self._give_up(str(error))
            except _Stopped:
                pass
            except S3Error as error:
                self._failed(slot, str(error))
            except Exception as error:  # a mistake in this code must not end the uploads of the run
                where = traceback.extract_tb(error.__traceback__)[-1]
                self._failed(slot, f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}")
            else:
                self._done(slot, round(time.monotonic() - started, 3))
            with self._wake:
                self._current = self._progress = None
                self._wake.notify_all()

    def _next(self) -> _Slot | None:
        """Wait for the most important slot that is due; return None to stop."""
        with self._wake:
            while not self._stopped:
                now = time.monotonic()
                times = {kind: max(slot.not_before, self._retry_at) for kind, slot in self._slots.items()}
                due = [kind for kind, when in times.items() if when <= now]
                if due:
                    kind = min(due, key=lambda kind: (not (self._urgent and kind == "last"), ORDER[kind]))
                    self._current = self._slots.pop(kind)
                    return self._current
                self._wake.wait(min(times.values(), default=now + 60.0) - now)
            return None

    def _send(self, slot: _Slot) -> None:
        if not self._began and self.takes_over:
            self.start_time = take_over(self.run, self.start_time)
            best = read_pointer(self.run, "best")[0]
            if best:  # of an earlier start
                self.record = Upload(uri=self.run.address(best.key), sha256=best.sha256, step=best.step)
            named = {pointer.key for kind in KINDS if (pointer := read_pointer(self.run, kind)[0])}
            for key in [key for key, _, _ in self.run.list("checkpoints/") if key not in named]:
                self._delete(key)  # an earlier start was killed before its pointer named it
            self._abort_unfinished()
        self._began = True
        if slot.path is None or slot.sidecar is None:
            return self.send_files()
        known = slot.sidecar
        pointer = Pointer(slot.key, known.bytes, known.sha256, known.step, known.epoch, known.metric,
                          self.folder.run_id, self.start_time)  # fmt: skip
        self._progress = Progress(f"uploading {slot}", known.bytes)
        self.run.upload(pointer.key, slot.path, known.sha256, self._count)
        before = move(self.run, slot.kind, pointer, only_forward=slot.adopted)
        if before and before.key != pointer.key:
            self._delete(before.key)
        if not self.takes_over:
            self._abort_unfinished()

    def _count(self, num_bytes: int) -> None:
        if self._stopped:
            raise _Stopped
        if self._progress:
            self._progress(num_bytes)

    def _abort_unfinished(self) -> None:
        try:
            self.run.abort_unfinished()
        except S3Error as error:
            log.debug(f"s3: {error}")  # a rule of the bucket may do it instead

    def _delete(self, key: str) -> None:
        try:
            self.run.delete(key)
        except S3Error as error:
            log.info(f"s3: {self.run.address(key)} could not be deleted: {error}.")

    def send_files(self) -> None:
        """Send those small files of the run folder that changed since they were last sent."""
        for relative, path in small_files(self.folder):
            try:
                facts = path.stat()
                state = (facts.st_mtime_ns, facts.st_size)
                if self._sent_files.get(relative) != state and facts.st_size:
                    self.run.upload(relative, path, progress=self._count)
            except FileNotFoundError:
                continue
            self._sent_files[relative] = state

    def _done(self, slot: _Slot, seconds: float) -> None:
        with self._wake:
            self._failures = 0
            if slot.path is None or slot.sidecar is None:
                self.errors.pop("files", None)
                if not self._flushing:
                    self._slots.setdefault("files", _Slot("files", not_before=time.monotonic() + self.files_interval_s))
                return
            remove(slot.path)
            if slot.kind == "best":
                known = slot.sidecar
                self.record = Upload(
                    uri=self.run.address(slot.key), sha256=known.sha256, seconds=seconds, step=known.step
                )
            else:
                self._last_sent_at = time.monotonic()
            if slot.kind not in self._slots:
                self.errors.pop(slot.kind, None)

    def _failed(self, slot: _Slot, error: str) -> None:
        with self._wake:
            if self._stopped:
                return
            delay_s = self.retry_delays_s[min(self._failures, len(self.retry_delays_s) - 1)]
            delay_s = min(delay_s, RETRY_DELAY_AT_END_S) if self._flushing else delay_s
            self._failures += 1
            self._retry_at = time.monotonic() + delay_s
            self.errors.update(dict.fromkeys([slot.kind, *self._slots], error))
            if slot.kind in self._slots and slot.path:  # a newer one has come meanwhile
                remove(slot.path)
            self._slots.setdefault(slot.kind, slot)
        at = datetime.now() + timedelta(seconds=delay_s)
        log.info(f"s3: {slot} not uploaded: {error}; next try in {delay_s:g} s, at {at:%H:%M:%S}.")
        self.run.forget_client()  # the next one reads credentials that may have been renewed

    def _give_up(self, error: str) -> None:
        log.info(f"s3: {error}; this process uploads nothing more.")
        with self._wake:
            for slot in (*self._slots.values(), self._current):
                if slot and slot.path:
                    remove(slot.path)
                    self.errors[slot.kind] = error
            self._slots.clear()
            self._stopped = True


def small_files(folder: RunFolder) -> Iterator[tuple[str, Path]]:
    """Yield (name in the bucket, path) of record, config, metrics, pages and TensorBoard files."""
    pointers = [f"{kind}.json" for kind in KINDS]
    for path in sorted([*folder.path.glob("*"), *folder.tensorboard.rglob("*")]):
        below = path.relative_to(folder.path).as_posix()
        wanted = below.startswith("tensorboard/") or (path.suffix in SUFFIXES and below not in pointers)
        if wanted and path.is_file() and not path.is_symlink() and not path.name.startswith("."):
            yield below, path
