"""Start one rank for each device of this node with torch's elastic agent, the engine of torchrun.

Each rank runs the same command line and composes its own config. The agent's rendezvous is of this
node alone: the ranks of all nodes meet at MASTER_ADDR by themselves (meeting.py), where a
node that is missing can be named.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from lockstep.process import signals
from lockstep.process.environment import set_variables
from lockstep.process.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from lockstep.ranks.failures import RankError, RanksEnd, choose_exit_code, describe_error
from lockstep.ranks.find import AGENT, Cluster

# After SIGTERM or Ctrl-C the ranks save a checkpoint together and upload it within this time.
GRACE_AFTER_STOP_S = 100
# torch's agent kills the other ranks this long after the first one has ended.
AGENT_KILLS_AFTER_S = 30
# Ends of ranks are known in whole seconds. A killed rank counts as this much earlier, because the
# failures of other ranks that it causes may come in the same second.
KILL_LEAD_S = 2
STOPPED_EXIT_CODES = (EXIT_INTERRUPTED, -signal.SIGTERM, 128 + signal.SIGTERM)


def start_ranks(
    cluster: Cluster, run_id: str | None, folder: Path, arguments: list[str], timeout_s: float
) -> RanksEnd:
    """Start this node's ranks and wait until all have ended; none of them is left afterwards.

    A second Ctrl-C kills them.

    Args:
        run_id: handed to the ranks; None if only node 0 knows it.
        folder: each rank but local rank 0 writes its output there, as rank<N>.log.
        arguments: the script and its command line, as sys.argv.
    """
    _silence_torch()
    store, port = _serve_store(timeout_s)
    _describe_to_ranks(cluster, run_id, folder, port)
    stop_handler = _StopHandler()

    with tempfile.TemporaryDirectory(prefix="lockstep-errors-") as errors:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=cluster.ranks_per_node,
            run_id=run_id or "none",
            max_restarts=0,
            rdzv_backend="static",
            rdzv_endpoint=f"127.0.0.1:{port}",
            monitor_interval=0.1,
            rdzv_configs={"rank": 0, "timeout": int(timeout_s) + 1},
            logs_specs=DefaultLogsSpecs(errors),
            # `stop_handler` raises the same exception for the other signals.
            signals_to_handle="SIGQUIT",
            shutdown_timeout=GRACE_AFTER_STOP_S,
        )
        previous: dict[int, Any] = {}
        try:
            previous = signals.install_stop_handler(stop_handler)
            launch_agent(config, sys.executable, arguments)
            return RanksEnd(EXIT_OK)
        except ChildFailedError as error:
            return _find_first_failure(error.failures, cluster)
        except SignalException:
            return _describe_stopped_ranks(stop_handler, Path(errors), cluster)
        finally:
            del store
            signals.restore_handlers(previous)


def _silence_torch() -> None:
    """Hide the log lines of torch's agent, because Lockstep logs what counts itself."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _serve_store(timeout_s: float) -> tuple[TCPStore, int]:
    """Serve the ranks' store at a free port, which only this machine can reach.

    A store that torch opens itself listens on every interface.

    Returns:
        The store, which lives as long as it is referenced, and its port.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _describe_to_ranks(cluster: Cluster, run_id: str | None, folder: Path, port: int) -> None:
    """Set the variables by which each rank finds its agent, its cluster and its run."""
    description = [
        os.getpid(),
        cluster.launcher,
        cluster.num_nodes,
        cluster.node_rank,
        cluster.master_addr,
        port if cluster.num_nodes == 1 else cluster.master_port,
        folder,
    ]
    set_variables({AGENT: " ".join(map(str, description))})
    if run_id:
        set_variables({"RUN_ID": run_id})


class _StopHandler:
    """A signal handler: the first signal stops the ranks, a second Ctrl-C kills them."""

    def __init__(self) -> None:
        self.stopped_at: float | None = None

    def __call__(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in signals.received:
            _kill_children()
        signals.record_signal(number)
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            raise SignalException(signal.Signals(number).name, signal.SIGTERM)

    def is_overdue(self) -> bool:
        return (
            self.stopped_at is not None and time.monotonic() > self.stopped_at + GRACE_AFTER_STOP_S
        )


def _kill_children() -> None:
    """Kill all processes below this one; some of them may have just ended."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _describe_stopped_ranks(
    stop_handler: _StopHandler, errors_folder: Path, cluster: Cluster
) -> RanksEnd:
    """Return how the ranks ended after a signal; one may have failed or not stopped in time."""
    if stop_handler.is_overdue():
        text = f"did not stop within {GRACE_AFTER_STOP_S} s of the signal, killed"
        return RanksEnd(EXIT_FAILED, describe_error(cluster.rank, text, "killed"))
    files = sorted(errors_folder.rglob("error.json"), key=lambda path: path.stat().st_mtime)
    if files:
        return _read_error_file(files[0])
    return RanksEnd(EXIT_INTERRUPTED)


def _find_first_failure(failures: dict[int, ProcessFailure], cluster: Cluster) -> RanksEnd:
    """Return the failure of the rank that failed first.

    The agent then ends the other ranks, and lists them as failed, too.

    Args:
        failures: the failures by local rank.
    """
    reports: dict[int, RanksEnd] = {}
    for local_rank, failure in failures.items():
        file = Path(failure.error_file)
        if file.is_file():
            reports[local_rank] = _read_error_file(file)
    # A rank that waited for a hanging rank has killed it, and reports it.
    for report in reports.values():
        if report.failure and report.failure["kind"] == "hangs":
            return report

    local_rank = _find_first_failed_rank(failures, set(reports))
    code = failures[local_rank].exitcode
    is_stopped = code in STOPPED_EXIT_CODES
    if local_rank in reports and (code > 0 or is_stopped):
        return reports[local_rank]
    if is_stopped:
        return RanksEnd(EXIT_INTERRUPTED)
    message = describe_exit(code)
    return RanksEnd(EXIT_FAILED, describe_error(cluster.rank + local_rank, message, "killed"))


def describe_exit(code: int) -> str:
    """Return the message about a rank that has reported no error."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _find_first_failed_rank(failures: dict[int, ProcessFailure], reporting_ranks: set[int]) -> int:
    """Return the local rank whose end caused the ends of the others.

    It is the earliest one that failed by itself. If there is none, it is the earliest one that was
    stopped, and at last one that the agent has killed.

    Args:
        reporting_ranks: the local ranks that have written an error.
    """
    agent_kills_at_s = (
        AGENT_KILLS_AFTER_S - 1 + min(failure.timestamp for failure in failures.values())
    )

    def order_of_cause(local_rank: int) -> tuple[bool, bool, float]:
        code = failures[local_rank].exitcode
        ended_at_s = failures[local_rank].timestamp
        is_stopped = code in STOPPED_EXIT_CODES
        lead_s = KILL_LEAD_S if code < 0 and not is_stopped else 0
        return (
            code == -signal.SIGKILL and ended_at_s >= agent_kills_at_s,
            is_stopped and local_rank not in reporting_ranks,
            ended_at_s - lead_s,
        )

    return min(failures, key=order_of_cause)


def _read_error_file(error_file: Path) -> RanksEnd:
    message = json.loads(error_file.read_text())["message"]
    failure: RankError = json.loads(message["message"].partition(": ")[2])
    return RanksEnd(choose_exit_code(failure), failure, message["extraInfo"]["py_callstack"])
