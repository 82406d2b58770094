"""Help the benchmarks to measure in fair turns, to run commands and to write the results."""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.insert(0, str(REPOSITORY / "src"))

from lockstep.process import environment  # noqa: E402 the line above puts it on the path
from lockstep.records import provenance  # noqa: E402 the line above puts it on the path

TRAIN = [sys.executable, str(REPOSITORY / "src" / "train.py")]


def build_goal_row(
    what: str,
    goal: str,
    measured: float,
    met: bool | None = None,
    *,
    unit: str = "×",
    detail: str = "",
) -> dict[str, Any]:
    """Return one figure of benchmarks/README.md with its goal, if it has one."""
    return {
        "what": what,
        "goal": goal,
        "measured": measured,
        "unit": unit,
        "met": met,
        "detail": detail,
    }


def save(name: str, goals: list[dict[str, Any]], **figures: Any) -> None:
    """Write `name` into results/cpu.json and print its goals.

    The load average shows whether the machine did other work.
    """
    content = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": describe_command(),
        "commit": provenance.code_state(REPOSITORY)["commit"],
        "machine": {
            "cpu": environment.cpu_name(),
            "cores": environment.available_cores(),
            "versions": provenance.versions(),
        },
        "load_average": round(os.getloadavg()[0], 1),
        "goals": goals,
        **figures,
    }
    path = HERE / "results" / "cpu.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: content}, indent=1) + "\n")
    for row in goals:
        comparison = ""
        if row["met"] is not None:
            comparison = f" (goal {row['goal']}): {'met' if row['met'] else 'NOT MET'}"
        figure = f"{row['measured']:g} {row['unit']}"
        print(f"{row['what']}: {figure}{comparison} · {row['detail']}", flush=True)


def describe_command() -> str:
    """Return the command with FOLDER in place of absolute paths, which other machines lack."""
    arguments = [str(Path(sys.argv[0]).resolve().relative_to(REPOSITORY))]
    for argument in sys.argv[1:]:
        arguments.append("FOLDER" if Path(argument).is_absolute() else argument)
    return f"python {shlex.join(arguments)}"


def measure_in_turns(repetitions: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Return the values of each measure, which is called `repetitions` times.

    The measures take turns, and none is always the first, so that other work of the machine affects
    all of them equally.
    """
    values: list[list[float]] = [[] for _ in measures]
    for turn in range(repetitions):
        for position in range(len(measures)):
            number = (position + turn) % len(measures)
            values[number].append(measures[number]())
    return values


def median(values: list[float], digits: int = 4) -> float:
    return round(statistics.median(values), digits)


def paired_ratio(ours: list[float], theirs: list[float], digits: int = 3) -> float:
    """Return the median over the rounds of ours ÷ theirs."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), digits)


def measure_command_s(command: list[str]) -> float:
    """Return the wall time of a whole process."""
    started = time.perf_counter()
    run_for_output(command)
    return time.perf_counter() - started


def folder_overrides(scratch: Path | str) -> list[str]:
    """Return overrides that keep a run's folder, decoded images and pages out of the repository."""
    return [f"paths.{name}_dir={scratch}/{name}" for name in ("log", "data", "logbook")]


def train_for_record(scratch: Path | str, overrides: list[str]) -> dict[str, Any]:
    """Train with `python src/train.py`; return the run's record."""
    run_id = f"bench{time.time_ns()}"
    run_for_output([*TRAIN, *overrides, *folder_overrides(scratch), f"run_id={run_id}"])
    record: dict[str, Any] = json.loads(
        Path(scratch, "log/train/runs", run_id, "run.json").read_text()
    )
    return record


def run_for_output(
    command: list[str], *, env: dict[str, str] | None = None, cwd: Path = REPOSITORY
) -> str:
    """Return what a process prints; end with its output if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})}
    )
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout
