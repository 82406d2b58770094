"""A campaign of faults: pieces chosen by name, each with a seed and a count, each leaving one row or more.

Run by benchmarks/faults.py; the pieces are in the files that it imports.
"""

import dataclasses
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runs


@dataclass
class Row:
    """
    Args:
        done: what was done, in a few words.
        times: how often.
        seen: what was seen, in a few words with figures.
        wrong: everything that was not as it must be.
    """

    name: str
    done: str
    times: int
    seen: str
    seconds: float
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class Task:
    """What a piece gets: a folder of its own, chance from the seed, how often, and until when at most."""

    folder: Path
    seed: int
    count: int
    chance: random.Random
    deadline: float = math.inf

    def over(self) -> bool:
        """The time is up: what is done by now makes the row, which says how often it was."""
        return time.monotonic() > self.deadline

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)


@dataclass
class Piece:
    work: Callable[[Task], list[Row]]
    count: int  # the full one
    missing: Callable[[], str | None]  # why this machine cannot run it


PIECES: dict[str, Piece] = {}


def piece(name: str, count: int, missing: Callable[[], str | None] = lambda: None) -> Callable:
    """Register a function that does `count` faults and returns its rows."""

    def register(work: Callable[[Task], list[Row]]) -> Callable[[Task], list[Row]]:
        PIECES[name] = Piece(work, count, missing)
        return work

    return register


@contextmanager
def task(name: str, seed: int, count: int, minutes: float = math.inf) -> Iterator[Task]:
    runs.TIMEOUT_S = 600.0
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{name}-"))
    try:
        yield Task(folder, seed, count, random.Random(f"{name} {seed}"), time.monotonic() + 60 * minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 1)


def spread(values: list[float]) -> str:
    """`2.1 to 9.6 (median 3.0)`; a dash where there are none."""
    if not values:
        return "–"
    ordered = sorted(values)
    return f"{ordered[0]:g} to {ordered[-1]:g} (median {ordered[len(ordered) // 2]:g})"
