"""Start this node's ranks, each with the same command line, and finish the run at their end."""

import logging
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lockstep.process import signals
from lockstep.process.environment import environment
from lockstep.process.errors import EXIT_INTERRUPTED
from lockstep.ranks import failures
from lockstep.ranks.find import Cluster, find_requested_run_id
from lockstep.records.config import Config
from lockstep.records.folder import RunFolder
from lockstep.runs.finishing import decide_exit_code, finish_run
from lockstep.runs.run_lock import choose_run_folder, hold_run_lock

log = logging.getLogger(__name__)


def start_ranks(config: Config, cluster: Cluster) -> int:
    """Start this node's ranks with torch's agent; return the exit code when they have ended."""
    run_id = find_requested_run_id(config, environment())
    is_first_node = cluster.node_rank == 0
    with ExitStack() as exit_stack:
        if is_first_node:
            folder, _ = choose_run_folder(config, run_id)
            run_id = folder.run_id
            exit_stack.enter_context(hold_run_lock(folder))
        else:
            # Only the ranks of this node learn which run it is, when they meet those of node 0.
            # Their output goes to a temporary folder.
            output = exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-ranks-"))
            folder = RunFolder(Path(output))
        record_end = partial(failures.record_end, folder, signals.INTERRUPTED_AT_ONCE)
        signals.set_force_exit_action(record_end)

        end = _run_agent(config, cluster, run_id, folder)

        failure = end.failure
        if failure:
            failure["phase"] = failure["phase"] or failures.read_phase(folder)
        if is_first_node:
            if end.exit_code:
                failures.record_end(folder, end.exit_code, failure)
            code = finish_run(config, cluster, folder, end.exit_code)
        else:
            code = decide_exit_code(config, cluster, folder, end.exit_code)
        if failure:
            failures.log_failure(failure, end.callstack)
        return code


def _run_agent(
    config: Config, cluster: Cluster, run_id: str | None, folder: RunFolder
) -> failures.RanksEnd:
    """Run torch's agent until all ranks have ended."""
    arguments = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
    try:
        signals.install_stop_handler(signals.interrupt)
        from lockstep.ranks import agent

        signals.raise_if_received()
        return agent.start_ranks(
            cluster, run_id, folder.path, arguments, config["trainer"]["timeout_s"]
        )
    except Exception:
        # A signal during the import of torch can raise any exception.
        if not signals.received:
            raise
        return failures.RanksEnd(EXIT_INTERRUPTED)
    finally:
        # The rest is short, so that a signal is recorded and no longer interrupts.
        signals.install_stop_handler(signals.record_signal)
