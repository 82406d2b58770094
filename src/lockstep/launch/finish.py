"""What is left when the ranks have ended: uploads, the run's page and the last line on the screen."""

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.launch.launchers import Cluster, launcher_named
from lockstep.runs import signals
from lockstep.runs.config import Config
from lockstep.runs.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, Interrupted
from lockstep.runs.folder import RunFolder
from lockstep.runs.foreign_files import read_yaml
from lockstep.runs.record import RunRecord, read_record
from lockstep.runs.scores import as_read
from lockstep.storage.finish import finish_upload

log = logging.getLogger(__name__)

MAX_METRICS = 3  # of the user's own in the last line


def finish(config: Config, cluster: Cluster, folder: RunFolder, code: int) -> int:
    """Send what is left to the bucket and write the page, once per node; return the exit code.

    Args:
        config: with `choices`.
    """
    for path in [*folder.path.glob("stack-rank*.txt"), *folder.path.glob("rank*.log")]:
        with contextlib.suppress(FileNotFoundError):  # another rank that shares the folder was first
            if path.stat().st_size == 0:
                path.unlink()
    if cluster.is_rank_zero and folder.record.exists():
        code = finish_upload(config.get("s3"), folder, code)
        debugs = config["choices"].get("debug")
        keeps = config.get("logbook") == "keep" and not debugs
        conclude(folder, Path(config["paths"]["logbook_dir"]) if keeps else None, code)
    elif cluster.is_rank_zero and code == EXIT_USER_ERROR and not any(folder.checkpoints.glob("*")):
        shutil.rmtree(folder.path, ignore_errors=True)  # rank 0 refused the run before it began
    if launcher_named(cluster.launcher).restarts_ranks and code == EXIT_INTERRUPTED:
        return EXIT_OK  # the ranks would be started again, although somebody asked them to stop
    saved = any(folder.checkpoints.glob("*.json"))  # 75 promises a checkpoint to go on from
    ctrl_c = code == EXIT_INTERRUPTED and signal.SIGINT in signals.asked and not saved
    return signals.INTERRUPTED_AT_ONCE if ctrl_c else code


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
