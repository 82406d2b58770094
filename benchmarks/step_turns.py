"""`python src/train.py` that takes turns with others like it, a few steps at a time; ranks.py starts them.

All are real runs, up at once; only one of them computes at any time. What the machine does otherwise, for seconds or
minutes, then hits all of them alike. A turn is handed on from every rank of a run to every rank of the next one, by
one byte through a named pipe.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from measuring import REPOSITORY  # noqa: F401 puts src/ on the path

import train
from lockstep.distributed.cluster import plan_file

PLAN = "LOCKSTEP_BENCH_TURN"


@dataclass(frozen=True)
class Turn:
    """What one of the runs is told, as JSON in its environment.

    Attributes:
        folder: where the pipes are.
        side: this run's name; its ranks' pipes are `<side>.<rank>`.
        next_side: which run comes after it, and how many ranks that one has.
        before: ranks of the run that comes before this one.
        warm: optimizer steps before the first turn.
        steps: optimizer steps in a turn, the first of which, in which ranks find together again, is not counted.
        rounds: turns of each run.
    """

    folder: str
    side: str
    ranks: int
    next_side: str
    next_ranks: int
    before: int
    warm: int
    steps: int
    rounds: int

    def environment(self) -> dict[str, str]:
        return {PLAN: json.dumps(asdict(self))}

    @property
    def total_steps(self) -> int:
        return self.warm + self.steps * self.rounds


class Pipe:
    """A named pipe that neither its reader nor its writers wait to open.

    Never closed: what was written and not yet read is lost with a pipe's last holder.
    """

    held: dict[Path, int] = {}

    def __init__(self, path: Path) -> None:
        if path not in self.held:
            self.held[path] = os.open(path, os.O_RDWR)
        self.handle = self.held[path]

    def put(self, count: int = 1) -> None:
        os.write(self.handle, b"." * count)

    def take(self, count: int) -> None:
        while count:
            count -= len(os.read(self.handle, count))


class Turns:
    """Counts the steps of one rank, and waits where it is not its turn."""

    def __init__(self, turn: Turn) -> None:
        self.turn, self.folder = turn, Path(turn.folder)
        self.done, self.last_step = 0, 0.0
        self.seconds: list[list[float]] = []  # of each counted step, by turn

    def after_step(self, *_: object) -> None:
        """The hook that every optimizer of torch calls after its step."""
        self.done += 1
        in_turn = (self.done - self.turn.warm) % self.turn.steps
        if self.done > self.turn.warm and in_turn != 1:
            self.seconds[-1].append(time.perf_counter() - self.last_step)
        if self.done >= self.turn.warm and in_turn == 0:
            self.hand_on()
        self.last_step = time.perf_counter()

    def hand_on(self) -> None:
        """Rank 0 leaves its seconds in `<side>.json` after the last turn."""
        from torch import distributed

        rank = distributed.get_rank() if distributed.is_initialized() else 0
        over = self.done == self.turn.total_steps
        if over and rank == 0:
            (self.folder / f"{self.turn.side}.json").write_text(json.dumps(self.seconds))
        if self.done > self.turn.warm:
            for other in range(self.turn.next_ranks):
                Pipe(self.folder / f"{self.turn.next_side}.{other}").put()
        Pipe(self.folder / "ready").put()
        if over:  # what ends a run would disturb the others
            Pipe(self.folder / "end").take(1)
        else:
            Pipe(self.folder / f"{self.turn.side}.{rank}").take(self.turn.before)
            self.seconds.append([])


if __name__ == "__main__":
    told = Turn(**json.loads(os.environ[PLAN]))
    if told.ranks == 1 or plan_file():  # a supervisor imports no torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(Turns(told).after_step)
    sys.exit(train.main(sys.argv[1:]))
