"""Send what a run's process could not upload, when it has ended or by hand (src/upload.py). Imports no torch."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from lockstep.runs.errors import EXIT_NOT_UPLOADED, EXIT_OK, EXIT_USER_ERROR
from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RunFolder
from lockstep.runs.foreign_files import read_json
from lockstep.runs.record import read_record, update_record
from lockstep.storage.checkpoint_files import complete
from lockstep.storage.errors import S3Error
from lockstep.storage.pointer import read_pointer
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import Uploader

MIN_TIMEOUT_S = 3.0
FILES_ALONE_TIMEOUT_S = 30.0  # record and curves are worth less of a wait than a checkpoint
REFUSED_TIMEOUT_S = 5.0  # a start whose input was refused has trained nothing


def note(folder: RunFolder, **known: float | None) -> None:
    """Keep what whoever sends the rest has to know of this start.

    Args:
        known: start, the time by which older processes know that they are superseded; deadline, the time at which
            this machine goes; left_s, how long the end of the run may still wait.
    """
    text = json.dumps({**notes(folder), **known})
    write_atomically(folder.path / "upload" / "start.json", lambda file: file.write(text))


def notes(folder: RunFolder) -> dict[str, float]:
    try:
        held = read_json(folder.path / "upload" / "start.json")
        return {str(name): float(value) for name, value in held.items() if isinstance(value, int | float)}
    except (OSError, ValueError, AttributeError):
        return {}


def finish_upload(s3: Mapping[str, Any] | None, folder: RunFolder, code: int) -> int:
    """At the end of a run: send what is left, and complete the record, which says what is missing.

    Returns:
        EXIT_NOT_UPLOADED if the code was EXIT_OK and the best checkpoint is not in the bucket; else the code.
    """
    if not s3 or not s3.get("uri") or not folder.record.exists():
        return code
    known = notes(folder)
    left_s = known.get("left_s", float(s3.get("flush_timeout_s", 300.0)))
    if not any(complete(folder.path / "upload")) and not any(complete(folder.checkpoints, "best")):
        if "start" not in known:
            return code  # it ended before it reached the bucket
        left_s = min(left_s, FILES_ALONE_TIMEOUT_S)
    if code == EXIT_USER_ERROR:
        left_s = min(left_s, REFUSED_TIMEOUT_S)
    if "deadline" in known:
        left_s = min(left_s, known["deadline"] - time.time())
    error = upload_left(s3, folder, max(MIN_TIMEOUT_S, left_s))
    return EXIT_NOT_UPLOADED if error and code == EXIT_OK else code


def upload_left(s3: Mapping[str, Any], folder: RunFolder, timeout_s: float) -> str | None:
    """Send the checkpoints that wait, a best that was saved but never offered, and the run's files.

    Returns:
        Why the best checkpoint is not in the bucket; None if it is there, or if there is none.
    """
    run, began = Bucket.of(s3).at(folder.run_id), read_record(folder.record).started_at
    start = notes(folder).get("start") or (datetime.fromisoformat(began).timestamp() if began else time.time())
    uploader = Uploader(run, folder, start, takes_over=False)
    path, sidecar = next(complete(folder.checkpoints, "best"), (None, None))
    if path and sidecar and sidecar.step > max((s.step for _, s in complete(uploader.outbox, "best")), default=-1):
        try:
            pointer = read_pointer(run, "best")[0]
        except S3Error:
            pointer = None
        if pointer is None or pointer.step < sidecar.step:
            uploader.offer(path, "best", adopted=True)
    uploader.start()
    uploader.flush(timeout_s)
    status = uploader.status()
    with update_record(folder.record) as record:
        before = record.upload
        if before.sha256 and (status.sha256 in (None, before.sha256)) and status.error is None:
            status = replace(before, error=None, left=status.left)  # an earlier process uploaded it
        record.upload = status
        if status.sha256 and record.best_checkpoint.step == status.step:
            record.best_checkpoint.s3_uri = status.uri
    uploader.flush(FILES_ALONE_TIMEOUT_S if status.error is None else 0.0)  # the record, too
    uploader.stop()
    return status.error
