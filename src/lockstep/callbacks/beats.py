"""The heartbeats of all ranks in the run's store, and what their absence or standstill says of who is to blame."""

import json
import socket
import time
from typing import Any, NamedTuple

from lockstep.callbacks.whereabouts import place
from lockstep.distributed.failures import RankError

RUNNING = ("training", "validation", "test")  # phases in which ranks wait for each other in collectives


class Beat(NamedTuple):
    """What a rank says of itself: seconds since 1970, and batches that it has begun or ended."""

    time: float
    host: str
    phase: str
    batches: int
    where: str
    waits: bool


class Beats:
    """
    Args:
        store: a connection to the run's store for the calling thread alone.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.heard: dict[int, tuple[float, float]] = {}  # of each rank its latest beat, and when it came
        self.moved: tuple[list[int], float] = ([], 0.0)  # batches of all ranks, and since when

    def show(self, phase: str, batches: int) -> None:
        """This rank's own."""
        at = place()
        beat = Beat(time.time(), socket.gethostname(), phase, batches, at.text, at.waits)
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def latest(self) -> dict[int, Beat]:
        """Of each rank that has shown one."""
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        return {
            rank: Beat(*json.loads(self.store.get(key))) for rank, key in enumerate(keys) if self.store.check([key])
        }

    def silent(self, beats: dict[int, Beat]) -> list[tuple[float, int]]:
        """(seconds, rank), longest first: how long, by this host's clock, each rank's heartbeat has not changed."""
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank not in self.heard or self.heard[rank][0] != beat.time:
                self.heard[rank] = (beat.time, now)
        return sorted(((now - at, rank) for rank, (_, at) in self.heard.items()), reverse=True)

    def unmoved_s(self, beats: dict[int, Beat]) -> float:
        """How long no rank has begun or ended a batch; 0 where they do something else."""
        now, batches = time.monotonic(), [beat.batches for beat in beats.values()]
        running = len(beats) == self.world_size and all(beat.phase in RUNNING for beat in beats.values())
        if batches != self.moved[0] or not running:
            self.moved = (batches, now)
        return now - self.moved[1]

    def holds_up(self, beats: dict[int, Beat], waited_s: float, but: int | None = None) -> RankError | None:
        """The rank that the others wait for in a collective: one that computes while they wait, or is behind them.

        Args:
            waited_s: how long, for the sentence.
            but: a rank that is known to wait.
        """
        busy = [rank for rank, beat in beats.items() if not beat.waits and rank != but]
        behind = [rank for rank, beat in beats.items() if beat.batches < max(b.batches for b in beats.values())]
        found = busy if 0 < len(busy) < self.world_size else behind
        if not found:
            return None
        first = beats[found[0]]
        others = f" (as are ranks {', '.join(map(str, found[1:]))})" if found[1:] else ""
        message = f"the others have waited for it for {waited_s:.0f} s; it is at {first.where}{others}"
        return error_of(found[0], first, message, "held up")


def error_of(rank: int, beat: Beat, message: str, kind: str) -> RankError:
    return {"rank": rank, "host": beat.host, "phase": beat.phase, "message": message, "kind": kind, "time": time.time()}
