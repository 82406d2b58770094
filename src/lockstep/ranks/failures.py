"""The end of a rank: which rank failed first, the error file, the run record and the last line.

Each rank publishes its error in the torch.distributed store. A rank that died or hangs publishes
nothing, but makes the collectives of all other ranks fail: the rank that has then published nothing
is reported as the culprit.
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from lockstep.process.environment import environment
from lockstep.process.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    Interrupted,
    UserError,
    as_disk_full_error,
)
from lockstep.process.files import utc_now
from lockstep.process.redact import redact_text
from lockstep.ranks.find import Cluster
from lockstep.ranks.heartbeat import Epochs, LostRank
from lockstep.records.folder import RunFolder
from lockstep.records.record import (
    JsonObject,
    has_trained,
    locked_record,
    read_record,
    write_record,
)

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

UNCOMPILED_HINT = "trainer.compile=false trains without torch.compile."
# Advice by the exception's class
HINTS = {
    "OutOfMemoryError": (
        "A device takes half at a time with trainer.accumulate_grad_batches=2 (the same global "
        "batch), less with trainer.precision=bf16-mixed; data.global_batch_size=max finds what "
        "fits. nvidia-smi shows what else is on the GPU."
    ),
    "BackendCompilerFailed": UNCOMPILED_HINT,
    "InductorError": UNCOMPILED_HINT,
    "InternalTorchDynamoError": UNCOMPILED_HINT,
}
# Exceptions whose message is a sentence
SENTENCE_KINDS = ("UserError", "Diverged", "DiskFullError")
# The other ranks have this time to publish their error, or that they have lost a peer.
PEER_TIMEOUT_S = 6.0
POLL_INTERVAL_S = 0.05
# A RuntimeError of the network has one of these in its text. torch has no class for it.
NETWORK_ERRORS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out",
    "timeout",
    "gloo",
    "nccl",
)


class RankError(TypedDict):
    """The failure of a rank, as JSON between the ranks.

    Attributes:
        phase: the phase in the run record; empty if it is not known yet.
        kind: the exception's class, or "killed", "lost" or "hangs".
    """

    rank: int
    host: str
    phase: str
    message: str
    kind: str


class RanksEnd(NamedTuple):
    """The end of a node's ranks: their exit code, the first failure and its traceback."""

    exit_code: int
    failure: RankError | None = None
    callstack: str = ""


def describe_error(
    rank: int, message: str | BaseException, kind: str = "", phase: str = "", host: str = ""
) -> RankError:
    """Return the description of how a rank failed, from its exception or from a message."""
    if isinstance(message, BaseException):
        kind = "UserError" if isinstance(message, UserError) else type(message).__name__
        message = str(message) if kind in SENTENCE_KINDS else f"{kind}: {message}"
    return {
        "rank": rank,
        "host": host or socket.gethostname(),
        "phase": phase,
        "message": message,
        "kind": kind,
    }


def explain_failure(
    error: BaseException,
    store: "Store",
    cluster: Cluster,
    hosts: list[str],
    epochs: Callable[[], list[Epochs]] = list,
) -> BaseException:
    """Return what the exception of a rank means, with the rank that failed first.

    Args:
        store: the store in which the ranks of this start publish their errors.
        hosts: the name of each rank's host.
        epochs: returns the last epochs of each rank, as Heartbeat.gather_epochs does.

    Returns:
        The exception itself, with `culprit`, or Interrupted if another rank was stopped.
    """
    is_agreed = isinstance(error, Interrupted) and error.is_agreed
    if is_agreed or hasattr(error, "culprit"):
        return error
    culprit = _CulpritSearch(error, store, cluster, hosts, epochs).find_first_error()
    if culprit["kind"] == "Interrupted" and not isinstance(error, Interrupted):
        stop = Interrupted("another rank was asked to stop")
        stop.is_of_other_nodes = True
        stop.__cause__ = error
        return stop
    error.culprit = culprit  # type: ignore[attr-defined]
    return error


@dataclass
class _CulpritSearch:
    """Publishes the error of this rank, and finds the run's first one."""

    error: BaseException
    store: "Store"
    cluster: Cluster
    hosts: list[str]
    epochs: Callable[[], list[Epochs]]

    @property
    def phase(self) -> str:
        return getattr(self.error, "phase", "start")

    @property
    def other_ranks(self) -> list[int]:
        return [rank for rank in range(self.cluster.world_size) if rank != self.cluster.rank]

    def find_first_error(self) -> RankError:
        """Return the first error of the run; wait PEER_TIMEOUT_S for all ranks together."""
        if isinstance(self.error, LostRank) and self.error.rank == 0:
            # The process of rank 0 may hold the store, which would not answer.
            return self._describe_silent_rank(0, str(self.error))
        try:
            self.store.set_timeout(timedelta(seconds=PEER_TIMEOUT_S))
            return self._agree_on_first()
        except RuntimeError:
            message = (
                "died, was stopped, or lost its host or network: the store that it holds cannot "
                "be reached"
            )
            return describe_error(0, message, "lost", self.phase, self.hosts[0])

    def _agree_on_first(self) -> RankError:
        rank = self.cluster.rank
        self.store.set(f"reported/{rank}", "")
        if isinstance(self.error, LostRank):
            return self._publish(self._describe_silent_rank(self.error.rank, str(self.error)))
        if self._is_network_error():
            return self._publish(self._find_lost_peer() or self._describe_error_of_this_rank())
        first_error = self._publish(self._describe_error_of_this_rank())
        if rank == 0:
            # This process may hold the store: let the others read the error before it ends.
            self._wait_for_keys([f"reported/{other}" for other in self.other_ranks])
        return first_error

    def _describe_error_of_this_rank(self) -> RankError:
        rank = self.cluster.rank
        return describe_error(rank, self.error, phase=self.phase, host=self.hosts[rank])

    def _describe_silent_rank(self, rank: int, message: str) -> RankError:
        return describe_error(rank, message, "hangs", self.phase, self.hosts[rank])

    def _publish(self, error: RankError) -> RankError:
        """Publish an error unless another rank was first; return the first one."""
        first_error: RankError = json.loads(self.store.compare_set("first", "", json.dumps(error)))
        return first_error

    def _is_network_error(self) -> bool:
        """Return whether a collective failed because of another rank.

        It is judged by the error text of gloo, NCCL or the store, which have no class of their own.
        """
        from torch.distributed import DistError

        if isinstance(self.error, DistError):
            return True
        text = str(self.error).lower()
        if not isinstance(self.error, RuntimeError) or text.startswith("dataloader timed out"):
            # A DataLoader waits for its own workers.
            return False
        return any(word in text for word in NETWORK_ERRORS)

    def _find_lost_peer(self) -> RankError | None:
        """Return the error of a rank that has published nothing, or of ranks with unequal epochs.

        None if a rank has published an error, or no rank is silent.
        """
        if self._wait_for_keys(["first"]):
            return None
        sentence = describe_unequal_epochs(self.epochs())
        if sentence:
            return describe_error(self.cluster.rank, UserError(sentence), phase=self.phase)
        silent_ranks = [
            rank for rank in self.other_ranks if not self.store.check([f"reported/{rank}"])
        ]
        if not silent_ranks:
            return None
        text = str(self.error).lower()
        if "timeout" in text or "timed out" in text:
            file = f"stack-rank{silent_ranks[0]}.txt"
            message = f"hangs: the other ranks waited for it; see {file}"
            return self._describe_silent_rank(silent_ranks[0], message)
        message = "died or was cut off without an error"
        lost_rank = silent_ranks[0]
        return describe_error(lost_rank, message, "lost", self.phase, self.hosts[lost_rank])

    def _wait_for_keys(self, keys: list[str]) -> bool:
        """Wait until all keys are in the store; return whether they came within PEER_TIMEOUT_S."""
        deadline = time.monotonic() + PEER_TIMEOUT_S
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True


def describe_unequal_epochs(ranks: list[Epochs]) -> str:
    """Return a sentence if the ranks have unequal numbers of batches in an epoch, else "".

    A rank with more batches waits for the gradients of a rank that has no more.
    """
    shortest: dict[int, tuple[int, int]] = {}  # batches of an epoch that is over, and the rank
    for rank, epochs in enumerate(ranks):
        for epoch, batches, is_over in epochs:
            if is_over:
                shortest[epoch] = min(shortest.get(epoch, (batches, rank)), (batches, rank))
    for rank, epochs in enumerate(ranks):
        for epoch, batches, is_over in epochs:
            fewest, short_rank = shortest.get(epoch, (batches, rank))
            if batches > fewest:
                number = f"{batches}" if is_over else f"at least {batches}"
                return (
                    f"Rank {short_rank} has had {fewest} training batches in epoch {epoch + 1}, "
                    f"rank {rank} {number}: each rank needs as many as the others. Pass "
                    f"trainer.limit_train_batches={fewest}, or let the data module give all ranks "
                    "as many, by leaving the rest out or repeating batches."
                )
    return ""


def report_failure(error: BaseException, cluster: Cluster, folder: RunFolder | None) -> int:
    """Report the exception that ended this rank; return the exit code."""
    if isinstance(error, Interrupted):
        _end_interrupted(error, cluster, folder)
        return EXIT_INTERRUPTED

    error = as_disk_full_error(error, folder.path if folder else Path()) or error
    phase = getattr(error, "phase", None) or read_phase(folder)
    error_of_this_rank = describe_error(cluster.rank, error, phase=phase)
    first_error: RankError = getattr(error, "culprit", error_of_this_rank)
    first_error["message"] = redact_text(first_error["message"])

    if cluster.has_agent:
        _tell_agent(error, first_error)
        return choose_exit_code(error_of_this_rank)
    if cluster.is_rank_zero and folder is not None:
        record_end(folder, choose_exit_code(first_error), first_error)
    is_of_this_rank = first_error["rank"] == cluster.rank
    log_failure(first_error, traceback.format_exc() if is_of_this_rank else "")
    return choose_exit_code(error_of_this_rank)


def _end_interrupted(error: Interrupted, cluster: Cluster, folder: RunFolder | None) -> None:
    """Record on rank 0 that the run was interrupted, and say how it goes on."""
    if not cluster.is_rank_zero or folder is None or not folder.record_path.exists():
        return
    if not cluster.has_agent:
        record_end(folder, EXIT_INTERRUPTED)
    # Without an agreement another rank may have failed, which the agent reports.
    if error.is_agreed or not cluster.has_agent:
        begins_anew = has_trained(folder) and not any(folder.checkpoints.glob("*.json"))
        advice = f"resume={folder.run_id} continues it"
        if begins_anew:
            advice = "no checkpoint was saved"
        log.info(f"Interrupted ({error}): {advice}.")


def _tell_agent(error: BaseException, failure: RankError) -> None:
    """Write the error file for Lockstep's agent, and kill a rank of this host that hangs."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        get_error_handler().record_exception(RuntimeError(json.dumps(failure)))
    except OSError:
        # The disk is full. torch's agent would fail to read a file that was written in part.
        with contextlib.suppress(OSError):
            Path(environment()["TORCHELASTIC_ERROR_FILE"]).unlink()
        log_failure(failure, traceback.format_exc())
    pid = getattr(error, "hung_pid", None)
    if pid:
        # torch's agent would kill it only after 30 s.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def choose_exit_code(failure: RankError) -> int:
    """Return the exit code of a process that ends because of a failure."""
    return EXIT_USER_ERROR if failure["kind"] == "UserError" else EXIT_FAILED


def read_phase(folder: RunFolder | None) -> str:
    """Return the phase of the run record: start, training, validation, test or end."""
    if folder is None or not folder.record_path.exists():
        return "start"
    return read_record(folder.record_path).phase or "start"


def log_failure(failure: RankError, callstack: str) -> None:
    """Print the traceback, then the message with the rank, its host and its phase.

    A UserError and a full disk are told by the message alone.
    """
    text = failure["message"]
    kind = failure["kind"]
    if kind not in SENTENCE_KINDS:
        # A traceback may quote a request with credentials.
        sys.stderr.write(redact_text(callstack))
    if kind not in ("UserError", "DiskFullError"):
        place = f"rank {failure['rank']} on {failure['host']}, in {failure['phase']}"
        text = f"{place}: {text}".rstrip()
    if kind in HINTS:
        text = f"{text}\n{HINTS[kind]}"
    log.error(text)


def record_end(folder: RunFolder, code: int, failure: RankError | None = None) -> None:
    """Complete the record of a run that failed or, without a failure, was interrupted."""
    if not folder.record_path.exists():
        return
    with locked_record(folder.record_path):
        record = read_record(folder.record_path)
        if record.status == "finished" or (failure and record.status == "interrupted"):
            return
        details = {key: value for key, value in (failure or {}).items() if key != "kind"}
        record.status = "failed" if failure else "interrupted"
        record.exit_code = code
        record.finished_at = utc_now()
        record.error = JsonObject(details)
        write_record(folder.record_path, record)
