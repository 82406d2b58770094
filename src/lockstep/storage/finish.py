"""Send what a run's process could not upload, when it has ended or by hand (src/upload.py). Imports no torch."""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from lockstep.runs.errors import EXIT_NOT_UPLOADED, EXIT_OK, EXIT_USER_ERROR
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import read_record, update_record
from lockstep.storage.checkpoint_files import complete
from lockstep.storage.pointer import KINDS
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import Uploader, notes

MIN_TIMEOUT_S = 3.0
REFUSED_TIMEOUT_S = 5.0  # a start whose input was refused has trained nothing


def finish_upload(s3: Mapping[str, Any] | None, folder: RunFolder, code: int) -> int:
    """At the end of a run: send what is left, and complete the record, which says what is missing.

    Returns:
        EXIT_NOT_UPLOADED if the code was EXIT_OK and the best checkpoint is not in the bucket; else the code.
    """
    if not s3 or not s3.get("uri") or not folder.record.exists():
        return code
    known = notes(folder)
    if "start" not in known and not any(complete(folder.checkpoints)):
        return code  # it ended before it reached the bucket
    left_s = known["until"] - time.time() if "until" in known else float(s3.get("flush_timeout_s", 300.0))
    left_s = min(left_s, REFUSED_TIMEOUT_S) if code == EXIT_USER_ERROR else left_s
    error = upload_left(s3, folder, max(MIN_TIMEOUT_S, left_s))
    return EXIT_NOT_UPLOADED if error and code == EXIT_OK else code


def upload_left(s3: Mapping[str, Any], folder: RunFolder, timeout_s: float) -> str | None:
    """Send the best and the last checkpoint, unless the bucket has them or later ones, and the run's files.

    Returns:
        Why the best checkpoint is not in the bucket; None if it is there, or if there is none.
    """
    began = read_record(folder.record).started_at
    start = notes(folder).get("start") or (datetime.fromisoformat(began).timestamp() if began else time.time())
    uploader = Uploader(Bucket.of(s3).at(folder.run_id), folder, start, takes_over=False)
    for kind in KINDS:
        for path, _ in list(complete(folder.checkpoints, kind))[:1]:
            uploader.offer(path, kind, only_forward=True)
    uploader.start()
    uploader.flush(timeout_s)
    status = uploader.status()
    with update_record(folder.record) as record:
        before = record.upload
        if status.error is None and status.sha256 in (None, before.sha256):  # it was there already
            status = replace(before, error=None, left=status.left)
        record.upload = status
        if status.sha256 and record.best_checkpoint.step == status.step:
            record.best_checkpoint.s3_uri = status.uri
    uploader.flush(timeout_s if status.error is None else 0.0)  # the record, too
    uploader.stop()
    return status.error
