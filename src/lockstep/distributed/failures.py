"""What a run says of its own end: one error file a rank, the record, the screen. Imports no torch."""

import json
import logging
from typing import TypedDict

from lockstep.distributed.cluster import Cluster
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR
from lockstep.runs.files import utc_now, write_atomically
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import read_record, write_record
from lockstep.runs.redact import redact_text

log = logging.getLogger(__name__)


class Failure(TypedDict):
    """How a rank ended, as its error file holds it."""

    rank: int
    host: str
    phase: str
    message: str
    kind: str  # the exception's class, or killed
    time: float  # seconds since 1970


def report_failure(failure: Failure | None, folder: RunFolder, cluster: Cluster, code: int = EXIT_FAILED) -> None:
    """What the run knows of how it ended (None: it was stopped): this rank's error file, the screen and the record.

    A supervisor reads the error files and does the rest itself.
    """
    if failure is None:
        return record_end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
    failure = {**failure, "message": redact_text(str(failure["message"]))}
    write_atomically(folder.rank_error(cluster.rank), lambda file: file.write(json.dumps(failure)))
    if not cluster.is_supervised:
        if cluster.is_rank_zero and code != EXIT_USER_ERROR:
            complete_record(folder, failure, code)
        if code == EXIT_USER_ERROR and cluster.is_rank_zero:
            record_end(folder, cluster, "failed", code, failure)
        where = (
            "" if code == EXIT_USER_ERROR else f"rank {failure['rank']} on {failure['host']}, in {failure['phase']}: "
        )
        log.error(f"{where}{failure['message']}")


def record_end(folder: RunFolder, cluster: Cluster, status: str, code: int, error: Failure | None) -> None:
    if cluster.is_rank_zero:
        record = read_record(folder.record)
        record.update(status=status, exit_code=code, finished_at=utc_now(), error=_of_record(error))
        write_record(folder.record, record)


def complete_record(folder: RunFolder, error: Failure | None, exit_code: int) -> None:
    """Write how the run ended where no rank lived to say so."""
    record = read_record(folder.record)
    if record.get("status") in ("running", "failed"):
        record.update(status="failed", exit_code=exit_code, finished_at=utc_now(), error=_of_record(error))
        write_record(folder.record, record)


def _of_record(error: Failure | None) -> dict[str, int | str] | None:
    if error is None:
        return None
    return {"message": error["message"], "rank": error["rank"], "host": error["host"], "phase": error["phase"]}
