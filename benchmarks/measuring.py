"""What the scripts here share: fair turns, this machine's name, and the results file that README.md is made from."""

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

from lockstep.runs import provenance  # noqa: E402 the line above puts it on the path

TRAIN = [sys.executable, str(REPOSITORY / "src" / "train.py")]


def machine() -> dict[str, Any]:
    """CPU, cores, GPU where nvidia-smi names one, and the versions of what was measured."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
        gpus = told.stdout.split("\n")[:-1] if told.returncode == 0 else []
    except FileNotFoundError:
        gpus = []
    cores = provenance.available_cores()
    return {"cpu": provenance.cpu_name(), "cores": cores, "gpus": gpus, "versions": provenance.versions()}


def goal_row(
    row: int, what: str, goal: str, measured: float, met: bool, *, unit: str = "×", detail: str = ""
) -> dict[str, Any]:
    """One line of benchmarks/README.md; `row` is the number in its table of goals."""
    return {
        "row": row, "what": what, "goal": goal, "measured": measured, "unit": unit, "met": met, "detail": detail,
    }  # fmt: skip


def save(name: str, goals: list[dict[str, Any]], **figures: Any) -> Path:
    """Write results/<name>.json and say its goals. What earlier runs measured under the same name goes.

    The load average of the last minute says whether the machine had other work.
    """
    path = HERE / "results" / f"{name}.json"
    words = [str(Path(sys.argv[0]).resolve().relative_to(REPOSITORY))]
    words += ["FOLDER" if Path(word).is_absolute() else word for word in sys.argv[1:]]  # another machine has others
    content = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python " + shlex.join(words),
        "commit": provenance.code_state(REPOSITORY)["commit"],
        "machine": machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "goals": goals,
        **figures,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    for goal in goals:
        said = "met" if goal["met"] else "NOT MET"
        print(f"{goal['what']}: {goal['measured']:g} {goal['unit']} (goal {goal['goal']}): {said}", flush=True)
    return path


def in_turns(repetitions: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Each measure `repetitions` times, one after the other in every round, so that what else runs hits all alike."""
    found: list[list[float]] = [[] for _ in measures]
    for turn in range(repetitions):
        for i in range(len(measures)):
            which = (i + turn) % len(measures)  # nobody always comes first
            found[which].append(measures[which]())
    return found


def median(values: list[float], digits: int = 4) -> float:
    return round(statistics.median(values), digits)


def paired_ratio(ours: list[float], theirs: list[float], digits: int = 3) -> float:
    """The median over the rounds of ours ÷ theirs."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), digits)


def with_and_without(overrides: list[str]) -> list[list[str]]:
    """Our run with the options that a peer does not have, and, where there are any, as the peer does it."""
    return [overrides, []] if overrides else [overrides]


def seconds_of(command: list[str], *, env: dict[str, str] | None = None, cwd: Path = REPOSITORY) -> float:
    """Wall seconds of a whole process.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    started = time.perf_counter()
    output_of(command, env=env, cwd=cwd)
    return time.perf_counter() - started


def peak_mib(command: list[str], env: dict[str, str] | None = None) -> float:
    """Resident MiB of a whole process at their highest, as the kernel counts them.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}:\n{said.decode()}")
    return usage.ru_maxrss / 1024


def places(scratch: Path | str) -> list[str]:
    """Overrides that keep a run's folder, decoded images and pages out of the repository."""
    return [f"paths.{name}_dir={scratch}/{name}" for name in ("log", "data", "logbook")]


def run_record(scratch: Path | str, words: list[str]) -> dict[str, Any]:
    """Train by `python src/train.py`, and return the run's record with its `folder`."""
    run_id = f"bench{time.time_ns()}"
    output_of([*TRAIN, *words, *places(scratch), f"run_id={run_id}"])
    folder = Path(scratch) / "log" / "train" / "runs" / run_id
    return {**json.loads((folder / "run.json").read_text()), "folder": folder}


def output_of(command: list[str], *, env: dict[str, str] | None = None, cwd: Path = REPOSITORY) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})})
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout
