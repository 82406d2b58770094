"""How a run ends: exceptions and signals become an exit code, a record, one error file a rank, and a page."""

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.distributed.cluster import Cluster, adopt
from lockstep.distributed.failures import Failure, record_end, report_failure
from lockstep.distributed.launchers import launcher_named
from lockstep.launch.plan import RunPlan
from lockstep.runs.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USER_ERROR,
    Diverged,
    Interrupted,
    UserError,
)
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import read_record
from lockstep.runs.redact import redact_text

log = logging.getLogger(__name__)

Work = Callable[[RunPlan], int]  # what a rank does; its exit code


def in_this_process(plan: RunPlan, work: Work) -> int:
    """Call work and turn how it ends into an exit code, a record, and one error file a rank."""
    folder, cluster = plan.folder, plan.cluster
    adopt(cluster)
    _dump_stack_on_signal(folder, cluster)
    stop_at_once_on_signal()
    try:
        try:
            if cluster.is_rank_zero:
                _harmlessly(_write_pages_of_lost, folder, Path(plan.config["paths"]["logbook_dir"]))
            return work(plan)
        finally:
            _ignore_signals()  # what is left is short, and a supervisor may ask again
    except Interrupted as error:
        record_end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
        if cluster.is_rank_zero:
            log.info(f"Interrupted ({error}): resume={folder.run_id} goes on.")
        if launcher_named(cluster.launcher).restarts_ranks and cluster.num_nodes > 1 and error.elsewhere:
            return EXIT_FAILED  # this node's ranks shall be started again, beside those of a node that comes back
        return EXIT_INTERRUPTED
    except UserError as error:
        return _failed(folder, cluster, error, EXIT_USER_ERROR)
    except Diverged as error:
        return _failed(folder, cluster, error, EXIT_FAILED)
    except (KeyboardInterrupt, SystemExit) as error:  # Lightning turns the one into the other
        if isinstance(error, SystemExit) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        record_end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
        return EXIT_INTERRUPTED
    except Exception as error:
        sys.stderr.write(redact_text(traceback.format_exc()))  # a library may quote a request
        return _failed(folder, cluster, error, EXIT_FAILED)


def stop_at_once_on_signal() -> None:
    """Before there is anything to save, a signal just ends the run; Interruption takes over in training."""

    def stop(number: int, _frame: Any) -> None:
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def signals_end_this_process() -> None:
    """As in any program."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _failed(folder: RunFolder, cluster: Cluster, error: Exception, code: int) -> int:
    message = str(error) if isinstance(error, UserError | Diverged) else f"{type(error).__name__}: {error}"
    phase = read_record(folder.record).get("phase", "start") if folder.record.exists() else "start"
    failure: Failure = {
        "rank": cluster.rank, "host": socket.gethostname(), "phase": phase, "message": message,
        "kind": type(error).__name__, "time": time.time(),
    }  # fmt: skip
    report_failure(getattr(error, "culprit", None) or failure, folder, cluster, code)
    return code


def _dump_stack_on_signal(folder: RunFolder, cluster: Cluster) -> None:
    """SIGUSR2 from the supervisor: this rank's Python stacks go to the run folder."""
    if folder.path.is_dir():
        folder.stack(cluster.rank).unlink(missing_ok=True)
        file = folder.stack(cluster.rank).open("a")  # the watch may write there too
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def remove_empty_stacks(folder: RunFolder) -> None:
    for path in folder.path.glob("stack-rank*.txt"):
        try:
            if path.stat().st_size == 0:
                path.unlink()
        except FileNotFoundError:  # another rank that shares this folder (SLURM, one disk) was first
            continue


def conclude(folder: RunFolder, logbook: Path, code: int) -> None:
    """The last line of a run, and its page in the logbook; nothing here changes the exit code."""
    _harmlessly(_say_result, folder, code)
    _harmlessly(_write_page, folder, logbook)
    _harmlessly(_say_left_behind, folder)


def _harmlessly(part: Callable[..., None], *arguments: Any) -> None:
    """Call part; what goes wrong with a page or the screen is said, where it can be, and changes no run."""
    try:
        part(*arguments)
    except Interrupted:
        raise
    except Exception as error:
        log.warning(f"The logbook page was not written ({type(error).__name__}: {error}); make logbook tries again.")


def _say_result(folder: RunFolder, code: int) -> None:
    record = read_record(folder.record)
    if code == EXIT_OK and record["status"] == "finished":
        shown = {name: value for name, value in record["metrics"].items() if name in ("val/acc_best", "test/acc")}
        words = " · ".join(f"{name} {value:.2%}" for name, value in shown.items())
        log.info(f"finished · {words} · {os.path.relpath(folder.path)}")


def _write_page(folder: RunFolder, logbook: Path) -> None:
    from lockstep.pages.build import record_run

    record_run(folder.path, logbook)


def _say_left_behind(folder: RunFolder) -> None:
    upload = read_record(folder.record).get("upload") or {}
    if upload.get("error"):
        log.info(
            f"The best checkpoint is NOT in the bucket: {upload['error']}; "
            f"python src/upload.py {folder.run_id} sends it."
        )


def _write_pages_of_lost(folder: RunFolder, logbook: Path) -> None:
    """At a run's start: one that died shortly before the last run ended was not yet known for lost then."""
    from lockstep.pages.build import record_lost

    record_lost(folder.path, logbook)
