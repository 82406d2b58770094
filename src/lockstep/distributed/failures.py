"""What a run says of its own end: one error file a rank, the record, the screen. Imports no torch."""

import json
import logging
from typing import Any

from lockstep.distributed.cluster import Cluster
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR
from lockstep.runs.files import utc_now, write_atomically
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import read_record, write_record
from lockstep.runs.redact import redact_text

log = logging.getLogger(__name__)


def report_failure(facts: dict[str, Any] | None, folder: RunFolder, cluster: Cluster, code: int = EXIT_FAILED) -> None:
    """What the run knows of how it ended (None: it was stopped): this rank's error file, the screen and the record.

    A supervisor reads the error files and does the rest itself.
    """
    if facts is None:
        return record_end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
    facts = {**facts, "message": redact_text(str(facts["message"]))}
    write_atomically(folder.rank_error(cluster.rank), lambda file: file.write(json.dumps(facts)))
    if not cluster.is_supervised:
        if cluster.is_rank_zero and code != EXIT_USER_ERROR:
            complete_record(folder, facts, code)
        if code == EXIT_USER_ERROR and cluster.is_rank_zero:
            record_end(folder, cluster, "failed", code, facts)
        where = "" if code == EXIT_USER_ERROR else f"rank {facts['rank']} on {facts['host']}, in {facts['phase']}: "
        log.error(f"{where}{facts['message']}")


def record_end(folder: RunFolder, cluster: Cluster, status: str, code: int, error: dict[str, Any] | None) -> None:
    if cluster.is_rank_zero:
        record = read_record(folder.record)
        named = {key: error[key] for key in ("message", "rank", "host", "phase")} if error else None
        record.update(status=status, exit_code=code, finished_at=utc_now(), error=named)
        write_record(folder.record, record)


def complete_record(folder: RunFolder, error: dict[str, Any] | None, exit_code: int) -> None:
    """Write how the run ended where no rank lived to say so."""
    record = read_record(folder.record)
    if record.get("status") in ("running", "failed"):
        record.update(status="failed", exit_code=exit_code, finished_at=utc_now())
        record["error"] = {key: error[key] for key in ("message", "rank", "host", "phase")} if error else None
        write_record(folder.record, record)
