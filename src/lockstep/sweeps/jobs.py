"""Run each job of a sweep in a child process, and rank them; replaces `_check_help` of argparse.

Jobs do not run in the process of the sweep, because environment variables set for the ranks of one
job would leak into the next, and each rank would start the whole sweep again. SLURM tasks
(hydra/launcher=submitit_slurm) run this, too. Python 3.14 checks with `_check_help` the help of
--shell-completion, which Hydra 1.3 does not give as a string.
"""

import argparse
import json
import logging
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from lockstep.config.compose import CONFIGS, adapt_to_multirun, compose
from lockstep.config.hydra_versions import version_base
from lockstep.config.keys import FOLD_KEY
from lockstep.config.overrides import quote_names, quote_value, search_paths
from lockstep.config.schema import key_of
from lockstep.logbook.arms import best_of
from lockstep.process.environment import environment
from lockstep.records.folder import RunFolder
from lockstep.records.metric_names import metric_of_test
from lockstep.records.record import read_record
from lockstep.sweeps.against import choose_paired_sweeper
from lockstep.sweeps.checks import (
    choose_first_values,
    parse_sweep_overrides,
    refuse_impossible_jobs,
    refuse_missing_options,
    refuse_other_job,
    refuse_used_folder,
)
from lockstep.sweeps.ranking import Job, format_ranking, group_into_arms, is_minimized
from lockstep.sweeps.record import write_sweep
from lockstep.sweeps.stopping import forward_stop_signals, running_jobs, stop_signals

log = logging.getLogger(__name__)

# This folder of the sweep holds a JSON file for each job and task.
RESULTS_FOLDER = ".exit-codes"


def run_sweep(config_name: str, overrides: list[str]) -> int:
    """Run Hydra's multirun, report its jobs, and return their worst exit code."""
    command = f"python src/{Path(sys.argv[0]).name} -m {shlex.join(overrides)}"
    # Wrong overrides are refused before the first job.
    overrides = adapt_to_multirun([quote_names(override) for override in overrides])
    cfg = compose(config_name, choose_first_values(overrides))
    refuse_missing_options(config_name, overrides)
    sweeper = str(cfg.hydra.runtime.choices.get("hydra/sweeper"))
    overrides = choose_paired_sweeper(overrides, parse_sweep_overrides(overrides), sweeper)
    is_minimized(cfg)
    refuse_impossible_jobs(config_name, overrides, cfg)
    sweep_dir = Path(str(cfg.hydra.sweep.dir)).resolve()
    if not is_search(cfg):
        refuse_used_folder(sweep_dir, overrides)
        shutil.rmtree(sweep_dir / RESULTS_FOLDER, ignore_errors=True)
    program = str(Path(sys.argv[0]).resolve())
    earlier_times = _times_of_results(sweep_dir)
    # File systems round times.
    began_ns = time.time_ns() - 10**9

    def start_job(cfg: Any) -> float | None:
        """Run one job; launchers other than the project's own, such as submitit, call this."""
        from hydra.core.hydra_config import HydraConfig

        with forward_stop_signals():
            return run_job(cfg, HydraConfig.get(), program)

    folder = f"hydra.sweep.dir={quote_value(str(sweep_dir))}"
    try:
        run_hydra(config_name, start_job, ["--multirun", "--", *overrides, folder])
    finally:
        # The jobs that have ended are reported even if the sweep was stopped.
        jobs = _read_jobs(sweep_dir)
        if jobs:
            _report(jobs, sweep_dir, cfg, command)
    # A continued search also reports the jobs of its earlier starts, in this folder or another.
    times = _times_of_results(sweep_dir)
    codes = []
    for job in jobs:
        time_ns = times[job.number]
        if time_ns != earlier_times.get(job.number) and time_ns >= began_ns:
            codes.append(job.exit_code)
    return max(codes, default=0)


def _report(jobs: list[Job], sweep_dir: Path, cfg: Any, command: str) -> None:
    """Log the ranking of the jobs, and write sweep.json and page.md into the sweep's folder."""
    arms = group_into_arms(jobs, sweep_dir, str(cfg.optimized_metric), minimize=is_minimized(cfg))
    log.info("\n" + "\n".join(format_ranking(jobs, arms, sweep_dir)))
    log.info(f"page: {write_sweep(sweep_dir, command, jobs, arms)}")


def run_hydra(config_name: str, task: Callable[[Any], Any], argv: list[str]) -> None:
    """Run a task by Hydra's own command line."""
    import hydra

    sys.argv[1:] = argv
    main = hydra.main(**version_base(), config_path=str(CONFIGS), config_name=config_name)
    with mock.patch.object(argparse.ArgumentParser, "_check_help", create=True):
        main(task)()


def _times_of_results(sweep_dir: Path) -> dict[int, int]:
    """Return when each job has ended, in ns, by its number."""
    times: dict[int, int] = {}
    for path in (sweep_dir / RESULTS_FOLDER).glob("*"):
        number = int(path.name.partition("-")[0])
        times[number] = max(times.get(number, 0), path.stat().st_mtime_ns)
    return times


def _read_jobs(sweep_dir: Path) -> list[Job]:
    """Return the jobs that have ended, by number.

    If several SLURM tasks ran a job, the one with the worst exit code counts.
    """
    jobs: dict[int, Job] = {}
    for path in (sweep_dir / RESULTS_FOLDER).glob("*"):
        values = json.loads(path.read_text())
        job = Job(exit_code=values.pop("code"), **values)
        if job.number not in jobs or job.exit_code > jobs[job.number].exit_code:
            jobs[job.number] = job
    return [jobs[number] for number in sorted(jobs)]


def is_search(cfg: Any) -> bool:
    """Return whether the sweeper searches, so that the same command continues its study."""
    return "num_trials" in cfg.hydra.sweeper


def unescape(override: str) -> str:
    """Return an override with its text in quotes in place of Hydra's backslashes.

    Hydra hands s3.uri=s3://bucket to a job as s3.uri=s3\\://bucket, which is another text in a
    command line, where a backslash may be meant.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if "\\" not in override:
        return override
    value = OverridesParser.create().parse_override(override).value()
    # A text that is quoted already has a type of its own.
    if type(value) is not str:
        return override
    return f"{override.partition('=')[0]}={quote_value(value)}"


def folder_of_job(sweep_dir: Path, number: int) -> RunFolder:
    return RunFolder(sweep_dir / f"{sweep_dir.name}_{number}")


def overrides_of_job(overrides: Iterable[str]) -> list[str]:
    """Return the overrides of a job as a command line has them, without those of the sweep."""
    return [
        unescape(override)
        for override in overrides
        if key_of(override) not in ("run_id", "sweep_dir", "trial")
    ]


def run_job(
    cfg: Any, hydra: Any, program: str, environ: Mapping[str, str] | None = None, output: Any = None
) -> float:
    """Run the job of the config `cfg`; return its optimized metric, or nan if it failed.

    Args:
        hydra: the `hydra` node of the job's config.
        program: path of the script that started the sweep.
        environ, output: the job's environment variables, and the file for what it prints; None:
            those of this process.
    """
    sweep_dir = Path(str(hydra.sweep.dir)).resolve()
    number = hydra.job.num
    trial = cfg.get("trial")
    # A trial that an earlier start of the search has begun has a folder of another sweep.
    folder = RunFolder(Path(trial.folder)) if trial else folder_of_job(sweep_dir, number)

    overrides = overrides_of_job(hydra.overrides.task)
    log.info(f"\njob {number}: {' '.join(overrides)}")
    if not trial:
        # Other launchers than LocalJobs have not checked it.
        refuse_other_job(folder, overrides)
    start = [f"run_id={folder.run_id}", f"sweep_dir={folder.path.parent}"]
    start += [word for word in hydra.overrides.task if trial and key_of(word) == "trial"]
    is_requeued = int(environment().get("SLURM_RESTART_COUNT") or 0) > 0
    has_begun = trial and folder.record_path.exists()
    if (is_requeued or has_begun) and "resume=auto" not in overrides:
        start.append("resume=auto")
    search_path = search_paths(hydra.overrides.hydra)
    code = run_child(
        [sys.executable, program, *overrides, *search_path, *start], environ=environ, output=output
    )

    job = _describe_end(number, code, overrides, folder, str(cfg.optimized_metric))
    _write_job(sweep_dir, job)
    if trial:
        # A later start of the search looks beside the run.
        _write_job(folder.path.parent, job)
    return job.value


def _write_job(sweep_dir: Path, job: Job) -> None:
    """Write how a job has ended into the folder of the sweep; `_read_jobs` reads it."""
    values = asdict(job)
    values["code"] = values.pop("exit_code")
    results = sweep_dir / RESULTS_FOLDER
    results.mkdir(parents=True, exist_ok=True)
    task = int(environment().get("SLURM_PROCID") or 0)
    (results / f"{job.number}-{task}").write_text(json.dumps(values))


def _describe_end(
    number: int, code: int, overrides: list[str], folder: RunFolder, metric: str
) -> Job:
    """Return how a job has ended, with its metrics if it has finished."""
    metrics: dict[str, Any] = {}
    is_pruned = False
    fold_ratio = 0.0
    if code == 0 and folder.record_path.exists():
        record = read_record(folder.record_path)
        metrics = record.metrics
        is_pruned = record.ended_by == "pruned"
        if FOLD_KEY in map(key_of, overrides):
            fold_ratio = (record.num_val or 0) / (record.num_train or 1)
        if not {metric, f"{metric}_best"} & metrics.keys():
            log.warning(
                f"job {number} logs no {metric}. optimized_metric= takes what it logs: "
                f"{', '.join(sorted(metrics)) or 'nothing'}."
            )

    # A process that a signal killed has a negative code.
    exit_code = code if code >= 0 else 128 - code
    if is_pruned:
        # Its value is that of a shorter run.
        return Job(number, exit_code, overrides, math.nan, pruned=True, folder=str(folder.path))
    value = best_of(metrics, metric)
    tested = best_of(metrics, metric_of_test(metric))
    return Job(number, exit_code, overrides, value, tested, fold_ratio, folder=str(folder.path))


def run_child(
    command: list[str], environ: Mapping[str, str] | None = None, output: Any = None
) -> int:
    """Start a job and wait for it; return its exit code."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env=environ, stdout=output, stderr=output
    )
    running_jobs.add(process)
    if stop_signals:
        # The signal came between the start of the process and its entry in `running_jobs`.
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait()
    finally:
        running_jobs.discard(process)
