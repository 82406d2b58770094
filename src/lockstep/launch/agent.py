"""Start one rank for each device of this node with torch's elastic agent, the engine of torchrun.

Each rank runs the same command line and composes its own config. The agent's rendezvous is of this node alone: the
ranks of all nodes meet at MASTER_ADDR by themselves (process_group.py), where a node that is missing can be named.
"""

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

from lockstep.launch.failures import RankError, exit_code, rank_error
from lockstep.launch.launchers import AGENT, Cluster
from lockstep.runs import signals
from lockstep.runs.environment import set_variables
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK

GRACE_AFTER_STOP_S = 100  # for a coordinated checkpoint and its upload after SIGTERM or Ctrl-C
AGENT_KILLS_AFTER_S = 30  # torch's agent, from the end of the first rank on
STOPPED = (EXIT_INTERRUPTED, -signal.SIGTERM, 128 + signal.SIGTERM)
Ended = tuple[int, RankError | None, str]  # exit code, how the rank that failed first ended, its traceback


def start_ranks(cluster: Cluster, run_id: str | None, folder: Path, arguments: list[str], timeout_s: float) -> Ended:
    """Start this node's ranks and wait until all have ended; none of them is left afterwards.

    A second Ctrl-C kills them.

    Args:
        run_id: handed to the ranks; None if only node 0 knows it.
        folder: each rank but local rank 0 writes its output there, as rank<N>.log.
        arguments: the script and its command line, as sys.argv.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # what counts is said by this project's own lines
            logging.getLogger(name).setLevel(logging.CRITICAL)
    listener = socket.create_server(("127.0.0.1", 0))  # torch's own would listen on every interface
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
        multi_tenant=True, master_listen_fd=listener.detach(),
    )  # fmt: skip
    own = [os.getpid(), cluster.launcher, cluster.num_nodes, cluster.node_rank, cluster.master_addr]
    own += [port if cluster.num_nodes == 1 else cluster.master_port, folder]
    set_variables({AGENT: " ".join(map(str, own)), **({"RUN_ID": run_id} if run_id else {})})
    stopped_at: list[float] = []

    def stop(number: int, _frame: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in signals.asked:
            for child in psutil.Process().children(recursive=True):
                child.kill()
        signals.note(number)
        if not stopped_at:
            stopped_at.append(time.monotonic())
            raise SignalException(signal.Signals(number).name, signal.SIGTERM)

    with tempfile.TemporaryDirectory(prefix="lockstep-errors-") as errors:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=cluster.devices, run_id=run_id or "none", max_restarts=0,
            rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}", monitor_interval=0.1,
            rdzv_configs={"rank": 0, "timeout": int(timeout_s) + 1}, logs_specs=DefaultLogsSpecs(errors),
            signals_to_handle="SIGQUIT",  # the others raise the same exception in `stop`
            shutdown_timeout=GRACE_AFTER_STOP_S,
        )  # fmt: skip
        previous: dict[int, Any] = {}
        try:
            previous = signals.on_stop(stop)
            launch_agent(config, sys.executable, arguments)
            return EXIT_OK, None, ""
        except ChildFailedError as error:
            return _first_failure(error.failures, cluster)
        except SignalException:
            if stopped_at and time.monotonic() > stopped_at[0] + GRACE_AFTER_STOP_S:
                text = f"did not stop within {GRACE_AFTER_STOP_S} s of the signal, killed"
                return EXIT_FAILED, rank_error(cluster.rank, text, "killed"), ""
            written = min(Path(errors).rglob("error.json"), key=lambda path: path.stat().st_mtime, default=None)
            return _read(written) if written else (EXIT_INTERRUPTED, None, "")
        finally:
            del store
            for number, handler in previous.items():
                signal.signal(number, handler)


def _first_failure(failures: dict[int, ProcessFailure], cluster: Cluster) -> Ended:
    """Tell which rank failed first: the agent ends the others then, and lists them too."""
    written = {local: _read(path) for local, each in failures.items() if (path := Path(each.error_file)).is_file()}
    for ended in written.values():  # the ranks that waited for one that hangs have killed it
        if ended[1]["kind"] == "hangs":
            return ended
    first = min(each.timestamp for each in failures.values())

    def came(local: int) -> tuple[bool, bool, float]:
        code, time = failures[local].exitcode, failures[local].timestamp
        is_killed = code < 0 and code not in STOPPED
        by_agent = code == -signal.SIGKILL and time >= first + AGENT_KILLS_AFTER_S - 1
        return by_agent, code in STOPPED and local not in written, time - 2 * is_killed  # times are whole seconds

    local_rank = min(failures, key=came)
    code = failures[local_rank].exitcode
    if local_rank in written and (code > 0 or code in STOPPED):
        return written[local_rank]
    if code in STOPPED:
        return EXIT_INTERRUPTED, None, ""
    text = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return EXIT_FAILED, rank_error(cluster.rank + local_rank, text, "killed"), ""


def _read(error_file: Path) -> tuple[int, RankError, str]:
    message = json.loads(error_file.read_text())["message"]
    failure: RankError = json.loads(message["message"].partition(": ")[2])
    return exit_code(failure), failure, message["extraInfo"]["py_callstack"]
