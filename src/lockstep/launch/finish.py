"""How a run ends: exceptions and signals become an exit code, a record, one error file a rank, and a page."""

import faulthandler
import logging
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.distributed.cluster import Cluster, adopt
from lockstep.distributed.failures import RankError, record_end, recorded_collectives, report_failure
from lockstep.distributed.launchers import launcher_named
from lockstep.launch.plan import RunPlan
from lockstep.runs import signals
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
from lockstep.runs.foreign_files import read_yaml
from lockstep.runs.full_disk import NoRoom, no_room
from lockstep.runs.record import RunRecord, read_record
from lockstep.runs.redact import redact_text
from lockstep.runs.scores import as_read

log = logging.getLogger(__name__)

AFTERMATH_S = 60.0
MAX_METRICS = 3  # of the user's own in the last line

Work = Callable[[RunPlan], int]  # what a rank does; its exit code


def in_this_process(plan: RunPlan, work: Work) -> int:
    """Call work and turn how it ends into an exit code, a record, and one error file a rank."""
    folder, cluster = plan.folder, plan.cluster
    adopt(cluster, unless_set=recorded_collectives(folder))
    _dump_stack_on_signal(folder, cluster)
    signals.at_the_end(lambda: _record_end_at_once(folder, cluster))
    try:
        try:
            stop_at_once_on_signal()
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
    except Exception as error:
        if full := no_room(error, folder.path):
            return _failed(folder, cluster, full, EXIT_FAILED)
        culprit = getattr(error, "culprit", None) or {"rank": cluster.rank}
        if culprit["rank"] == cluster.rank and not _is_full_elsewhere(folder):  # else this one only lost its peers
            sys.stderr.write(redact_text(traceback.format_exc()))  # a library may quote a request
        return _failed(folder, cluster, error, EXIT_FAILED)


def _is_full_elsewhere(folder: RunFolder) -> bool:
    """Whether another rank has just ended for want of room."""
    errors = [path for path in folder.path.glob("error-rank*.json") if time.time() - path.stat().st_mtime < AFTERMATH_S]
    return any('"kind": "NoRoom"' in path.read_text() for path in errors)


STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def stop_at_once_on_signal() -> None:
    """Before there is anything to save, a signal just ends the run; Interruption takes over in training."""
    signals.raise_on_signal(Interrupted, *STOPS)


def hold_signals() -> None:
    """Until something takes over that can end the run in order."""
    signals.asked.clear()
    signals.remember_signals(*STOPS)


def _ignore_signals() -> None:
    signals.take_over()
    signals.remember_signals(*STOPS)


def signals_end_this_process() -> None:
    """As in any program."""
    signals.end_on_signal()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def code_of_stop(code: int, folder: RunFolder) -> int:
    """75 promises a checkpoint to go on from; a Ctrl-C before there is one is that of any program."""
    saved = any(folder.checkpoints.glob("*.json"))
    return (
        signals.INTERRUPTED_AT_ONCE
        if code == EXIT_INTERRUPTED and signal.SIGINT in signals.asked and not saved
        else code
    )


def _record_end_at_once(folder: RunFolder, cluster: Cluster) -> None:
    if cluster.is_rank_zero and read_record(folder.record).status == "running":
        record_end(folder, cluster, "interrupted", signals.INTERRUPTED_AT_ONCE, None)


def _failed(folder: RunFolder, cluster: Cluster, error: Exception, code: int) -> int:
    message = str(error) if isinstance(error, UserError | Diverged | NoRoom) else f"{type(error).__name__}: {error}"
    phase = (read_record(folder.record).phase if folder.record.exists() else None) or "start"
    failure: RankError = {
        "rank": cluster.rank, "host": socket.gethostname(), "phase": phase, "message": message,
        "kind": type(error).__name__, "time": time.time(),
    }  # fmt: skip
    report_failure(getattr(error, "culprit", None) or failure, folder, cluster, code)
    return code


def _dump_stack_on_signal(folder: RunFolder, cluster: Cluster) -> None:
    """SIGUSR2 from the supervisor: this rank's Python stacks go to the run folder."""
    if folder.path.is_dir():
        for path in (folder.stack(cluster.rank), folder.nccl_trace(cluster.rank)):  # of an earlier start
            path.unlink(missing_ok=True)
        file = folder.stack(cluster.rank).open("a")  # the watch may write there too
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def remove_empty_stacks(folder: RunFolder) -> None:
    for path in folder.path.glob("stack-rank*.txt"):
        try:
            if path.stat().st_size == 0:
                path.unlink()
        except FileNotFoundError:  # another rank that shares this folder (SLURM, one disk) was first
            continue


def conclude(folder: RunFolder, keep_in: Path | None, code: int) -> None:
    """A run's page, and its last line, which says where that lies; nothing here changes the exit code.

    Args:
        keep_in: the logbook that the run goes into; None: it stays in its folder.
    """
    _harmlessly(_conclude, folder, keep_in, code)


def _conclude(folder: RunFolder, keep_in: Path | None, code: int) -> None:
    record = read_record(folder.record)
    if code == EXIT_USER_ERROR and _never_began(record, folder):
        return shutil.rmtree(folder.path, ignore_errors=True)
    pages: list[Path] = []
    _harmlessly(_write_pages, folder, keep_in, pages)
    if code == EXIT_OK and record.status == "finished":
        log.info(_result(record, chosen_metrics(folder), pages or [folder.path]))
    if record.upload.error:
        words = f"The best checkpoint is NOT in the bucket: {record.upload.error}"
        log.info(f"{words}; python src/upload.py {folder.run_id} sends it.")


def _never_began(record: RunRecord, folder: RunFolder) -> bool:
    """Its input was refused before the first step: there is nothing that somebody could want to look at."""
    return not record.steps and not record.restarts and not any(folder.checkpoints.glob("*"))


def _harmlessly(part: Callable[..., None], *arguments: Any) -> None:
    """Call part; what goes wrong with a page or the screen is said, where it can be, and changes no run."""
    try:
        part(*arguments)
    except Interrupted:
        raise
    except Exception as error:
        log.warning(
            f"The run's page was not written ({type(error).__name__}: {error}); "
            "python src/logbook.py build tries again."
        )


def _write_pages(folder: RunFolder, keep_in: Path | None, pages: list[Path]) -> None:
    """Adds to `pages`: one in the run's folder, and where somebody means to keep it in the logbook."""
    from lockstep.logbook.build import keep_run, write_run_page

    pages.append(write_run_page(folder.path))
    if keep_in is not None:
        pages.append(keep_run(folder.path, keep_in))


def chosen_metrics(folder: RunFolder) -> list[str]:
    """What the config's own metrics are called in a test; none where they would fill the line."""
    try:
        names = list(read_yaml(folder.config).get("metrics") or {})
    except (OSError, ValueError, AttributeError):  # gone, or no mapping
        return []
    return [f"test/{name}" for name in names] if len(names) <= MAX_METRICS else []


def _result(record: RunRecord, chosen: list[str], pages: list[Path]) -> str:
    shown = {name: record.metrics.get(name) for name in (f"{record.monitor}_best", "test/acc", *chosen)}
    words = [f"{name} {as_read(name, value)}" for name, value in shown.items() if isinstance(value, float)]
    images, there = record.metrics.get("test/images"), record.num_test
    if isinstance(images, float) and there is not None and images < there:
        words.append(f"on {images:.0f} of {there} test images")
    return " · ".join(["finished", *words, *map(os.path.relpath, pages)])
