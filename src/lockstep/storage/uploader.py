"""Upload a run to its place in a bucket from a thread, while it trains and when it ends.

The thread looks into the run folder every second for the newest complete checkpoint of each kind; a
newer checkpoint replaces one that has not been sent yet. A file being sent is linked into
`<run folder>/upload/`, so that training may delete the original. After a failure the thread retries
with increasing delays. Imports no torch.

best.json and last.json point to the uploaded checkpoints. Each start of a run first claims both: it
writes its start time into them, and creates the one that is missing without a checkpoint in it.
Every later write is a conditional PUT, which fails if another start has claimed them since: an
older start that is still alive sees the newer one, and stops.

A pointer names the key of an upload before the upload begins, and its predecessor's until that is
deleted. Only keys that a pointer of this run has named are ever deleted.
"""

import contextlib
import logging
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.checkpoints import files
from lockstep.checkpoints.files import Sidecar, complete_checkpoints
from lockstep.process.errors import (
    EXIT_INTERRUPTED,
    EXIT_NOT_UPLOADED,
    EXIT_OK,
    EXIT_USER_ERROR,
    UserError,
)
from lockstep.process.files import write_atomically
from lockstep.records.folder import RunFolder
from lockstep.records.record import (
    JsonObject,
    locked_record,
    read_record,
    status_of,
    write_record,
    write_record_as_is,
)
from lockstep.storage.errors import OtherRunError, S3Error
from lockstep.storage.pointers import (
    KINDS,
    Pointer,
    Pointers,
    new_uuid,
    read_pointers,
    read_uuid,
    refuse_other_run,
    store_uuid,
)
from lockstep.storage.s3 import Bucket, TransferProgress

log = logging.getLogger(__name__)

POLL_S = 1.0
LONGEST_DELAY_S = 60.0
LONGEST_DELAY_AT_END_S = 5.0
# The order counts: a machine that is about to go sends its last checkpoint first.
INTERVALS_S = {"last": 600.0, "best": 0.0, "files": 60.0}
SUFFIXES = (".yaml", ".json", ".csv", ".md", ".svg", ".png", ".txt", ".diff", ".log")
# A stopped run has already waited for uploads, and a run with refused input has trained nothing.
SHORT_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 300.0
NOT_YET = "not uploaded yet"


class Uploader:
    """The upload thread of one run.

    Args:
        started_at_s: when this start of the run began; a process of an older start stops uploading.
        takes_over: true for a new start of the run, false to upload what an earlier process left.
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: RunFolder,
        started_at_s: float,
        takes_over: bool = True,
    ) -> None:
        self.bucket = bucket
        self.folder = folder
        self.started_at_s = started_at_s
        self.takes_over = takes_over
        self.intervals_s = INTERVALS_S.copy()
        self._due_at = {"last": time.monotonic() + INTERVALS_S["last"], "best": 0.0, "files": 0.0}
        self._uploaded: dict[Path, tuple[int, int]] = {}  # time and size of small files
        self._pointers: Pointers = dict.fromkeys(KINDS, Pointer())  # as last read or written
        self._error = NOT_YET
        self._failures = 0
        self._flushes_requested = 0
        self._flushes_done = 0
        self._has_claimed = False
        self._stopped = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="s3", daemon=True)

        self.uuid = read_uuid(folder)
        if not self.uuid:
            self.uuid = new_uuid()
            store_uuid(folder, self.uuid)
        if takes_over:
            store_start(folder, started_at_s)

    def start(self) -> None:
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Send everything now; return False if something is left after `timeout_s`."""
        with self._wake:
            self._flushes_requested += 1
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._stopped or self._is_flushed(), timeout_s)
            return self._is_flushed()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; an upload in progress is aborted, and its file stays on the disk."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def status(self) -> JsonObject:
        """Return the best checkpoint in the bucket, and why a newer one is not there."""
        error = self._error if self._find_unsent("best") else None
        pointer = self._pointers["best"]
        if pointer.checkpoint is None:
            return JsonObject(error=error)
        return JsonObject(
            uri=self.bucket.address(pointer.key),
            sha256=pointer.checkpoint.sha256,
            step=pointer.checkpoint.step,
            error=error,
        )

    def claim(self) -> None:
        """Make this start of the run the one that may move the pointers, and clean up after others.

        Raises:
            OtherRunError: the place holds another run; nothing was written.
        """
        pointers = read_pointers(self.bucket)
        refuse_other_run(self.bucket, pointers, self.folder)
        self._become_newest(pointers)
        self._pointers = pointers
        for kind, pointer in pointers.items():
            is_claimed = pointer.started_at_s == self.started_at_s and pointer.uuid == self.uuid
            # Before leftovers are deleted, no other process may be able to point to one of them.
            if not is_claimed or pointer.leftovers:
                self._write_pointer(kind)
        if self.takes_over:
            store_start(self.folder, self.started_at_s)
        self.takes_over = False
        self._has_claimed = True
        self._clean_up()

    def _become_newest(self, pointers: Pointers) -> None:
        """Make this start the newest one, even if the clock of its machine is behind."""
        newest = max(pointer.started_at_s for pointer in pointers.values())
        if newest <= self.started_at_s:
            return
        if not self.takes_over:
            self._stopped = True
            raise S3Error("a newer start of this run has taken over in the bucket")
        self.started_at_s = newest + 0.001

    def _clean_up(self) -> None:
        """Delete what earlier starts of this run left, as far as the bucket permits.

        A lifecycle rule of the bucket can do it instead.
        """
        with contextlib.suppress(S3Error):
            self._abort_unfinished_uploads()
        with contextlib.suppress(S3Error):
            for kind in KINDS:
                self._delete_leftovers(kind)

    def _is_flushed(self) -> bool:
        return self._flushes_done == self._flushes_requested

    def _find_unsent(self, kind: str) -> tuple[Path, Sidecar] | None:
        """Return the newest checkpoint if it is not in the bucket yet, else None.

        If the last checkpoint is also the best one, only the best one is uploaded.
        """
        newest = next(complete_checkpoints(self.folder.checkpoints, kind), None)
        if newest is None:
            return None
        _, sidecar = newest
        uploaded = self._pointers[kind].checkpoint
        if uploaded is not None and uploaded.sha256 == sidecar.sha256:
            return None
        if kind == "last":
            best = next(complete_checkpoints(self.folder.checkpoints, "best"), None)
            if best is not None and best[1].sha256 == sidecar.sha256:
                return None
        return newest

    def _work(self) -> None:
        while not self._stopped:
            flushes_requested = self._flushes_requested
            delay_s = POLL_S
            try:
                self._send_what_is_due(is_flush=flushes_requested != self._flushes_done)
                self._flushes_done = flushes_requested
                self._failures = 0
                self._error = NOT_YET
            except Exception as error:  # a mistake in this code must not end the uploads of the run
                delay_s = self._note_failure(error)
            with self._wake:
                self._wake.notify_all()
                if flushes_requested != self._flushes_done:
                    delay_s = min(delay_s, LONGEST_DELAY_AT_END_S)
                if not self._stopped and self._flushes_requested == flushes_requested:
                    self._wake.wait(delay_s)

    def _send_what_is_due(self, is_flush: bool) -> None:
        if not self._has_claimed:
            self.claim()
        for kind, interval_s in self.intervals_s.items():
            if not is_flush and time.monotonic() < self._due_at[kind]:
                continue
            if kind == "files":
                self._send_files()
            else:
                self._send_checkpoint(kind)
            self._due_at[kind] = time.monotonic() + interval_s

    def _note_failure(self, error: Exception) -> float:
        """Log why an upload failed; return the seconds until the next try."""
        self._error = type(error).__name__
        if isinstance(error, UserError | OSError):
            self._error = str(error).removesuffix(".")
        if isinstance(error, OtherRunError):
            self._stopped = True
        delay_s = min(2**self._failures, LONGEST_DELAY_S)
        self._failures += 1
        next_step = f"next try in {delay_s:g} s"
        if self._stopped:
            next_step = "this process uploads nothing more"
        log.info(f"s3: not uploaded: {self._error}; {next_step}.")
        self.bucket = replace(self.bucket)  # a new client reads credentials anew
        self._has_claimed = False
        return delay_s

    def _write_pointer(self, kind: str, **changes: Any) -> None:
        """Write best.json or last.json, unless another process has written it meanwhile."""
        old = self._pointers[kind]
        pointer = replace(old, started_at_s=self.started_at_s, uuid=self.uuid, **changes)
        condition = {"IfMatch": pointer.etag} if pointer.etag else {"IfNoneMatch": "*"}
        etag = self.bucket.write(f"{kind}.json", pointer.to_json().encode(), **condition)
        self._pointers[kind] = replace(pointer, etag=etag)

    def _send_checkpoint(self, kind: str) -> None:
        copy = self.folder.path / "upload" / "sending.ckpt"
        while newest := self._find_unsent(kind):
            path, sidecar = newest
            try:
                files.link(path, copy)
            except FileNotFoundError:  # training has deleted it for a newer one
                continue
            try:
                self._replace_checkpoint(kind, copy, sidecar)
            finally:
                files.remove(copy)
            return

    def _replace_checkpoint(self, kind: str, path: Path, sidecar: Sidecar) -> None:
        """Upload a checkpoint, point to it, and delete the one before it."""
        key = f"checkpoints/{kind}-step{sidecar.step:08d}-{sidecar.sha256[:8]}.ckpt"
        leftovers = self._pointers[kind].leftovers
        if key not in leftovers:
            self._write_pointer(kind, leftovers=(*leftovers, key))
        self._upload(key, path, sidecar.sha256)
        # A resume from it has the rows of metrics.csv before it, also if this machine is lost now.
        self._send_files()

        previous_key = self._pointers[kind].key
        unneeded_keys = tuple(name for name in (*leftovers, previous_key) if name not in ("", key))
        self._write_pointer(kind, checkpoint=sidecar, key=key, leftovers=unneeded_keys)
        with contextlib.suppress(S3Error):
            self._delete_leftovers(kind)
            # The next write of the pointer forgets them.
            self._pointers[kind] = replace(self._pointers[kind], leftovers=())

    def _delete_leftovers(self, kind: str) -> None:
        keys_in_use = [pointer.key for pointer in self._pointers.values()]
        for key in self._pointers[kind].leftovers:
            if key not in keys_in_use:
                self.bucket.call("delete_object", key)

    def _abort_unfinished_uploads(self) -> None:
        """Abort uploads of a killed process of this run, whose parts the store bills."""
        keys_of_run = {key for _, key in self._files()}
        for pointer in self._pointers.values():
            keys_of_run |= {pointer.key, *pointer.leftovers}
        answer = self.bucket.call("list_multipart_uploads", Prefix=self.bucket.prefix)
        for upload in answer.get("Uploads", []):
            key = upload["Key"].removeprefix(self.bucket.prefix)
            if key in keys_of_run:
                self.bucket.call("abort_multipart_upload", key, UploadId=upload["UploadId"])

    def _files(self) -> Iterator[tuple[Path, str]]:
        """Yield record, config, metrics, pages and TensorBoard files, each with its key."""
        for path in self.folder.path.glob("[!.]*"):
            if path.suffix in SUFFIXES:
                yield path, path.name
        for path in self.folder.tensorboard.rglob("*"):
            yield path, path.relative_to(self.folder.path).as_posix()

    def _send_files(self) -> None:
        """Send the files that have changed."""
        for path, key in self._files():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                version = (status.st_mtime_ns, status.st_size)
                is_sendable = stat.S_ISREG(status.st_mode) and status.st_size > 0
                if is_sendable and self._uploaded.get(path) != version:
                    self._upload(key, path)
                    self._uploaded[path] = version

    def _upload(self, key: str, path: Path, sha256: str = "") -> None:
        progress = TransferProgress(f"uploading {key}", path.stat().st_size)

        def count(num_bytes: int) -> None:
            if self._stopped:
                raise S3Error("the upload was aborted")
            progress(num_bytes)

        self.bucket.upload(key, path, sha256, count)


def _start_path(folder: RunFolder) -> Path:
    return folder.path / "upload" / "start"


def store_start(folder: RunFolder, start: float) -> None:
    """Store the time at which the run was started, for the process that sends the rest."""
    write_atomically(_start_path(folder), lambda file: file.write(repr(start)))


def _read_start(folder: RunFolder) -> float:
    path = _start_path(folder)
    return float(path.read_text()) if path.exists() else 0.0


def _final_uploader(s3: Mapping[str, Any] | None, folder: RunFolder) -> Uploader | None:
    """Return an uploader of what a run has left.

    Returns:
        None for a run that has no bucket, or that has neither claimed it nor saved a checkpoint.
    """
    if not s3 or not s3.get("uri") or not folder.record_path.exists():
        return None
    bucket = Bucket.from_config(s3).joinpath(folder.run_id)
    if not _start_path(folder).exists() and not any(complete_checkpoints(folder.checkpoints)):
        return None
    return Uploader(bucket, folder, _read_start(folder), takes_over=False)


def _flush_timeout_s(s3: Mapping[str, Any] | None, is_short: bool) -> float:
    timeout_s = FLUSH_TIMEOUT_S
    if s3 and s3.get("flush_timeout_s") is not None:
        timeout_s = float(s3["flush_timeout_s"])
    if is_short:
        timeout_s = min(timeout_s, SHORT_TIMEOUT_S)
    return timeout_s


def finish_upload(s3: Mapping[str, Any] | None, folder: RunFolder, code: int) -> int:
    """Upload what the run's own process did not, and update the run record.

    The exit code becomes EXIT_NOT_UPLOADED if it was EXIT_OK and something of the run, such as its
    last checkpoint, is not in the bucket.
    """
    uploader = _final_uploader(s3, folder)
    if uploader is None:
        return code
    uploader.start()
    is_sent = uploader.flush(_flush_timeout_s(s3, code in (EXIT_USER_ERROR, EXIT_INTERRUPTED)))
    uploader.stop()

    status = uploader.status()
    with locked_record(folder.record_path):
        record = read_record(folder.record_path)
        # The end of a killed run is its last heartbeat: it neither lives nor costs from now on.
        write = write_record_as_is if status_of(record) == "lost" else write_record
        record.uuid = uploader.uuid
        record.upload = status if status.sha256 else JsonObject(record.upload, error=status.error)
        if status.sha256 and record.best_checkpoint.step == status.step:
            record.best_checkpoint.s3_uri = status.uri
        write(folder.record_path, record)
    if code == EXIT_OK and not is_sent:
        return EXIT_NOT_UPLOADED
    return code


def send_files(s3: Mapping[str, Any] | None, folder: RunFolder, is_short: bool = False) -> bool:
    """Upload the final record, the page and its figures, after the checkpoints.

    Args:
        is_short: give up after a few seconds.

    Returns:
        Whether they are in the bucket now.
    """
    uploader = _final_uploader(s3, folder)
    if uploader is None:
        return False
    uploader.intervals_s = {"files": 0.0}
    uploader.start()
    is_sent = uploader.flush(_flush_timeout_s(s3, is_short))
    uploader.stop()
    return is_sent


def release_claim(s3: Mapping[str, Any] | None, folder: RunFolder) -> None:
    """Free the place in the bucket that a start has claimed and never used.

    Its input was refused before it trained a step, and another start may use its id.
    """
    if not s3 or not s3.get("uri") or not _start_path(folder).exists():
        return
    bucket = Bucket.from_config(s3).joinpath(folder.run_id)
    with contextlib.suppress(S3Error):
        pointers = read_pointers(bucket)
        claims = {
            (pointer.uuid, pointer.started_at_s) for pointer in pointers.values() if pointer.etag
        }
        is_unused = not any(pointer.checkpoint for pointer in pointers.values())
        if is_unused and claims == {(read_uuid(folder), _read_start(folder))}:
            for kind in KINDS:
                bucket.call("delete_object", f"{kind}.json")
