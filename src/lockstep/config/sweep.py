"""One job of a sweep: a fresh child process with its own run id, folder and record.

In the sweep's own process the ranks of one job would leave their environment to the next, and each rank would
start the whole sweep again. On SLURM (hydra/launcher=submitit_slurm) each task of a job comes here, in a process
that knows nothing but what was pickled.
"""

import logging
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from lockstep.distributed.cluster import environment
from lockstep.distributed.launchers import slurm_task
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
    task, restarts = slurm_task(environment())
    if restarts:
        overrides.append("resume=auto")
    log.info(f"\njob {number}: {' '.join(overrides)}")
    code = run_child([sys.executable, program, *overrides, f"run_id={run_id}", f"sweep_dir={sweep_dir}"])
    codes = sweep_dir / CODES
    codes.mkdir(parents=True, exist_ok=True)
    (codes / f"{number}-{task}").write_text(str(code if code >= 0 else 128 - code))
    record = RunFolder(sweep_dir / run_id).record
    metrics = read_record(record).get("metrics", {}) if record.exists() else {}
    value = metrics.get(f"{cfg.optimized_metric}_best", metrics.get(cfg.optimized_metric))
    return float(value) if code == 0 and value is not None else float("nan")


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_child(command: list[str]) -> int:
    """Its exit code; asked to stop, the sweep waits for the job to save, and ends.

    A Ctrl-C reaches the job from the terminal; SLURM with cgroups signals this process alone. A job that submitit runs
    has a result to hand in all the same.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    asked: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        asked.append(number)
        if number != signal.SIGINT:  # SLURM may have told it too, which is no harm
            process.send_signal(number)

    previous = {number: signal.signal(number, stop) for number in STOPS}
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    requeue = previous[signal.SIGUSR1]
    if signal.SIGUSR1 in asked and callable(requeue):  # submitit's: the job has saved, and is to be queued again
        requeue(signal.SIGUSR1, None)
    if asked and "SUBMITIT_EXECUTOR" not in environment():
        raise SystemExit(EXIT_INTERRUPTED)
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
