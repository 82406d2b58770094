"""Sends what a run's process left in its spool, and completes the record; imports no torch.

The launch calls it when every rank has ended, however they ended; src/upload.py calls it by hand.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lockstep.runs.errors import EXIT_NOT_UPLOADED, EXIT_OK
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import Upload, update_record
from lockstep.storage.bucket import Bucket
from lockstep.storage.checkpoint_files import complete
from lockstep.storage.outbox import Spool
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.s3 import S3Options, StoreError, options_from
from lockstep.storage.small_files import SmallFiles
from lockstep.storage.uploader import Uploader

log = logging.getLogger(__name__)

ALL_RANKS = range(2**31)
MIN_TIMEOUT_S = 3.0
FILES_ALONE_TIMEOUT_S = 30.0  # record and curves are worth less of a wait than a checkpoint


def finish_upload(
    s3: Mapping[str, Any] | None,
    folder: RunFolder,
    code: int,
    *,
    ranks: range = ALL_RANKS,
    say: Callable[[str], None] = log.info,
) -> int:
    """At the end of a run, once per node: send what is left and complete the record, which says what is missing.

    Args:
        ranks: of this node; those of others, whose spool may lie on the same disk, are for their own node to send.
    Returns:
        The exit code: EXIT_NOT_UPLOADED where it was EXIT_OK and the best checkpoint is not in the bucket.
    """
    if not s3 or not s3.get("uri") or (0 in ranks and not folder.record.exists()):
        return code
    spool = Spool(folder.path / "upload")
    notes = spool.notes()
    left_s = float(notes.get("flush_left_s", s3.get("flush_timeout_s", 300.0)))
    own = [rank for rank in spool.ranks() if rank in ranks]
    if 0 not in ranks and (not own or "generation" not in notes):
        return code
    if not own and not any(complete(folder.checkpoints, "best")):
        if "generation" not in notes:
            return code  # it ended before there was anything to send, or a bucket to send it to
        left_s = min(left_s, FILES_ALONE_TIMEOUT_S)
    if notes.get("deadline") is not None:
        left_s = min(left_s, float(notes["deadline"]) - time.time())
    error = upload_left(options_from(s3), folder, max(MIN_TIMEOUT_S, left_s), ranks=ranks, say=say)
    if error is None:
        return code
    return EXIT_NOT_UPLOADED if code == EXIT_OK else code


def upload_left(
    options: S3Options,
    folder: RunFolder,
    timeout_s: float,
    *,
    ranks: range | None = None,
    say: Callable[[str], None] = log.info,
    client: Any = None,
) -> str | None:
    """Send what this machine's ranks left in the spool, a best that never reached it, and the run's files.

    Args:
        ranks: whose parts are sent; default all in the spool. Where rank 0 is not among them only parts of sharded
            checkpoints are, and rank 0's node completes the record.
    Returns:
        Why the best is not in the bucket; None: it is there, or there is none.
    """
    run = RunBucket(Bucket(options, client), options.prefix, folder.run_id)
    spool = Spool(folder.path / "upload")
    run.generation = int(spool.notes().get("generation", 0))
    run.prepared = run.generation > 0  # of the process that ended: a newer start elsewhere stays the newest
    has_rank_zero = folder.record.exists() if ranks is None else 0 in ranks
    if has_rank_zero:
        _add_best(spool, run, folder, say)
    own = {rank for rank in spool.ranks() if ranks is None or rank in ranks} | ({0} if has_rank_zero else set())
    uploaders = {rank: Uploader(run, folder, rank=rank, say=say) for rank in sorted(own)}
    deadline = time.monotonic() + timeout_s
    for uploader in uploaders.values():
        uploader.start()
    for uploader in reversed(uploaders.values()):
        uploader.flush(max(0.0, deadline - time.monotonic()))
        uploader.stop()
    return _conclude(uploaders[0], run, folder, say) if has_rank_zero else None


def _conclude(uploader: Uploader, run: RunBucket, folder: RunFolder, say: Callable[[str], None]) -> str | None:
    status = uploader.status()
    _complete_record(folder, status)
    if status["error"] is None:
        try:
            run.check_current()
            SmallFiles(run, folder).send()
        except StoreError as error:
            say(f"s3: the last state of the run's files was not uploaded: {error}.")
    return status["error"]


def _add_best(spool: Spool, run: RunBucket, folder: RunFolder, say: Callable[[str], None]) -> None:
    """A best that was saved but never offered (its process was killed in between) is not in the spool."""
    newest = next(iter(complete(folder.checkpoints, "best")), None)
    if newest is None or any(item.kind == "best" and item.step >= newest[1]["step"] for item in spool.left()):
        return
    try:
        pointer, _ = run.read_pointer("best")
    except StoreError as error:
        say(f"s3: {error}.")
        pointer = None
    if pointer is None or pointer.step < newest[1]["step"]:
        spool.add("best", newest[0], newest[1], run.generation)


def _complete_record(folder: RunFolder, status: dict[str, Any]) -> None:
    with update_record(folder.record) as record:
        before, now = record.upload, Upload(**status)
        if before.sha256 and now.sha256 is None and now.error is None:
            now = replace(before, error=None)  # nothing was to be sent: what is there stays there
        if now.seconds is None and before.sha256 == now.sha256:
            now.seconds = before.seconds
        record.upload = now
        if now.sha256 and record.best_checkpoint.step == now.step:
            record.best_checkpoint.s3_uri = now.uri
