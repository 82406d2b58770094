"""Let the ranks of a run wait for each other for hours, and notice within a minute who has died.

The slowest rank may download and decode its images for hours, so that a wait has no time limit. A
thread of each rank counts up a key of the store, its beat. Rank 0's thread reads all beats in one
call and publishes one state: which rank has been silent, and how many waits all ranks have reached.
So each rank makes the same few calls however many ranks there are. Imports no torch.

This happens in the third wait of the ranks:

    what a rank does             what it writes to the store
    rank 1 reaches the wait      beat/1: reached 3
    rank 0 reads all beats       state:  all_reached 3, if all of them say reached 3
    rank 1 reads the state       beat/1: all_reached 3, and rank 1 leaves
    rank 0 reads all beats       nothing; it leaves last, if all of them say all_reached 3

A beat also takes the number of training batches to the other ranks: failures.py tells from them
whether a rank waits for one that has fewer batches.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
LOST_AFTER_S = 40.0
LOG_INTERVAL_S = 60.0
# A wait of hours may end a second late. A wait that is over at once takes some hundredths.
MAX_WAITING_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.02


class EpochCount(NamedTuple):
    """The training batches that an epoch of a rank has at least; all of them once it is over."""

    epoch: int
    batches: int
    is_over: bool


# The last two epochs of a rank
Epochs = Sequence[EpochCount]


class Beat(NamedTuple):
    """A sign of life of a rank.

    Args:
        number: how many beats the rank has sent.
        reached: how many waits the rank has reached.
        all_reached: how many waits all ranks have reached, as far as this rank knows.
    """

    number: int
    reached: int
    all_reached: int
    epochs: Epochs = ()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Beat":
        """Return the beat that a rank has put into the store as JSON."""
        beat = cls(*json.loads(text))
        epochs = [EpochCount(*each) for each in beat.epochs]
        return cls(beat.number, beat.reached, beat.all_reached, epochs)


class LostRank(RuntimeError):
    """A rank has given no sign of life while others waited for it.

    Args:
        rank: the number of the silent rank.
        silent_s: seconds since its last sign of life, at least.
    """

    def __init__(self, rank: int, silent_s: float) -> None:
        super().__init__(
            f"gave no sign of life for {silent_s:.0f} s while the other ranks waited for it: the "
            "process was killed or stopped, or its node or network is gone"
        )
        self.rank = rank


class Heartbeat:
    """The beat of this rank and what it knows of the others; `start` begins it.

    All ranks construct it before any rank starts it.

    Args:
        store: the store of this start, with a connection of its own: another thread that waits in
            the store would hold up the beats.
        error_store: the store of published errors, with a connection of its own.
        interval_s: seconds between two beats.
        lost_after_s: seconds without a beat after which a rank is lost.
    """

    def __init__(
        self,
        store: "Store",
        error_store: "Store",
        rank: int,
        world_size: int,
        *,
        interval_s: float = INTERVAL_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self.store = store
        self.error_store = error_store
        self.rank = rank
        self.interval_s = interval_s
        self.lost_after_s = lost_after_s
        self._keys = [f"beat/{number}" for number in range(world_size)]

        self._epochs: Epochs = []
        self._beat_number = 0
        # How many waits this rank has reached, and how many all ranks have, as far as it knows
        self._waits_reached = 0
        self._waits_reached_by_all = 0
        # The value of _waits_reached_by_all in the last beat of this rank
        self._acknowledged_waits = 0
        # The smallest all_reached of the last beats, on rank 0
        self._waits_acknowledged_by_all = 0
        self._waits_since: float | None = None

        self._silent_rank: int | None = None  # a rank without a beat for too long
        self._late_ranks: list[int] = []  # ranks that have not reached this wait, on rank 0
        self._has_failed = False  # some rank has published an error
        self._is_cut_off = False  # the store is gone
        # Neither clock runs while this process itself stands still (Ctrl-Z, SLURM's suspend).
        self._awake_s = 0.0  # since the start of the thread
        self._without_round_s = 0.0  # since the thread's last round, in a wait
        # The last beat of a rank, and when it came
        self._last_beats: dict[int, tuple[int, float]] = {}

        self._wake = threading.Event()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._send_beat()
        if rank == 0:
            self._publish_state(0, None)

    def start(self) -> None:
        self._thread.start()

    def note_epoch(self, epoch: int, batches: int, *, is_over: bool) -> None:
        """Tell the others, with the next beat, how many training batches an epoch has at least."""
        earlier = [each for each in self._epochs if each.epoch < epoch]
        self._epochs = [*earlier[-1:], EpochCount(epoch, batches, is_over)]

    def gather_epochs(self) -> list[Epochs]:
        """Return the last epochs of each rank, as of its last beat."""
        # Every key exists since the start, so that this does not wait and hold up the thread.
        self._send_beat()
        return [Beat.from_json(text).epochs for text in self.store.multi_get(self._keys)]

    def end(self) -> None:
        """End the thread, before the store goes."""
        self._is_ended.set()
        self._wake.set()
        # A store that is stopped does not answer any more; the thread ends with the process then.
        self._thread.join(1)

    def wait_for_all(self) -> None:
        """Wait until every rank has called this as often as this rank.

        Rank 0 leaves last, as its process may hold the store.

        Raises:
            LostRank: a rank is silent.
            RuntimeError: another rank has failed, or the store is gone.
        """
        self._waits_reached += 1
        began = time.monotonic()
        looked_at = began
        log_at = began + LOG_INTERVAL_S
        self._waits_since = began
        self._without_round_s = 0.0
        self._wake.set()
        while not self._is_wait_over():
            self._without_round_s += self._count_awake_s(looked_at)
            looked_at = time.monotonic()
            self._raise_if_lost()
            if self.rank == 0 and self._late_ranks and time.monotonic() > log_at:
                minutes = (time.monotonic() - began) / 60
                log.info(f"Waiting for rank {self._late_ranks[0]} since {minutes:.0f} min …")
                log_at += LOG_INTERVAL_S
            time.sleep(POLL_INTERVAL_S)
        self._waits_since = None

    def _is_wait_over(self) -> bool:
        if self.rank == 0:
            return self._waits_acknowledged_by_all >= self._waits_reached
        return self._acknowledged_waits >= self._waits_reached

    def _raise_if_lost(self) -> None:
        if self._has_failed:
            raise RuntimeError("connection closed: another rank has failed")
        if self._is_cut_off:
            raise RuntimeError("connection closed: the store of rank 0 is gone")
        # If the process that holds the store is stopped, the thread hangs in a call.
        if self._without_round_s > self.lost_after_s:
            raise LostRank(0, self.lost_after_s)
        # This rank may be named itself, if it stood still and has gone on since.
        if self._silent_rank is not None and self._silent_rank != self.rank:
            raise LostRank(self._silent_rank, self.lost_after_s)

    def _count_awake_s(self, since: float) -> float:
        """Return the seconds since a time, or two intervals if this process slept for longer."""
        return min(time.monotonic() - since, 2 * self.interval_s)

    def _run(self) -> None:
        round_at = time.monotonic()
        try:
            while not self._is_ended.is_set():
                self._awake_s += self._count_awake_s(round_at)
                round_at = time.monotonic()
                self._wake.clear()
                self._do_round()
                self._without_round_s = 0.0
                self._wake.wait(self._choose_pause_s())
        except RuntimeError:
            self._is_cut_off = True

    def _choose_pause_s(self) -> float:
        waits_since = self._waits_since
        if waits_since is None:
            return self.interval_s
        waited_s = time.monotonic() - waits_since
        return min(self.interval_s, MAX_WAITING_INTERVAL_S, 0.02 + 0.05 * waited_s)

    def _do_round(self) -> None:
        """Send this rank's beat, on rank 0 look at all of them, and read the state."""
        self._beat_number += 1
        self._send_beat()
        if self.rank == 0:
            self._judge_all_ranks()
        state: dict[str, Any] = json.loads(self.store.get("state"))
        self._has_failed = self.error_store.check(["first"])
        self._note_beat(0, state["beat_number"])
        self._silent_rank = 0 if self._is_silent(0) else state["silent_rank"]
        if state["all_reached"] > self._waits_reached_by_all:
            self._waits_reached_by_all = state["all_reached"]
            # The next beat says so at once, and the wait ends.
            self._wake.set()

    def _send_beat(self) -> None:
        all_reached = self._waits_reached_by_all
        beat = Beat(self._beat_number, self._waits_reached, all_reached, self._epochs)
        self.store.set(self._keys[self.rank], json.dumps(beat))
        # This is set last, because it ends the wait, and then the process of this rank may end.
        self._acknowledged_waits = all_reached

    def _judge_all_ranks(self) -> None:
        """Read the beats of all ranks, as rank 0, and publish the state of all of them."""
        beats = [Beat.from_json(text) for text in self.store.multi_get(self._keys)]
        for rank, beat in enumerate(beats):
            self._note_beat(rank, beat.number)
        silent_ranks = [rank for rank in range(1, len(beats)) if self._is_silent(rank)]
        self._late_ranks = [
            rank for rank, beat in enumerate(beats) if beat.reached < self._waits_reached
        ]
        self._waits_acknowledged_by_all = min(beat.all_reached for beat in beats)
        self._publish_state(min(beat.reached for beat in beats), min(silent_ranks, default=None))

    def _publish_state(self, all_reached: int, silent_rank: int | None) -> None:
        state = {
            "beat_number": self._beat_number,
            "all_reached": all_reached,
            "silent_rank": silent_rank,
        }
        self.store.set("state", json.dumps(state))

    def _note_beat(self, rank: int, beat_number: int) -> None:
        """Note when a rank has last sent a new beat."""
        last_number, _ = self._last_beats.get(rank, (-1, 0.0))
        if beat_number != last_number:
            self._last_beats[rank] = (beat_number, self._awake_s)

    def _is_silent(self, rank: int) -> bool:
        _, heard_at = self._last_beats[rank]
        return self._awake_s - heard_at > self.lost_after_s
