"""Finish a run after its ranks have ended: the upload, the run's page and the last line on the screen."""

import logging
import os
import shutil
import signal
from pathlib import Path

from lockstep.launch.launchers import Cluster
from lockstep.runs import signals
from lockstep.runs.config import Config
from lockstep.runs.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, Interrupted
from lockstep.runs.folder import RunFolder
from lockstep.runs.output import as_read, tested_name
from lockstep.runs.record import RunRecord, read_record
from lockstep.storage.uploader import finish_upload

log = logging.getLogger(__name__)

MAX_METRICS = 3  # of the user's own in the last line


def finish(config: Config, cluster: Cluster, folder: RunFolder, code: int) -> int:
    """Upload what is left and write the page, on the first process of a run; return the exit code."""
    for path in [*folder.path.glob("stack-rank*.txt"), *folder.path.glob("rank*.log")]:
        if path.exists() and path.stat().st_size == 0:
            path.unlink(missing_ok=True)  # another rank that shares the folder may be first
    if cluster.is_rank_zero:
        code = finish_upload(config.get("s3"), folder, code)
        keeps = config.get("logbook") == "keep" and not config["choices"].get("debug")
        metrics = [f"test/{name}" for name in config.get("metrics") or {}]
        conclude(folder, Path(config["paths"]["logbook_dir"]) if keeps else None, code, metrics[:MAX_METRICS])
    if code == EXIT_INTERRUPTED and cluster.launcher == "torchrun":
        return EXIT_OK  # the ranks would be started again, although somebody asked them to stop
    saved = any(folder.checkpoints.glob("*.json"))  # 75 promises a checkpoint to go on from
    ctrl_c = code == EXIT_INTERRUPTED and signal.SIGINT in signals.asked and not saved
    return signals.INTERRUPTED_AT_ONCE if ctrl_c else code


def conclude(folder: RunFolder, keep_in: Path | None, code: int, metrics: list[str]) -> None:
    """Write the run's page and log the last line; what goes wrong here is a warning and changes no exit code.

    Args:
        keep_in: the logbook that the run goes into; None: it stays in its folder.
        metrics: names of the user's own, for the last line.
    """
    pages: list[Path] = []
    record = RunRecord()
    try:
        record = read_record(folder.record) if folder.record.exists() else record
        if code == EXIT_USER_ERROR and not (record.steps or record.restarts or any(folder.checkpoints.glob("*"))):
            return shutil.rmtree(folder.path, ignore_errors=True)  # its input was refused: there is nothing to look at
        if not folder.record.exists():
            return None
        from lockstep.logbook.build import keep_run, write_run_page

        pages.append(write_run_page(folder.path))
        if keep_in is not None:
            pages.append(keep_run(folder.path, keep_in))
    except Interrupted:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        again = f"python src/logbook.py keep {folder.run_id} writes one into logbook/"
        log.warning(f"The run's page was not written ({reason}); {again}.")
    if code == EXIT_OK and record.status == "finished":
        names = [f"{record.monitor}_best", tested_name(record.monitor), *metrics]
        found = {name: value for name in names if isinstance(value := record.metrics.get(name), float)}
        words = [f"{name} {as_read(name, value)}" for name, value in found.items()]
        images, there = record.metrics.get("test/images"), record.num_test
        if isinstance(images, float) and there is not None and images < there:
            words.append(f"on {images:.0f} of {there} test images")
        log.info(" · ".join(["finished", *words, *map(os.path.relpath, pages or [folder.path])]))
    if record.upload.error:
        log.info(
            f"The best checkpoint is NOT in the bucket: {record.upload.error}; python src/upload.py {folder.run_id} "
            "sends it."
        )
