"""How a rank ends: its error file, the run record and the last line on the screen. Imports no torch."""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TypedDict

from lockstep.launch.launchers import Cluster
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, Diverged, Interrupted, UserError
from lockstep.runs.files import utc_now
from lockstep.runs.folder import RunFolder
from lockstep.runs.full_disk import NoRoom, no_room
from lockstep.runs.record import Failure, read_record, update_record
from lockstep.runs.redact import redact_text

log = logging.getLogger(__name__)

NO_MEMORY = (
    "A device takes half at a time with trainer.accumulate_grad_batches=2 (the same global batch), less with "
    "trainer.precision=bf16-mixed; data.global_batch_size=max finds what fits. What else is on the GPU: nvidia-smi."
)


PLAIN = (UserError, Diverged, NoRoom)  # whose message is a sentence


class RankError(TypedDict):
    """How a rank ended.

    kind: the class of the exception, or killed; time: seconds since 1970.
    """

    rank: int
    host: str
    phase: str
    message: str
    kind: str
    time: float


class RankFailed(Exception):
    """Carries a RankError as JSON into the error file that torch's agent reads."""


def end_of(error: Exception, cluster: Cluster, folder: RunFolder | None) -> int:
    """Report the exception that ended this rank; return the exit code."""
    if isinstance(error, Interrupted):
        return _interrupted(error, cluster, folder)
    if full := no_room(error, folder.path if folder else Path()):
        error = full
    own: RankError = {
        "rank": cluster.rank, "host": socket.gethostname(), "phase": getattr(error, "phase", None) or phase_of(folder),
        "message": message_of(error), "kind": type(error).__name__, "time": time.time(),
    }  # fmt: skip
    failure: RankError = getattr(error, "culprit", None) or own
    failure["message"] = redact_text(failure["message"])
    code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED
    if cluster.has_agent:
        from lockstep.launch.process_group import write_error_file

        write_error_file(RankFailed(json.dumps(failure)))
        if pid := getattr(error, "hung_pid", None):  # the agent would give it 30 s
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return code
    if not isinstance(error, PLAIN) and failure["rank"] == cluster.rank:  # else this one only lost its peers
        sys.stderr.write(redact_text(traceback.format_exc()))  # a library may quote a request
    if cluster.is_rank_zero and folder is not None:
        record_failure(folder, failure, code)
    log.error(sentence_of(failure))
    return code


def message_of(error: BaseException) -> str:
    return str(error) if isinstance(error, PLAIN) else f"{type(error).__name__}: {error}"


def _interrupted(error: Interrupted, cluster: Cluster, folder: RunFolder | None) -> int:
    if cluster.is_rank_zero and folder is not None and folder.record.exists():
        if not cluster.has_agent:
            record_interruption(folder)
        if error.agreed or not cluster.has_agent:  # else another rank may have failed
            log.info(f"Interrupted ({error}): resume={folder.run_id} goes on.")
    return EXIT_INTERRUPTED


def phase_of(folder: RunFolder | None) -> str:
    """Return the phase of the run record: start, training, validation, test or end."""
    return (read_record(folder.record).phase if folder and folder.record.exists() else None) or "start"


def sentence_of(failure: RankError) -> str:
    """Return the message with the place where it happened, unless it says all that there is to say."""
    if failure["kind"] in ("UserError", "NoRoom"):
        return failure["message"]
    text = f"rank {failure['rank']} on {failure['host']}, in {failure['phase']}: {failure['message']}".rstrip()
    return f"{text}\n{NO_MEMORY}" if failure["kind"] == "OutOfMemoryError" else text


def record_failure(folder: RunFolder, failure: RankError, code: int) -> None:
    if folder.record.exists() and read_record(folder.record).status in ("running", "failed"):
        error = Failure(message=failure["message"], rank=failure["rank"], host=failure["host"], phase=failure["phase"])
        with update_record(folder.record) as record:
            record.status, record.exit_code, record.finished_at, record.error = "failed", code, utc_now(), error


def record_interruption(folder: RunFolder, code: int = EXIT_INTERRUPTED) -> None:
    if folder.record.exists() and read_record(folder.record).status in ("running", "failed", "interrupted"):
        with update_record(folder.record) as record:
            record.status, record.exit_code, record.finished_at = "interrupted", code, utc_now()
            record.error = Failure()


def recorded_collectives(folder: RunFolder) -> dict[str, str]:
    """Return the variables by which NCCL's flight recorder keeps the last collectives for the run folder."""
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # The step that meets a lost GPU raises an exception: NCCL's watchdog would abort the process before that
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.path / folder.nccl_trace(0).name.removesuffix("0")),
    }
