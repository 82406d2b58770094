"""What a run says of its own end: one error file a rank, the record, the screen. Imports no torch."""

import json
import logging
from typing import TypedDict

from lockstep.distributed.cluster import Cluster
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR
from lockstep.runs.files import utc_now, write_atomically
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import Failure, read_record, update_record
from lockstep.runs.redact import redact_text

log = logging.getLogger(__name__)

NO_MEMORY = (
    "A device takes half at a time with trainer.accumulate_grad_batches=2 (the same global batch), less with "
    "trainer.precision=bf16-mixed; data.global_batch_size=max finds what fits. What else is on the GPU: nvidia-smi."
)


class RankError(TypedDict):
    """How a rank ended, as its error file holds it."""

    rank: int
    host: str
    phase: str
    message: str
    kind: str  # the exception's class, or killed
    time: float  # seconds since 1970


def report_failure(failure: RankError | None, folder: RunFolder, cluster: Cluster, code: int = EXIT_FAILED) -> None:
    """What the run knows of how it ended (None: it was stopped): this rank's error file, the screen and the record.

    A supervisor reads the error files and does the rest itself.
    """
    if failure is None:
        return record_end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
    failure = {**failure, "message": redact_text(str(failure["message"]))}
    if folder.path.is_dir():  # else rank 0 found its input refused, and took the folder away
        write_atomically(folder.rank_error(cluster.rank), lambda file: file.write(json.dumps(failure)))
    if not cluster.is_supervised:
        if cluster.is_rank_zero and code != EXIT_USER_ERROR:
            complete_record(folder, failure, code)
        if code == EXIT_USER_ERROR and cluster.is_rank_zero:
            record_end(folder, cluster, "failed", code, failure)
        log.error(sentence_of(failure))


def recorded_collectives(folder: RunFolder) -> dict[str, str]:
    """Variables that torch reads when the process group is made: NCCL's last collectives, kept for the run folder."""
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # A GPU that is lost is said by the step that meets it: NCCL's watchdog would abort the process before that
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.path / folder.nccl_trace(0).name.removesuffix("0")),
    }


def sentence_of(failure: RankError) -> str:
    """What goes to the screen: the message, with where it happened unless it says all there is to say."""
    if failure.get("kind") in ("UserError", "NoRoom"):
        return failure["message"]
    said = f"rank {failure['rank']} on {failure['host']}, in {failure['phase']}: {failure['message']}"
    return f"{said.rstrip()}\n{NO_MEMORY}" if failure.get("kind") == "OutOfMemoryError" else said


def record_end(folder: RunFolder, cluster: Cluster, status: str, code: int, error: RankError | None) -> None:
    if cluster.is_rank_zero:
        with update_record(folder.record) as record:
            record.status, record.exit_code, record.finished_at = status, code, utc_now()
            record.error = _of_record(error)


def complete_record(folder: RunFolder, error: RankError | None, exit_code: int) -> None:
    """Write how the run ended where no rank lived to say so."""
    if read_record(folder.record).status in ("running", "failed"):
        with update_record(folder.record) as record:
            record.status, record.exit_code, record.finished_at = "failed", exit_code, utc_now()
            record.error = _of_record(error)


def _of_record(error: RankError | None) -> Failure:
    """What the record keeps of a rank's error file."""
    if error is None:
        return Failure()
    return Failure(message=error["message"], rank=error["rank"], host=error["host"], phase=error["phase"])
