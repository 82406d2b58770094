"""Finish a run on its first process: upload what is left, write the page, log the last line."""

import logging
import os
import shutil
import signal
from pathlib import Path

from lockstep.checkpoints.files import complete_checkpoints
from lockstep.process import signals
from lockstep.process.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_UPLOADED,
    EXIT_OK,
    EXIT_USER_ERROR,
)
from lockstep.ranks.find import Cluster
from lockstep.records.config import Config
from lockstep.records.folder import RunFolder
from lockstep.records.metric_names import format_metric, metric_of_test
from lockstep.records.record import RunRecord, has_trained, read_record
from lockstep.runs.resume import find_finished_run
from lockstep.runs.run_lock import hold_run_lock
from lockstep.storage.uploader import finish_upload, release_claim, send_files

log = logging.getLogger(__name__)


def finish_run(config: Config, cluster: Cluster, folder: RunFolder, code: int) -> int:
    """Upload what is left, write the page and log the last line.

    Args:
        code: the exit code so far.

    Returns:
        The exit code of this process.
    """
    _remove_empty_outputs(folder)
    if cluster.is_rank_zero:
        code = _conclude(config, folder, code)

    is_ctrl_c = signal.SIGINT in signals.received and cluster.launcher != "torchrun"
    has_checkpoint = any(folder.checkpoints.glob("*.json"))
    if code == EXIT_INTERRUPTED and is_ctrl_c and not has_checkpoint:
        # Exit code 75 would promise a checkpoint from which the run goes on.
        return signals.INTERRUPTED_AT_ONCE
    return decide_exit_code(config, cluster, folder, code)


def decide_exit_code(config: Config, cluster: Cluster, folder: RunFolder | None, code: int) -> int:
    """Return the exit code of a process that was asked to stop; any other code stays.

    srun returns the highest code of its tasks, so each rank and each node decides.

    Args:
        folder: the run's folder; None if the stop came before it was known.
        code: the exit code so far.
    """
    if code != EXIT_INTERRUPTED:
        return code
    if cluster.launcher == "torchrun":
        # torchrun would start the ranks again, although somebody asked them to stop.
        return EXIT_OK
    if folder is None or not _has_lost_steps(config, cluster, folder):
        return code

    # A job script that starts the run again at 75 would do so for ever.
    if cluster.is_rank_zero:
        log.error(
            "The run has no callbacks.checkpoints, so that its steps are lost and a restart would "
            "begin anew. Start a new run without '~callbacks.checkpoints' and callbacks=none."
        )
    return EXIT_FAILED


def _has_lost_steps(config: Config, cluster: Cluster, folder: RunFolder) -> bool:
    """Return whether a stopped training has made steps and has no callback to save them."""
    if config["task_name"] != "train" or (config.get("callbacks") or {}).get("checkpoints"):
        return False
    if not folder.record_path.exists():
        # A node with a disk of its own does not know the steps. It ends with the lower code, so
        # that the code of rank 0 counts.
        return not cluster.is_rank_zero
    steps = read_record(folder.record_path).steps or 0
    saved = [sidecar.step for _, sidecar in complete_checkpoints(folder.checkpoints)]
    return steps > max(saved, default=0)


def finish_again(config: Config, cluster: Cluster) -> int | None:
    """Finish a run of resume=auto once more if nothing is left to train; return the exit code.

    A job script may start such a run again and again. Each start sends what could not be uploaded
    before. The code is None for any other start.
    """
    folder = find_finished_run(config)
    if folder is None:
        return None

    log.info(f"The run {folder.run_id} has finished.")
    if cluster.local_rank:
        return EXIT_OK
    if not cluster.is_rank_zero:
        return finish_run(config, cluster, folder, EXIT_OK)
    with hold_run_lock(folder):
        return finish_run(config, cluster, folder, EXIT_OK)


def _remove_empty_outputs(folder: RunFolder) -> None:
    for path in [*folder.path.glob("stack-rank*.txt"), *folder.path.glob("rank*.log")]:
        if path.exists() and path.stat().st_size == 0:
            # Another rank that shares the folder may be first.
            path.unlink(missing_ok=True)


def _conclude(config: Config, folder: RunFolder, code: int) -> int:
    """Upload a run and write its page; remove a new run whose input was refused.

    Returns:
        The exit code.
    """
    record = read_record(folder.record_path) if folder.record_path.exists() else RunRecord()
    if code == EXIT_USER_ERROR and not record.restarts and not has_trained(folder):
        release_claim(config.get("s3"), folder)
        shutil.rmtree(folder.path, ignore_errors=True)
    if not folder.record_path.exists():
        return code

    code = finish_upload(config.get("s3"), folder, code)
    pages = _write_pages(config, folder)
    # The page names the address of the best checkpoint, so it is sent after the checkpoint.
    record = read_record(folder.record_path)
    is_short = record.upload.error is not None or code in (EXIT_USER_ERROR, EXIT_INTERRUPTED)
    send_files(config.get("s3"), folder, is_short)
    _log_end(folder, record, pages, code)
    return code


def _log_end(folder: RunFolder, record: RunRecord, pages: list[Path], code: int) -> None:
    """Log the last lines of a run."""
    if code == EXIT_OK and record.status == "finished":
        paths = [os.path.relpath(page) for page in pages or [folder.path]]
        log.info(" · ".join(["finished", *_format_metrics(record), *paths]))
    upload_hint = f"python src/upload.py {folder.run_id} sends it"
    if record.upload.error:
        log.info(f"The best checkpoint is NOT in the bucket: {record.upload.error}; {upload_hint}.")
    elif code == EXIT_NOT_UPLOADED:
        log.info(f"The last checkpoint is NOT in the bucket yet: {upload_hint}.")


def _write_pages(config: Config, folder: RunFolder) -> list[Path]:
    """Write page.md, and with logbook=keep a copy of the run for git.

    An error in the page does not fail the run.
    """
    pages: list[Path] = []
    try:
        from lockstep.logbook.build import keep_run, summarise, write_page

        pages.append(write_page(summarise(folder.path)))
        if config.get("logbook") == "keep" and not config["choices"].get("debug"):
            pages.append(keep_run(folder.path, Path(config["paths"]["logbook_dir"])))
    except Exception as error:
        hint = f"python src/logbook.py keep {folder.run_id} writes one into logbook/"
        log.warning(f"The run's page was not written ({type(error).__name__}: {error}); {hint}.")
    return pages


def _format_metrics(record: RunRecord) -> list[str]:
    """Return the best monitored metric and the test's metric, as the terminal shows them.

    If there is neither, return the last value of the monitored metric, or else of the loss.
    """
    metrics = record.metrics
    names = [f"{record.monitor}_best", metric_of_test(record.monitor, metrics)]
    names = [name for name in names if isinstance(metrics.get(name), float)]
    if not names:
        last_names = [name for name in (record.monitor, "train/loss") if name in metrics]
        names = last_names[:1]
    return [f"{name} {format_metric(name, float(metrics[name]))}" for name in names]
