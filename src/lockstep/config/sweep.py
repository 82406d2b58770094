"""One job of a sweep: a fresh child process with its own run id, folder and record.

In the sweep's own process the ranks of one job would leave their environment to the next, and each rank would
start the whole sweep again. On SLURM (hydra/launcher=submitit_slurm) each task of a job comes here, in a process
that knows nothing but what was pickled.
"""

import itertools
import logging
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from lockstep.distributed import cluster as world
from lockstep.runs.errors import EXIT_INTERRUPTED
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import read_record

log = logging.getLogger(__name__)

CODES = ".exit-codes"  # in the sweep's folder: a small file per job and task


def run_job(cfg: Any, program: str) -> float | None:
    """Run the job that Hydra has composed; returns the optimised metric, nan where the job failed.

    Args:
        program: the door that the sweep was started with.
    """
    sweep_dir = Path(str(cfg.hydra.sweep.dir)).resolve()
    number = cfg.hydra.job.num
    run_id = f"{sweep_dir.name}_{number}"
    own = ("run_id=", "sweep_dir=")
    overrides = [word for word in cfg.hydra.overrides.task if not word.lstrip("+").startswith(own)]
    task, restarts = world.slurm_task(world.environment())
    if restarts:
        overrides.append("resume=auto")
    log.info(f"\njob {number}: {' '.join(overrides)}")
    code = run_child([sys.executable, program, *overrides, f"run_id={run_id}", f"sweep_dir={sweep_dir}"])
    codes = sweep_dir / CODES
    codes.mkdir(parents=True, exist_ok=True)
    (codes / f"{number}-{task}").write_text(str(code if code >= 0 else 128 - code))
    record = RunFolder(sweep_dir / run_id).record
    metrics = read_record(record).metrics if record.exists() else {}
    value = metrics.get(f"{cfg.optimized_metric}_best", metrics.get(cfg.optimized_metric))
    return float(value) if code == 0 and value is not None else float("nan")


def first_jobs(words: list[str], configs: Path) -> Iterator[list[str]]:
    """The overrides of one job for each combination of options, every swept value at its first: enough to check keys.

    Args:
        configs: the folder of all options.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    choices = []
    for word, override in zip(words, OverridesParser.create().parse_overrides(words), strict=True):
        key = word.partition("=")[0]
        if override.is_sweep_override() and not key.startswith("hydra"):
            options = sorted(path.stem for path in (configs / key.lstrip("+~")).glob("*.yaml"))
            found = _swept(override, options)
            choices.append([f"{key}={value}" for value in (found if options else found[:1])])
        else:
            choices.append([word])
    yield from (list(job) for job in itertools.product(*choices))


def _swept(override: Any, options: list[str]) -> list[str]:
    from hydra.core.override_parser.types import Glob, IntervalSweep

    value = override.value()
    if isinstance(value, IntervalSweep):
        return [str(value.start)]
    return value.filter(options) if isinstance(value, Glob) else [str(v) for v in override.sweep_string_iterator()]


LAST_WORDS_S = 0.5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_child(command: list[str]) -> int:
    """Its exit code; asked to stop, the sweep waits for the job to save, and ends.

    A terminal's Ctrl-C reaches the job too; SLURM with cgroups signals this process alone. A second Ctrl-C ends both.
    A job that submitit runs has a result to hand in all the same.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    asked: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        if signal.SIGINT in asked and number == signal.SIGINT:
            time.sleep(LAST_WORDS_S)  # the terminal has told it too
            return process.kill()
        asked.append(number)
        process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)  # it may have been told, no harm

    previous = {number: signal.signal(number, stop) for number in STOPS}
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    requeue = previous[signal.SIGUSR1]
    if signal.SIGUSR1 in asked and callable(requeue):  # submitit's: the job has saved, and is to be queued again
        requeue(signal.SIGUSR1, None)
    if asked and "SUBMITIT_EXECUTOR" not in world.environment():
        saved_nothing = code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGKILL)
        raise SystemExit(128 + asked[0] if saved_nothing else EXIT_INTERRUPTED)
    return code


class ExitCodes(Callback):
    """Hydra's callback that remembers the worst exit code of a sweep's jobs, wherever they ran."""

    worst = 0

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """What an earlier sweep in the same folder left says nothing about this one."""
        shutil.rmtree(Path(str(config.hydra.sweep.dir)) / CODES, ignore_errors=True)

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        codes = [int(path.read_text()) for path in (Path(str(config.hydra.sweep.dir)) / CODES).glob("*")]
        ExitCodes.worst = max(codes, default=0)
