"""Sends what a run's process left in its outbox, and completes the record; imports no torch.

The launch calls it when every rank has ended, however they ended; src/upload.py calls it by hand.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lockstep.runs.errors import EXIT_NOT_UPLOADED, EXIT_OK, EXIT_USER_ERROR
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import Upload, update_record
from lockstep.storage.bucket import open_store
from lockstep.storage.checkpoint_files import complete
from lockstep.storage.object_store import ObjectStore, StoreError
from lockstep.storage.outbox import Outbox
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.small_files import SmallFiles
from lockstep.storage.uploader import Uploader, UploadStatus

log = logging.getLogger(__name__)

ALL_RANKS = range(2**31)
MIN_TIMEOUT_S = 3.0
FILES_ALONE_TIMEOUT_S = 30.0  # record and curves are worth less of a wait than a checkpoint
REFUSED_TIMEOUT_S = 5.0  # a start whose bucket or input was refused has trained nothing


def finish_upload(s3: Mapping[str, Any] | None, folder: RunFolder, code: int, *, ranks: range = ALL_RANKS) -> int:
    """At the end of a run, once per node: send what is left and complete the record, which says what is missing.

    Args:
        ranks: of this node; those of others, whose outbox may lie on the same disk, are for their own node to send.
    Returns:
        The exit code: EXIT_NOT_UPLOADED where it was EXIT_OK and the best checkpoint is not in the bucket.
    """
    if not s3 or not s3.get("uri") or (0 in ranks and not folder.record.exists()):
        return code
    outbox = Outbox(folder.path / "upload")
    notes = outbox.notes()
    left_s = notes.flush_left_s if notes.flush_left_s is not None else float(s3.get("flush_timeout_s", 300.0))
    own = [rank for rank in outbox.ranks() if rank in ranks]
    if 0 not in ranks and (not own or notes.generation is None):
        return code
    if not own and not any(complete(folder.checkpoints, "best")):
        if notes.generation is None:
            return code  # it ended before there was anything to send, or a bucket to send it to
        left_s = min(left_s, FILES_ALONE_TIMEOUT_S)
    if code == EXIT_USER_ERROR and not own:
        left_s = min(left_s, REFUSED_TIMEOUT_S)
    if notes.deadline is not None:
        left_s = min(left_s, notes.deadline - time.time())
    error = upload_left(open_store(s3), folder, max(MIN_TIMEOUT_S, left_s), ranks=ranks)
    if error is None:
        return code
    return EXIT_NOT_UPLOADED if code == EXIT_OK else code


def upload_left(store: ObjectStore, folder: RunFolder, timeout_s: float, *, ranks: range | None = None) -> str | None:
    """Send what this machine's ranks left in the outbox, a best that never reached it, and the run's files.

    Args:
        ranks: whose parts are sent; default all in the outbox. Where rank 0 is not among them only parts of sharded
            checkpoints are, and rank 0's node completes the record.
    Returns:
        Why the best is not in the bucket; None: it is there, or there is none.
    """
    run = RunBucket(store, folder.run_id)
    outbox = Outbox(folder.path / "upload")
    run.generation = outbox.notes().generation or 0
    run.prepared = run.generation > 0  # of the process that ended: a newer start elsewhere stays the newest
    has_rank_zero = folder.record.exists() if ranks is None else 0 in ranks
    if has_rank_zero:
        _add_best(outbox, run, folder)
    own = {rank for rank in outbox.ranks() if ranks is None or rank in ranks} | ({0} if has_rank_zero else set())
    uploaders = {rank: Uploader(run, folder, rank=rank) for rank in sorted(own)}
    deadline = time.monotonic() + timeout_s
    for uploader in uploaders.values():
        uploader.start()
    for uploader in reversed(uploaders.values()):
        uploader.flush(max(0.0, deadline - time.monotonic()))
        uploader.stop()
    return _conclude(uploaders[0], run, folder) if has_rank_zero else None


def _conclude(uploader: Uploader, run: RunBucket, folder: RunFolder) -> str | None:
    status = uploader.status()
    _complete_record(folder, status)
    if status.error is None:
        try:
            run.check_current()
            SmallFiles(run, folder).send()
        except StoreError as error:
            log.info(f"s3: the last state of the run's files was not uploaded: {error}.")
    return status.error


def _add_best(outbox: Outbox, run: RunBucket, folder: RunFolder) -> None:
    """A best that was saved but never offered (its process was killed in between) is not in the outbox."""
    path, sidecar = next(iter(complete(folder.checkpoints, "best")), (None, None))
    if path is None or sidecar is None:
        return
    if any(item.kind == "best" and item.step >= sidecar.step for item in outbox.left()):
        return
    try:
        pointer, _ = run.read_pointer("best")
    except StoreError as error:
        log.info(f"s3: {error}.")
        pointer = None
    if pointer is None or pointer.step < sidecar.step:
        outbox.add("best", path, sidecar, run.generation)


def _complete_record(folder: RunFolder, status: UploadStatus) -> None:
    with update_record(folder.record) as record:
        before, now = record.upload, Upload(**asdict(status))
        if before.sha256 and now.sha256 is None and now.error is None:
            now = replace(before, error=None)  # nothing was to be sent: what is there stays there
        if now.seconds is None and before.sha256 == now.sha256:
            now.seconds = before.seconds
        record.upload = now
        if now.sha256 and record.best_checkpoint.step == now.step:
            record.best_checkpoint.s3_uri = now.uri
