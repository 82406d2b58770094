"""What a run says of its own end: one error file a rank, the record, the screen. Imports no torch."""

import json
import logging
from typing import Any

from lockstep.distributed.cluster import Cluster
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR
from lockstep.runs.files import utc_now, write_atomically
from lockstep.runs.folder import RunFolder
from lockstep.runs.full_disk import use_reserve
from lockstep.runs.record import Failure, read_record, update_record
from lockstep.runs.redact import redact_text

log = logging.getLogger(__name__)


def report_failure(facts: dict[str, Any] | None, folder: RunFolder, cluster: Cluster, code: int = EXIT_FAILED) -> None:
    """What the run knows of how it ended (None: it was stopped): this rank's error file, the screen and the record.

    A supervisor reads the error files and does the rest itself.
    """
    if facts is None:
        return record_end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
    facts = {**facts, "message": redact_text(str(facts["message"]))}
    if facts.get("kind") == "NoRoom":
        use_reserve(folder.path)
    if folder.path.is_dir():  # else rank 0 found its input refused, and took the folder away
        write_atomically(folder.rank_error(cluster.rank), lambda file: file.write(json.dumps(facts)))
    if cluster.launcher != "supervisor":
        if cluster.is_rank_zero and code != EXIT_USER_ERROR:
            complete_record(folder, facts, code)
        if code == EXIT_USER_ERROR and cluster.is_rank_zero:
            record_end(folder, cluster, "failed", code, facts)
        log.error(sentence_of(facts))


def sentence_of(facts: dict[str, Any]) -> str:
    """What goes to the screen: the message, with where it happened unless it says all there is to say."""
    if facts.get("kind") in ("UserError", "NoRoom"):
        return str(facts["message"])
    return f"rank {facts['rank']} on {facts['host']}, in {facts['phase']}: {facts['message']}"


def record_end(folder: RunFolder, cluster: Cluster, status: str, code: int, error: dict[str, Any] | None) -> None:
    if cluster.is_rank_zero:
        with update_record(folder.record) as record:
            record.status, record.exit_code, record.finished_at = status, code, utc_now()
            record.error = named(error)


def complete_record(folder: RunFolder, error: dict[str, Any] | None, exit_code: int) -> None:
    """Write how the run ended where no rank lived to say so."""
    if read_record(folder.record).status in ("running", "failed"):
        with update_record(folder.record) as record:
            record.status, record.exit_code, record.finished_at = "failed", exit_code, utc_now()
            record.error = named(error)


def named(error: dict[str, Any] | None) -> Failure:
    """What the record keeps of a rank's error file."""
    return Failure(**{key: error[key] for key in ("message", "rank", "host", "phase")}) if error else Failure()
