"""The end of a rank: which rank failed first, the error file, the run record and the last line on the screen.

Each rank publishes its error in the torch.distributed store. A rank that died or hangs publishes nothing, but makes
the collectives of all other ranks fail: the rank that has then published nothing is reported as the culprit.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.launch.launchers import Cluster
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, Interrupted, UserError, no_room
from lockstep.runs.files import utc_now
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import JsonObject, locked_record, read_record, write_record
from lockstep.runs.redact import redact_text

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

UNCOMPILED = "trainer.compile=false trains without torch.compile."
HINTS = {  # by the exception's class
    "OutOfMemoryError": "A device takes half at a time with trainer.accumulate_grad_batches=2 (the same global batch), "
    "less with trainer.precision=bf16-mixed; data.global_batch_size=max finds what fits. What else is on the GPU: "
    "nvidia-smi.",
    **dict.fromkeys(("BackendCompilerFailed", "InductorError", "InternalTorchDynamoError"), UNCOMPILED),
}
PLAIN = ("UserError", "Diverged", "NoRoom")  # exceptions whose message is a sentence
PEER_TIMEOUT_S = 6.0  # for the other ranks to publish their error, or that they have lost a peer
NETWORK_ERRORS = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "gloo", "nccl")
RankError = dict[str, Any]  # rank, host, phase, message; kind: the exception's class, or "killed", "lost" or "hangs"


def rank_error(rank: int, message: str | BaseException, kind: str = "", phase: str = "", host: str = "") -> RankError:
    if isinstance(message, BaseException):
        kind = "UserError" if isinstance(message, UserError) else type(message).__name__
        message = str(message) if kind in PLAIN else f"{kind}: {message}"
    return {"rank": rank, "host": host or socket.gethostname(), "phase": phase, "message": message, "kind": kind}


def with_culprit(error: BaseException, store: "Store", cluster: Cluster, hosts: list[str]) -> BaseException:
    """Return what the exception of a rank means: itself, with `culprit`, or Interrupted if another rank was stopped.

    Args:
        store: of this start of the run.
        hosts: the name of each rank's host.
    """
    if isinstance(error, Interrupted) and error.agreed or hasattr(error, "culprit"):
        return error
    culprit = _first_error(error, store, cluster, hosts)
    if culprit["kind"] == "Interrupted" and not isinstance(error, Interrupted):
        stop = Interrupted("another rank was asked to stop")
        stop.elsewhere, stop.__cause__ = True, error
        return stop
    error.culprit = culprit  # type: ignore[attr-defined]
    return error


def _first_error(error: BaseException, store: "Store", cluster: Cluster, hosts: list[str]) -> RankError:
    """Publish this rank's error and return the run's first one; waits PEER_TIMEOUT_S for all ranks together."""
    from torch.distributed import DistError

    def wait_for(keys: list[str]) -> bool:
        deadline = time.monotonic() + PEER_TIMEOUT_S
        while not (found := store.check(keys)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    text, phase = str(error).lower(), getattr(error, "phase", "start")
    own = rank_error(cluster.rank, error, phase=phase, host=hosts[cluster.rank])
    others = [rank for rank in range(cluster.world_size) if rank != cluster.rank]
    # Whether a collective failed because of another rank, judged by the error text of gloo, NCCL or the store
    is_network = isinstance(error, RuntimeError) and any(words in text for words in NETWORK_ERRORS)
    try:
        store.set_timeout(timedelta(seconds=PEER_TIMEOUT_S))
        if is_network or isinstance(error, DistError):
            store.set(f"lost-peer/{cluster.rank}", "")
            silent = [] if wait_for(["first"]) else [r for r in others if not store.check([f"lost-peer/{r}"])]
            for rank in silent[:1]:
                hangs = "timeout" in text or "timed out" in text
                words = f"hangs: the other ranks waited for it; see stack-rank{rank}.txt"
                words = words if hangs else "died or was cut off without an error"
                own = rank_error(rank, words, "hangs" if hangs else "lost", phase, hosts[rank])
        elif cluster.rank == 0:  # this process may hold the store: the others read it first
            own = json.loads(store.compare_set("first", "", json.dumps(own)))
            wait_for([f"lost-peer/{rank}" for rank in others])
            return own
        return json.loads(store.compare_set("first", "", json.dumps(own)))
    except (RuntimeError, DistError):
        text = "died, was stopped, or lost its host or network: the store that it holds cannot be reached"
        return rank_error(0, text, "lost", phase, hosts[0])


def end_of(error: Exception, cluster: Cluster, folder: RunFolder | None) -> int:
    """Report the exception that ended this rank; return the exit code."""
    if isinstance(error, Interrupted):
        if cluster.is_rank_zero and folder is not None and folder.record.exists():
            if not cluster.has_agent:
                record_end(folder, EXIT_INTERRUPTED)
            if error.agreed or not cluster.has_agent:  # else another rank may have failed
                log.info(f"Interrupted ({error}): resume={folder.run_id} continues it.")
        return EXIT_INTERRUPTED
    error = no_room(error, folder.path if folder else Path()) or error
    own = rank_error(cluster.rank, error, phase=getattr(error, "phase", None) or phase_of(folder))
    failure: RankError = getattr(error, "culprit", own)
    failure["message"] = redact_text(failure["message"])
    if cluster.has_agent:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(RuntimeError(json.dumps(failure)))
        if pid := getattr(error, "hung_pid", None):  # kill it now: torch's agent would wait 30 s before it does
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        if cluster.is_rank_zero and folder is not None:
            record_end(folder, exit_code(own), failure)
        log_failure(failure, traceback.format_exc() if failure["rank"] == cluster.rank else "")
    return exit_code(own)


def exit_code(failure: RankError) -> int:
    return EXIT_USER_ERROR if failure["kind"] == "UserError" else EXIT_FAILED


def phase_of(folder: RunFolder | None) -> str:
    """Return the phase of the run record: start, training, validation, test or end."""
    return (read_record(folder.record).phase if folder and folder.record.exists() else None) or "start"


def log_failure(failure: RankError, callstack: str) -> None:
    """Print the traceback, then the message with the place where it happened, unless it says all that there is."""
    text, kind = failure["message"], failure["kind"]
    if kind not in PLAIN:
        sys.stderr.write(redact_text(callstack))  # it may quote a request with credentials
    if kind not in ("UserError", "NoRoom"):
        text = f"rank {failure['rank']} on {failure['host']}, in {failure['phase']}: {text}".rstrip()
    log.error(f"{text}\n{HINTS[kind]}" if kind in HINTS else text)


def record_end(folder: RunFolder, code: int, failure: RankError | None = None) -> None:
    """Complete the record of a run that failed or, without a failure, was interrupted."""
    if not folder.record.exists():
        return
    with locked_record(folder.record):
        record = read_record(folder.record)
        if record.status == "finished" or (failure and record.status == "interrupted"):
            return
        where = {key: value for key, value in (failure or {}).items() if key != "kind"}
        record.status = "failed" if failure else "interrupted"
        record.exit_code = code
        record.finished_at = utc_now()
        record.error = JsonObject(where)
        write_record(folder.record, record)
