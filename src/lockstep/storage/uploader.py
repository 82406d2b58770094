"""Background upload of a run's best checkpoint, last checkpoint and small files.

Training steps never wait for it; the end of fit does, for s3.flush_timeout_s at most.

A thread polls the run folder every second for the newest complete checkpoint of each kind; a newer checkpoint replaces
one that has not been sent yet. A file being sent is linked into `<run folder>/upload/`, so that training may delete
the original. After a failure the thread retries with increasing delays. Imports no torch.

best.json and last.json point to the uploaded checkpoints. Each start of a run first claims both: it writes its start
time into them, and creates the one that is missing without a checkpoint in it. Every later write is a conditional PUT,
which fails if another start has claimed them since: an older start that is still alive sees the newer one, and stops.
"""

import contextlib
import logging
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.runs.errors import EXIT_INTERRUPTED, EXIT_NOT_UPLOADED, EXIT_OK, EXIT_USER_ERROR
from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import JsonObject, update_record
from lockstep.storage.checkpoint_files import Sidecar, complete, link, remove
from lockstep.storage.errors import S3Error
from lockstep.storage.fetch import KINDS, Pointer, read_pointer
from lockstep.storage.s3 import Bucket, Progress

log = logging.getLogger(__name__)

POLL_S, LONGEST_DELAY_S, LONGEST_DELAY_AT_END_S = 1.0, 60.0, 5.0
INTERVALS_S = {"last": 600.0, "best": 0.0, "files": 60.0}  # in this order: what a machine about to go sends first
SUFFIXES = (".yaml", ".json", ".csv", ".md", ".svg", ".png", ".txt", ".diff", ".log")
SHORT_TIMEOUT_S = 5.0  # a stopped run has waited before; one whose input was refused has trained nothing


class Uploader:
    """Upload thread of one run.

    Args:
        start: start time of the run; a process with an older one stops uploading.
        takes_over: true for a new start of the run, false to upload what an earlier process has left.
    """

    def __init__(self, run: Bucket, folder: RunFolder, start: float, takes_over: bool = True) -> None:
        self.run, self.folder, self.start_time, self.takes_over = run, folder, start, takes_over
        self.intervals_s = INTERVALS_S.copy()
        self._due = {"last": time.monotonic() + INTERVALS_S["last"], "best": 0.0, "files": 0.0}
        self._uploaded: dict[Path, tuple[int, int]] = {}  # time and size of small files
        self._pointers = dict.fromkeys(KINDS, Pointer())  # as this start has read or written them
        self._error, self._failures = "not uploaded yet", 0
        self._asked = self._answered = 0  # number of flushes
        self._has_claimed = self._stopped = False
        self._wake, self._thread = threading.Condition(), threading.Thread(target=self._work, name="s3", daemon=True)
        if takes_over:
            keep_start(folder, start)

    def start(self) -> None:
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Send everything now; return False if something is left after `timeout_s`."""
        with self._wake:
            self._asked += 1
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._stopped or self._answered == self._asked, timeout_s)
            return self._answered == self._asked

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; an upload in progress is aborted, and its file stays in the run folder."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def status(self) -> JsonObject:
        """Return the best checkpoint in the bucket, as far as known, and why a newer one is not there."""
        best, error = self._pointers["best"], self._error if self._newest("best") else None
        if (known := best.checkpoint) is None:
            return JsonObject(error=error)
        return JsonObject(uri=self.run.address(best.key), sha256=known.sha256, step=known.step, error=error)

    def _newest(self, kind: str) -> tuple[Path, Sidecar] | None:
        """Return the next checkpoint to upload, or None; a last checkpoint identical to the best is skipped."""
        newest, best = (next(complete(self.folder.checkpoints, each), None) for each in (kind, "best"))
        there = [self._pointers[kind].checkpoint, best[1] if best and kind == "last" else None]
        return newest if newest and newest[1].sha256 not in [each.sha256 for each in there if each] else None

    def _work(self) -> None:
        while not self._stopped:
            asked, delay_s = self._asked, POLL_S
            try:
                if not self._has_claimed:
                    self._claim()
                for kind, interval_s in self.intervals_s.items():
                    if asked != self._answered or time.monotonic() >= self._due[kind]:
                        self._send_files() if kind == "files" else self._send_checkpoint(kind)
                        self._due[kind] = time.monotonic() + interval_s
                self._answered, self._failures, self._error = asked, 0, "not uploaded yet"
            except Exception as error:  # a mistake in this code must not end the uploads of the run
                self._error = str(error) if isinstance(error, S3Error | OSError) else type(error).__name__
                delay_s = min(2**self._failures, LONGEST_DELAY_S)
                self._failures += 1
                then = "this process uploads nothing more" if self._stopped else f"next try in {delay_s:g} s"
                log.info(f"s3: not uploaded: {self._error}; {then}.")
                self.run, self._has_claimed = replace(self.run), False  # a new client reads credentials anew
            with self._wake:
                self._wake.notify_all()
                if not self._stopped and self._asked == asked:
                    self._wake.wait(delay_s if asked == self._answered else min(delay_s, LONGEST_DELAY_AT_END_S))

    def _claim(self) -> None:
        """Make this the start of the run that may move the pointers; delete what no pointer names."""
        unnamed: set[str] = set()
        with contextlib.suppress(S3Error):  # listing is optional: a lifecycle rule of the bucket can clean up instead
            unnamed = {key for key, _, _ in self.run.list("checkpoints/")}  # before: a newer start adds others
        found = {kind: read_pointer(self.run, kind) for kind in KINDS}
        newest = max(pointer.start for pointer in found.values())
        if newest > self.start_time:
            if not self.takes_over:
                self._stopped = True
                raise S3Error("a newer start of this run has taken over in the bucket")
            self.start_time = newest + 0.001  # this start is the newer one even if the clock of its machine is behind
        self._pointers = found
        for kind, pointer in found.items():
            if pointer.start != self.start_time:
                self._point(kind, pointer.checkpoint, pointer.key)
        if self.takes_over:
            keep_start(self.folder, self.start_time)
        self.takes_over, self._has_claimed = False, True
        with contextlib.suppress(S3Error):
            for left in self.run.call("list_multipart_uploads", Prefix=self.run.prefix).get("Uploads", []):  # billed
                key = left["Key"].removeprefix(self.run.prefix)
                self.run.call("abort_multipart_upload", key, UploadId=left["UploadId"])
            for key in unnamed - {pointer.key for pointer in self._pointers.values()}:
                self.run.call("delete_object", key)

    def _point(self, kind: str, checkpoint: Sidecar | None, key: str) -> None:
        """Write best.json or last.json, unless another process has written it since this one did."""
        etag, pointer = self._pointers[kind].etag, Pointer(checkpoint, key, self.start_time)
        condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
        etag = self.run.write(f"{kind}.json", pointer.as_json().encode(), **condition)
        self._pointers[kind] = replace(pointer, etag=etag)

    def _send_checkpoint(self, kind: str) -> None:
        if not (newest := self._newest(kind)):
            return
        (path, known), before = newest, self._pointers[kind].key
        key = f"checkpoints/{kind}-step{known.step:08d}-{known.sha256[:8]}.ckpt"
        second = self.folder.path / "upload" / "sending.ckpt"
        try:
            link(path, second)
        except FileNotFoundError:  # training has deleted it for a newer one
            return self._send_checkpoint(kind)
        try:
            self._upload(key, second, known.sha256)
        finally:
            remove(second)
        self._point(kind, known, key)
        with contextlib.suppress(S3Error):
            if before not in ("", key):
                self.run.call("delete_object", before)

    def _send_files(self) -> None:
        """Send record, config, metrics, pages and TensorBoard files that changed."""
        for path in (*self.folder.path.glob("[!.]*"), *self.folder.tensorboard.rglob("*")):
            key = path.relative_to(self.folder.path).as_posix()
            with contextlib.suppress(FileNotFoundError):
                facts = path.lstat()
                state, is_wanted = (facts.st_mtime_ns, facts.st_size), path.suffix in SUFFIXES or "/" in key
                if is_wanted and stat.S_ISREG(facts.st_mode) and facts.st_size and self._uploaded.get(path) != state:
                    self._upload(key, path)
                    self._uploaded[path] = state

    def _upload(self, key: str, path: Path, sha256: str = "") -> None:
        progress = Progress(f"uploading {key}", path.stat().st_size)

        def count(num_bytes: int) -> None:
            if self._stopped:
                raise S3Error("the upload was aborted")
            progress(num_bytes)

        self.run.upload(key, path, sha256, count)


def keep_start(folder: RunFolder, start: float) -> None:
    """Keep the time at which the run was started, for the process that sends the rest."""
    write_atomically(folder.path / "upload" / "start", lambda file: file.write(repr(start)))


def finish_upload(s3: Mapping[str, Any] | None, folder: RunFolder, code: int) -> int:
    """Upload what the run's own process did not, after it has ended or on request, and update the run record.

    The exit code becomes EXIT_NOT_UPLOADED if it was EXIT_OK and the best checkpoint is not in the bucket.
    """
    if not s3 or not s3.get("uri") or not folder.record.exists():
        return code
    run, note = Bucket.of(s3).at(folder.run_id), folder.path / "upload" / "start"
    if not note.exists() and not any(complete(folder.checkpoints)):
        return code  # it ended before it reached the bucket
    most_s = SHORT_TIMEOUT_S if code in (EXIT_USER_ERROR, EXIT_INTERRUPTED) else float("inf")
    timeout_s = min(float(s3.get("flush_timeout_s", 300.0)), most_s)
    uploader = Uploader(run, folder, float(note.read_text()) if note.exists() else 0.0, takes_over=False)
    uploader.start()
    uploader.flush(timeout_s)
    status = uploader.status()
    with update_record(folder.record) as record:
        record.upload = status if status.sha256 else JsonObject(record.upload, error=status.error)
        if status.sha256 and record.best_checkpoint.step == status.step:
            record.best_checkpoint.s3_uri = status.uri
    uploader.flush(timeout_s if status.error is None else 0.0)  # the record, too
    uploader.stop()
    return EXIT_NOT_UPLOADED if status.error and code == EXIT_OK else code
