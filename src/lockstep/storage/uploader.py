"""Upload a run in the background: its best checkpoint, its last one, its small files. Training never waits for it.

One thread has one slot per kind, in which a newer checkpoint replaces the one that waits. A checkpoint waits under a
second name in `<run folder>/upload/`, so that training may delete its own. After a failure everything waits, longer
each time, and is tried again. Imports no torch.
"""

import itertools
import json
import logging
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RunFolder
from lockstep.runs.foreign_files import read_json
from lockstep.runs.record import Upload
from lockstep.storage.checkpoint_files import Sidecar, read_sidecar
from lockstep.storage.errors import S3Error
from lockstep.storage.pointer import KINDS, Pointer, Superseded, move, read_pointer, take_over
from lockstep.storage.s3 import Bucket, Progress

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (1, 2, 4, 8, 15, 30, 60)
RETRY_DELAY_AT_END_S = 5.0
LAST_INTERVAL_S = 600.0
FILES_INTERVAL_S = 60.0
ORDER = ("last", "best", "files")  # what a machine that is about to go has to send first
SUFFIXES = (".yaml", ".json", ".csv", ".md", ".svg", ".png", ".txt", ".diff", ".log")


class _Stopped(Exception):
    pass


@dataclass(frozen=True)
class _Item:
    """A checkpoint under its second name; or the run's small files, whose path is the run folder.

    Args:
        only_forward: an earlier process saved it, and it must not replace a later step in the bucket.
    """

    kind: str
    path: Path
    sidecar: Sidecar | None = None
    only_forward: bool = False

    def __str__(self) -> str:
        return f"the {self.kind} checkpoint of step {self.sidecar.step}" if self.sidecar else "the run's files"

    def drop(self) -> None:
        if self.sidecar:
            self.path.unlink(missing_ok=True)


class Uploader:
    """
    Args:
        run: the run's own place in the bucket.
        start: the time at which the run was started, by which an older process knows that it is superseded.
        last_interval_s: at least so long between two uploads of `last`.
        files_interval_s: between two looks at record, metrics and TensorBoard files.
        takes_over: this is a new start of the run; false to send what an earlier process has left.
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
        self.run, self.folder, self.start_time, self.takes_over = run, folder, start, takes_over
        self.intervals_s = {"last": last_interval_s, "files": files_interval_s}
        self.retry_delays_s, self.outbox, self._numbers = retry_delays_s, folder.path / "upload", itertools.count()
        self.errors: dict[str, str] = {}  # why a kind is not in the bucket
        self._record, self._files = Upload(), _Item("files", folder.path)
        self._waiting: dict[str, _Item] = {"files": self._files}
        self._due = {"last": time.monotonic() + last_interval_s}
        self._sending: _Item | None = None
        self._sent_files: dict[str, tuple[int, int]] = {}
        self._wake, self._thread = threading.Condition(), threading.Thread(target=self._work, name="s3", daemon=True)
        self._failures, self._retry_at, self._progress = 0, 0.0, Progress("", 0)
        self._began = self._flushing = self._stopped = False
        for path in self.outbox.glob("*.ckpt"):  # of a process that was killed; checkpoints/ has what counts
            path.unlink()

    def start(self) -> None:
        self._thread.start()

    def offer(self, path: Path, kind: str, only_forward: bool = False) -> None:
        """Take a complete checkpoint for upload; the caller may delete its own name for it afterwards."""
        with self._wake:
            sidecar = read_sidecar(path)
            if self._stopped or sidecar is None or (kind == "last" and self._is_best(sidecar.sha256)):
                return
            item = _Item(kind, self.outbox / f"{kind}-{next(self._numbers)}.ckpt", sidecar, only_forward)
            self.errors[kind] = "not uploaded yet"
            try:
                self.outbox.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, item.path)
                except OSError:  # a file system without hard links
                    shutil.copyfile(path, item.path)
            except OSError as error:
                item.drop()
                self.errors[kind] = f"{path.name} cannot be kept for the upload ({error.strerror})"
                log.info(f"s3: {self.errors[kind]}; training goes on without this upload.")
                return
            if before := self._waiting.pop(kind, None):
                before.drop()
            self._waiting[kind] = item
            self._wake.notify_all()

    def _is_best(self, sha256: str) -> bool:
        """The last checkpoint is often a second name for the best, which is uploaded once."""
        best = [item.sidecar.sha256 for item in (self._waiting.get("best"), self._sending) if item and item.sidecar]
        return sha256 in (self._record.sha256, *best)

    def hurry(self) -> None:
        """Send every checkpoint at once from now on, because this machine is about to go."""
        with self._wake:
            self.intervals_s["last"] = self._due["last"] = self._retry_at = 0.0
            self._wake.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Send all that waits, and log the progress; return False if something is left after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            if self._stopped or not self._thread.is_alive():
                return not self.errors
            self._flushing, self._retry_at, self._waiting["files"] = True, 0.0, self._files
            self._due.clear()
            self._wake.notify_all()
            if self._sending and self._progress.total:
                log.info(f"s3: {self._progress.line()}")
            while (self._waiting or self._sending) and not self._stopped and time.monotonic() < deadline:
                self._wake.wait(min(1.0, max(0.0, deadline - time.monotonic())))
            self._flushing = False
            self._due = {kind: time.monotonic() + seconds for kind, seconds in self.intervals_s.items()}
            return not (self._waiting or self._sending or self._stopped)

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
            left = {item.kind for item in (*self._waiting.values(), self._sending) if item and item.sidecar}
            return Upload(**{**vars(self._record), "error": self.errors.get("best"), "left": sorted(left)})

    # --- the thread

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._send(item)
            except Superseded as error:
                self._give_up(item, str(error))
            except _Stopped:
                self._put_back(item)
            except S3Error as error:
                self._failed(item, str(error))
            except Exception as error:  # a mistake in this code must not end the uploads of the run
                where = traceback.extract_tb(error.__traceback__)[-1]
                self._failed(item, f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}")
            with self._wake:
                self._sending, self._progress = None, Progress("", 0)
                self._wake.notify_all()

    def _next(self) -> _Item | None:
        """Wait for the most important kind that is due; return None to stop."""
        with self._wake:
            while not self._stopped:
                now = time.monotonic()
                times = {kind: max(self._due.get(kind, 0.0), self._retry_at) for kind in self._waiting}
                if due := [kind for kind in ORDER if times.get(kind, now + 1) <= now]:
                    self._sending = self._waiting.pop(due[0])
                    return self._sending
                self._wake.wait(min(times.values(), default=now + 60.0) - now)
            return None

    def _send(self, item: _Item) -> None:
        if not self._began and self.takes_over:
            self._begin()
        self._began = True
        if item.sidecar:
            self._send_checkpoint(item, item.sidecar)
            item.drop()
        else:
            self._send_files()
        with self._wake:
            self._failures = 0
            if not self._flushing:
                self._due[item.kind] = time.monotonic() + self.intervals_s.get(item.kind, 0.0)
            if item.kind not in self._waiting:
                self.errors.pop(item.kind, None)
            if item == self._files and not self._flushing:
                self._waiting["files"] = item

    def _send_checkpoint(self, item: _Item, known: Sidecar) -> None:
        started, (current, _) = time.monotonic(), read_pointer(self.run, item.kind)
        if current and current.start > self.start_time:
            raise Superseded
        if current and item.only_forward and current.step > known.step:
            return
        key = f"checkpoints/{item.kind}-step{known.step:08d}-{known.sha256[:8]}.ckpt"
        if current and current.sha256 == known.sha256:
            key = current.key
        else:
            self._progress = Progress(f"uploading {item}", known.bytes)
            self.run.upload(key, item.path, known.sha256, self._count)
        wanted = Pointer(key, known.bytes, known.sha256, known.step, known.epoch, known.metric, self.folder.run_id,
                         self.start_time)  # fmt: skip
        before = move(self.run, item.kind, wanted)
        if not self.takes_over:
            self._clear_away()
        if before and before.key != key:
            self._tidy(self.run.delete, before.key)
        if item.kind == "best":
            seconds = round(time.monotonic() - started, 3)
            self._record = Upload(uri=self.run.address(key), sha256=known.sha256, step=known.step, seconds=seconds)

    def _begin(self) -> None:
        """Become the newest start of the run."""
        self.start_time = take_over(self.run, self.start_time)
        note(self.folder, start=self.start_time)
        if best := read_pointer(self.run, "best")[0]:
            self._record = Upload(uri=self.run.address(best.key), sha256=best.sha256, step=best.step)
        self._clear_away()

    def _clear_away(self) -> None:
        """Delete what a killed start left in the bucket: objects that no pointer names, and unfinished uploads."""
        named = {pointer.key for kind in KINDS if (pointer := read_pointer(self.run, kind)[0])}
        for key in [key for key, _, _ in self.run.list("checkpoints/") if key not in named]:
            self._tidy(self.run.delete, key)
        self._tidy(self.run.abort_unfinished)

    def _count(self, num_bytes: int) -> None:
        if self._stopped:
            raise _Stopped
        self._progress(num_bytes)

    def _tidy(self, delete: Callable[..., None], *arguments: str) -> None:
        try:
            delete(*arguments)
        except S3Error as error:  # a rule of the bucket may do it instead
            log.debug(f"s3: {error}")

    def _send_files(self) -> None:
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

    def _put_back(self, item: _Item) -> None:
        with self._wake:
            if self._waiting.setdefault(item.kind, item) != item:  # a newer one has come meanwhile
                item.drop()

    def _failed(self, item: _Item, error: str) -> None:
        self._put_back(item)
        with self._wake:
            self.errors.update(dict.fromkeys(self._waiting, error))
            if self._stopped:
                return
            delay_s = self.retry_delays_s[min(self._failures, len(self.retry_delays_s) - 1)]
            delay_s = min(delay_s, RETRY_DELAY_AT_END_S) if self._flushing else delay_s
            self._failures, self._retry_at = self._failures + 1, time.monotonic() + delay_s
        at = datetime.now() + timedelta(seconds=delay_s)
        log.info(f"s3: {item} could not be uploaded: {error}; next try in {delay_s:g} s, at {at:%H:%M:%S}.")
        self.run.forget_client()  # the next one reads credentials that may have been renewed

    def _give_up(self, item: _Item, error: str) -> None:
        log.info(f"s3: {error}; this process uploads nothing more.")
        with self._wake:
            for waiting in (*self._waiting.values(), item):
                waiting.drop()
                if waiting.sidecar:
                    self.errors[waiting.kind] = error
            self._waiting, self._stopped = {}, True


def small_files(folder: RunFolder) -> Iterator[tuple[str, Path]]:
    """Yield (name in the bucket, path) of record, config, metrics, pages and TensorBoard files."""
    for path in sorted([*folder.path.glob("*"), *folder.tensorboard.rglob("*")]):
        below = path.relative_to(folder.path).as_posix()
        wanted = below.startswith("tensorboard/") or path.suffix in SUFFIXES
        if wanted and path.is_file() and not path.is_symlink() and not path.name.startswith("."):
            yield below, path


def note(folder: RunFolder, **known: float | None) -> None:
    """Keep for whoever sends the rest: `start` of the run, and `until` when its end may wait for that."""
    text = json.dumps({**notes(folder), **known})
    write_atomically(folder.path / "upload" / "start.json", lambda file: file.write(text))


def notes(folder: RunFolder) -> dict[str, float]:
    try:
        held = read_json(folder.path / "upload" / "start.json")
        return {str(name): float(value) for name, value in held.items() if isinstance(value, int | float)}
    except (OSError, ValueError, AttributeError):
        return {}
