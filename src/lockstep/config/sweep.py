"""One job of a sweep: a fresh child process with its own run id, folder and record.

In the sweep's own process the ranks of one job would leave their environment to the next, and each rank would
start the whole sweep again. On SLURM (hydra/launcher=submitit_slurm) each task of a job comes here, in a process
that knows nothing but what was pickled.
"""

import itertools
import json
import logging
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from lockstep.config.declared import key_of
from lockstep.distributed.cluster import environment
from lockstep.distributed.launchers import slurm_task
from lockstep.runs.errors import EXIT_INTERRUPTED
from lockstep.runs.folder import RunFolder
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import read_record
from lockstep.runs.repeats import REPEATED, spread
from lockstep.runs.scores import as_read

log = logging.getLogger(__name__)

CODES = ".exit-codes"  # in the sweep's folder: a small file per job and task, {code, overrides, value}
SHOWN = 10  # lines of the ranking, and as many of failed jobs


def run_job(cfg: Any, program: str) -> float | None:
    """Run the job that Hydra has composed; returns the optimised metric, nan where the job failed.

    Args:
        program: the script that the sweep was started with.
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
    try:
        code = run_child([sys.executable, program, *overrides, f"run_id={run_id}", f"sweep_dir={sweep_dir}"])
    except SystemExit:
        if line := not_started(ExitCodes.jobs, number, overrides):
            log.info(line)
        raise
    value = _metric(RunFolder(sweep_dir / run_id), str(cfg.optimized_metric)) if code == 0 else math.nan
    codes = sweep_dir / CODES
    codes.mkdir(parents=True, exist_ok=True)
    tested = _metric(RunFolder(sweep_dir / run_id), "test/acc") if code == 0 else math.nan
    ended = {"code": code if code >= 0 else 128 - code, "overrides": overrides, "value": value, "tested": tested}
    (codes / f"{number}-{task}").write_text(json.dumps(ended))
    return value


def not_started(jobs: list[list[str]], number: int, overrides: list[str]) -> str:
    """Says which jobs come after this one, each by what tells it from the others; empty where none does.

    Args:
        jobs: the overrides of all, as they were foreseen.
        overrides: this one's; where others were foreseen, as of a shuffle, nothing is said.
    """
    if not (left := jobs[number + 1 :]):
        return ""
    common = set.intersection(*map(set, jobs))
    if not set(jobs[number]) - common <= set(overrides):
        return ""
    words = [" ".join(word for word in job if word not in common) for job in left[:SHOWN]]
    more = [f"… and {len(left) - SHOWN} more"] if len(left) > SHOWN else []
    were = "was" if len(left) == 1 else "were"
    return f"{len(left)} of {len(jobs)} jobs {were} not started: {'; '.join([*words, *more])}"


def _metric(folder: RunFolder, name: str) -> float:
    """Of the best checkpoint where the record says so; nan where it says nothing."""
    metrics = read_record(folder.record).metrics if folder.record.exists() else {}
    value = metrics.get(f"{name}_best", metrics.get(name))
    return math.nan if value is None else float(value)


def first_jobs(words: list[str], configs: Path) -> Iterator[list[str]]:
    """The overrides of one job for each combination of options, every swept value at its first: enough to check keys.

    Args:
        configs: the folder of all options.
    """
    yield from jobs_of_words(words, configs, values=1)


def jobs_of_words(words: list[str], configs: Path, values: int | None = None) -> Iterator[list[str]]:
    """The overrides of each job, in the order of Hydra's own sweeper.

    Args:
        values: how many of each key that is no group; None: all.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    choices = []
    for word, override in zip(words, OverridesParser.create().parse_overrides(words), strict=True):
        key = word.partition("=")[0]
        if override.is_sweep_override() and not key.startswith("hydra"):
            options = sorted(path.stem for path in (configs / key.lstrip("+~")).glob("*.yaml"))
            found = _swept(override, options)
            choices.append([f"{key}={value}" for value in (found if options else found[:values])])
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
    if asked and "SUBMITIT_EXECUTOR" not in environment():
        saved_nothing = code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGKILL)
        raise SystemExit(128 + asked[0] if saved_nothing else EXIT_INTERRUPTED)
    return code


@dataclass(frozen=True)
class Job:
    """How one job of a sweep ended; of several SLURM tasks the worst code."""

    number: int
    code: int
    overrides: tuple[str, ...]
    value: float
    tested: float = math.nan  # test/acc


def jobs_of(sweep_dir: Path) -> list[Job]:
    """By number."""
    tasks: dict[int, list[Job]] = {}
    for path in sorted((sweep_dir / CODES).glob("*")):
        ended, number = json.loads(path.read_text()), int(path.name.partition("-")[0])
        job = Job(number, ended["code"], tuple(ended["overrides"]), ended["value"], ended["tested"])
        tasks.setdefault(number, []).append(job)
    return [max(ended, key=lambda job: job.code) for _, ended in sorted(tasks.items())]


def ranking(jobs: list[Job], name: str, metric: str, *, minimize: bool) -> list[str]:
    """The sweep's last lines: jobs by their metric, each with what tells it from the others; failed ones last."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    ranked = sorted((job for job in jobs if math.isfinite(job.value)), key=lambda job: job.value, reverse=not minimize)
    others = [job for job in jobs if not math.isfinite(job.value)]

    def line(job: Job) -> str:
        result = f"{as_read(metric, job.value):<12}" if math.isfinite(job.value) else f"exit code {job.code:<2}"
        words = " ".join(word for word in job.overrides if word not in common)
        return f"  {result}  {words}  {name}_{job.number}"

    lines = [f"{len(jobs)} jobs by {metric}{', the lowest first' if minimize else ''}:"]
    for part in (ranked, others):
        lines += [line(job) for job in part[:SHOWN]]
        lines += [f"  … and {len(part) - SHOWN} more"] if len(part) > SHOWN else []
    return lines


def means(jobs: list[Job], metric: str) -> list[str]:
    """A line for jobs that differ in the fold or the seed alone: mean ± standard deviation; no line where none do."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        own = tuple(word for word in job.overrides if key_of(word) not in REPEATED)
        groups.setdefault(own, []).append(job)
    common = set.intersection(*map(set, groups))
    lines = []
    for words, group in groups.items():
        found = [(metric, *spread([job.value for job in group])), ("test/acc", *spread([job.tested for job in group]))]
        shown = [
            f"{name} {as_read(name, mean)} ± {as_read(name, deviation)}"
            for name, mean, deviation in found
            if math.isfinite(mean)
        ]
        if shown:
            parts = [*shown, f"{len(group)} jobs", " ".join(word for word in words if word not in common)]
            lines.append("  " + " · ".join(filter(None, parts)))
    return ["mean ± standard deviation over folds and seeds:", *lines] if lines else []


def _minimizes(config: Any) -> bool:
    """What a search is told, else by the metric's name."""
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    return direction == "minimize" if direction else "loss" in str(config.optimized_metric)


class ExitCodes(Callback):
    """Hydra's callback that ends a sweep with its ranking and remembers the worst exit code, wherever jobs ran."""

    worst = 0
    jobs: ClassVar[list[list[str]]] = []  # of the sweep; none where a search finds them one by one

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """What an earlier sweep in the same folder left says nothing about this one."""
        if str(OmegaConf.select(config, "hydra.sweeper._target_")).endswith(".BasicSweeper"):
            params = OmegaConf.select(config, "hydra.sweeper.params") or {}
            words = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
            ExitCodes.jobs = list(jobs_of_words(words, REPOSITORY / "configs"))
        shutil.rmtree(Path(str(config.hydra.sweep.dir)) / CODES, ignore_errors=True)

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        sweep_dir = Path(str(config.hydra.sweep.dir)).resolve()
        jobs = jobs_of(sweep_dir)
        ExitCodes.worst = max((job.code for job in jobs), default=0)
        if jobs:
            metric = str(config.optimized_metric)
            lines = ranking(jobs, sweep_dir.name, metric, minimize=_minimizes(config))
            log.info("\n" + "\n".join([*lines, *means(jobs, metric)]))
