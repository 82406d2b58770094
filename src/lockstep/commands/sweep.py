"""Sweeps: run each job in a child process with its own run id, folder and record, and rank the jobs at the end.

Jobs do not run in the process of the sweep, because environment variables set for the ranks of one job would leak into
the next, and each rank would start the whole sweep again. SLURM tasks (hydra/launcher=submitit_slurm) run this, too.
"""

import argparse
import json
import logging
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import OmegaConf

from lockstep.config.compose import CONFIGS, as_typed, compose, quoted
from lockstep.config.keys import REPEATS
from lockstep.config.schema import key_of
from lockstep.runs import signals
from lockstep.runs.environment import environment
from lockstep.runs.errors import EXIT_INTERRUPTED
from lockstep.runs.folder import RunFolder
from lockstep.runs.output import as_read, tested_name
from lockstep.runs.record import read_record

log = logging.getLogger(__name__)

RESULTS_FOLDER = ".exit-codes"  # in the sweep's folder: a JSON file per job and task
ERRORS = re.compile(r"loss|error|(?<![a-z])(mse|mae|rmse|ece|nll)(?![a-z])")  # names of metrics; lower is better

running: set[Any] = set()  # the processes of jobs
asked: list[int] = []  # signals that asked the sweep to stop


@dataclass(frozen=True)
class Job:
    """The end of one job of a sweep; the code is the worst of its SLURM tasks."""

    number: int
    code: int
    overrides: list[str]
    value: float
    tested: float = math.nan  # test/acc


def run_sweep(config_name: str, overrides: list[str]) -> int:
    """Run Hydra's multirun, log the ranking of its jobs, and return their worst exit code."""
    cfg = compose(config_name, _first_values(overrides))  # refuses a wrong key before the first job
    sweep_dir, program = Path(str(cfg.hydra.sweep.dir)).resolve(), str(Path(sys.argv[0]).resolve())
    shutil.rmtree(sweep_dir / RESULTS_FOLDER, ignore_errors=True)  # of an earlier sweep

    def job(cfg: Any) -> float | None:  # called by launchers other than the project's own, such as submitit
        from hydra.core.hydra_config import HydraConfig

        with forward_stop_signals():
            return run_job(cfg, HydraConfig.get(), program)

    run_hydra(config_name, job, ["--multirun", "--", *overrides, f"hydra.sweep.dir={quoted(str(sweep_dir))}"])
    jobs: dict[int, Job] = {}
    for ended in (Job(**json.loads(path.read_text())) for path in (sweep_dir / RESULTS_FOLDER).glob("*")):
        jobs[ended.number] = max(jobs.get(ended.number, ended), ended, key=lambda each: each.code)
    if jobs:
        in_order = [jobs[number] for number in sorted(jobs)]
        lines = ranking(in_order, sweep_dir.name, str(cfg.optimized_metric), minimize=is_minimized(cfg))
        log.info("\n" + "\n".join(lines))
    return max((each.code for each in jobs.values()), default=0)


def run_hydra(config_name: str, task: Callable[[Any], Any], argv: list[str]) -> None:
    """Run a task by Hydra's own command line."""
    import hydra

    sys.argv[1:] = argv
    # Python 3.14 refuses the help of --shell-completion, which Hydra 1.3 does not give as a string
    with mock.patch.object(argparse.ArgumentParser, "_check_help", lambda parser, action: None, create=True):
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(task)()


def _first_values(words: list[str]) -> list[str]:
    """Return the overrides of a sweep's first job."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob, IntervalSweep

    first = []
    for word, override in zip(words, OverridesParser.create().parse_overrides(list(map(as_typed, words))), strict=True):
        key, value = word.partition("=")[0], override.value()
        if isinstance(value, Glob):
            word = f"{key}={value.filter(sorted(path.stem for path in CONFIGS.glob(f'{key}/*.yaml')))[0]}"
        elif override.is_sweep_override() and not key.startswith("hydra"):
            start = value.start if isinstance(value, IntervalSweep) else next(override.sweep_string_iterator())
            word = f"{key}={start}"
        first.append(word)
    return first


def run_job(cfg: Any, hydra: Any, program: str, environ: Mapping[str, str] | None = None, output: Any = None) -> float:
    """Run the job of the config `cfg`; return its optimized metric, or nan if it failed.

    Args:
        hydra: the `hydra` node of the job's config.
        program: path of the script that started the sweep.
        environ, output: the job's environment variables, and the file for what it prints; None: those of this process.
    """
    sweep_dir, number = Path(str(hydra.sweep.dir)).resolve(), hydra.job.num
    folder = RunFolder(sweep_dir / f"{sweep_dir.name}_{number}")
    overrides = [word for word in hydra.overrides.task if key_of(word) not in ("run_id", "sweep_dir")]
    search = [word for word in hydra.overrides.hydra if word.startswith("hydra.searchpath")]
    task, restarts = (int(environment().get(name) or 0) for name in ("SLURM_PROCID", "SLURM_RESTART_COUNT"))
    overrides += ["resume=auto"] if restarts else []
    log.info(f"\njob {number}: {' '.join(overrides)}")
    command = [sys.executable, program, *overrides, *search, f"run_id={folder.run_id}", f"sweep_dir={sweep_dir}"]
    code = run_child(command, environ=environ, output=output)
    metrics = read_record(folder.record).metrics if code == 0 and folder.record.exists() else {}

    def metric(name: str) -> float:
        found = (metrics.get(key) for key in (f"{name}_best", name))
        return float(next((value for value in found if value is not None), math.nan))

    name = str(cfg.optimized_metric)
    job = Job(number, code if code >= 0 else 128 - code, overrides, metric(name), metric(tested_name(name)))
    (sweep_dir / RESULTS_FOLDER).mkdir(parents=True, exist_ok=True)
    (sweep_dir / RESULTS_FOLDER / f"{number}-{task}").write_text(json.dumps(asdict(job)))
    return job.value


def run_child(command: list[str], environ: Mapping[str, str] | None = None, output: Any = None) -> int:
    """Start a job and wait for it; return its exit code."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ, stdout=output, stderr=output)
    running.add(process)
    return process.wait()


@contextmanager
def forward_stop_signals() -> Iterator[None]:
    """Hand a signal on to the running jobs, wait until they have saved, and end the sweep; a second Ctrl-C kills them.

    SLURM with cgroups signals this process alone. A job that submitit runs has a result to hand in all the same.
    """
    asked.clear()

    def stop(number: int, _frame: Any) -> None:
        again = number == signal.SIGINT and signal.SIGINT in asked
        asked.append(number)
        if again:
            time.sleep(0.5)  # the terminal has sent Ctrl-C to the jobs as well: let them print their messages
        for process in list(running):
            process.send_signal(signal.SIGKILL if again else signal.SIGTERM if number == signal.SIGINT else number)

    previous = signals.on_stop(stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    requeue = previous.get(signal.SIGUSR1)
    if signal.SIGUSR1 in asked and callable(requeue):  # submitit's handler, which requeues the job, now saved
        requeue(signal.SIGUSR1, None)
    if asked and "SUBMITIT_EXECUTOR" not in environment():
        raise SystemExit(128 + signal.SIGINT if asked.count(signal.SIGINT) > 1 else EXIT_INTERRUPTED)


def is_minimized(config: Any) -> bool:
    """Return whether lower is better for optimized_metric, by hydra.sweeper.direction or the checkpoint callback."""
    metric, checkpoints = config.optimized_metric, OmegaConf.select(config, "callbacks.checkpoints")
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    if direction in ("minimize", "maximize"):
        return bool(direction == "minimize")
    if checkpoints and checkpoints.monitor == metric:
        return bool(checkpoints.mode == "min")
    return bool(ERRORS.search(str(metric)))


def ranking(jobs: list[Job], name: str, metric: str, *, minimize: bool) -> list[str]:
    """Return the ranking as lines, failed jobs last, then mean ± deviation of jobs that differ in fold or seed alone.

    A line has the overrides that are not common to all jobs.
    """
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    failed = [job for job in jobs if not math.isfinite(job.value)]
    ranked = sorted((job for job in jobs if job not in failed), key=lambda job: job.value, reverse=not minimize)
    lines = [f"{len(jobs)} jobs by {metric}{', the lowest first' if minimize else ''}:"]
    groups: dict[str, list[Job]] = {}
    for job in (*ranked, *failed):
        result = f"exit code {job.code:<2}" if job in failed else f"{as_read(metric, job.value):<12}"
        own = [word for word in job.overrides if word not in common]
        lines.append(f"  {result}  {' '.join(own)}  {name}_{job.number}")
        configuration = " ".join(word for word in own if key_of(word) not in REPEATS)
        groups.setdefault(configuration, []).append(job)
    for words, group in groups.items():
        found = {metric: [job.value for job in group], tested_name(metric): [job.tested for job in group]}
        shown = [
            f"{key} {as_read(key, statistics.fmean(values))} ± {as_read(key, statistics.stdev(values))}"
            for key, values in found.items()
            if len(values) > 1 and all(map(math.isfinite, values))
        ]
        if shown:
            lines.append("  mean of " + " · ".join(filter(None, [f"{len(group)} jobs", *shown, words])))
    return lines
