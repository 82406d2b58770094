"""Let the ranks of a run wait for each other for hours, and notice within a minute who has died.

The slowest rank may download and decode its images for hours, so that a wait has no time limit. A
thread of each rank counts up a key of the store, its beat. Rank 0's thread reads all beats in one
call and publishes one state: which rank has been silent, and how many waits all ranks have reached.
So each rank makes the same few calls however many ranks there are. Imports no torch.
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
SPEAK_INTERVAL_S = 60.0
# A wait of hours may end a second late; one that is over at once costs some hundredths.
MOST_WAITING_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.02


class EpochCount(NamedTuple):
    """The training batches that an epoch of a rank has at least; all of them once it is over."""

    epoch: int
    batches: int
    is_over: bool


# The last two epochs of a rank
Epochs = Sequence[EpochCount]


class Beat(NamedTuple):
    """A sign of life of a rank: its number, and the waits that the rank has reached.

    Args:
        passed: the waits of which this rank knows that all ranks have reached them.
    """

    number: int
    reached: int
    passed: int
    epochs: Epochs = ()

    @classmethod
    def of(cls, text: str | bytes) -> "Beat":
        """Return the beat that a rank has put into the store as JSON."""
        beat = cls(*json.loads(text))
        epochs = [EpochCount(*each) for each in beat.epochs]
        return cls(beat.number, beat.reached, beat.passed, epochs)


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
        store: of this start of the run, with a connection of its own: another thread that waits in
            the store would hold up the beats.
        errors: where ranks publish their errors, with a connection of its own.
        interval_s: seconds between two beats.
        lost_after_s: seconds without a beat after which a rank is lost.
    """

    def __init__(
        self,
        store: "Store",
        errors: "Store",
        rank: int,
        world_size: int,
        *,
        interval_s: float = INTERVAL_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self.store = store
        self.errors = errors
        self.rank = rank
        self.interval_s = interval_s
        self.lost_after_s = lost_after_s
        self._keys = [f"beat/{number}" for number in range(world_size)]

        self._epochs: Epochs = []
        self._count = 0
        self._reached = 0  # waits that this rank has begun
        self._passed = 0  # waits that all ranks have begun, as far as this rank knows
        # Waits of which rank 0 can read that this rank has passed them.
        self._confirmed = 0
        self._all_passed = 0  # the same of all ranks, on rank 0
        self._waits_since: float | None = None

        self._silent: int | None = None
        self._late: list[int] = []  # ranks that have not reached this wait, on rank 0
        self._has_failed = False  # some rank has published an error
        self._is_cut_off = False  # the store is gone
        # Seconds without those in which this process itself stood still (Ctrl-Z, SLURM's suspend):
        # the thread's since its start, and those of a wait since the thread's last round.
        self._awake_s = 0.0
        self._without_round_s = 0.0
        self._heard: dict[int, tuple[int, float]] = {}  # last count of a rank, and when it came

        self._wake = threading.Event()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._set_beat()
        if rank == 0:
            self._set_state([Beat(0, 0, 0)] * world_size, None)

    def start(self) -> None:
        self._thread.start()

    def note(self, epoch: int, batches: int, *, is_over: bool) -> None:
        """Tell the others, with the next beat, how many training batches an epoch has at least."""
        before = [each for each in self._epochs if each.epoch < epoch]
        self._epochs = [*before[-1:], EpochCount(epoch, batches, is_over)]

    def epochs_of_all(self) -> list[Epochs]:
        """Return the last epochs of each rank, as of its last beat."""
        self._set_beat()
        return [Beat.of(text).epochs for text in self.store.multi_get(self._keys)]

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
        self._reached += 1
        began = time.monotonic()
        looked_at = began
        speak_at = began + SPEAK_INTERVAL_S
        self._waits_since = began
        self._without_round_s = 0.0
        self._wake.set()
        while not self._is_over():
            self._without_round_s += self._awake_since(looked_at)
            looked_at = time.monotonic()
            self._check()
            if self.rank == 0 and self._late and time.monotonic() > speak_at:
                minutes = (time.monotonic() - began) / 60
                log.info(f"Waiting for rank {self._late[0]} since {minutes:.0f} min …")
                speak_at += SPEAK_INTERVAL_S
            time.sleep(POLL_INTERVAL_S)
        self._waits_since = None

    def _is_over(self) -> bool:
        if self.rank == 0:
            return self._all_passed >= self._reached
        return self._confirmed >= self._reached

    def _check(self) -> None:
        if self._has_failed:
            raise RuntimeError("connection closed: another rank has failed")
        if self._is_cut_off:
            raise RuntimeError("connection closed: the store of rank 0 is gone")
        # The thread hangs in a call where the process that holds the store is stopped.
        if self._without_round_s > self.lost_after_s:
            raise LostRank(0, self.lost_after_s)
        if self._silent is not None and self._silent != self.rank:
            raise LostRank(self._silent, self.lost_after_s)

    def _awake_since(self, then: float) -> float:
        """Return the seconds since then. Of a long gap, in which this process stood still, few."""
        return min(time.monotonic() - then, 2 * self.interval_s)

    def _run(self) -> None:
        round_at = time.monotonic()
        try:
            while not self._is_ended.is_set():
                self._awake_s += self._awake_since(round_at)
                round_at = time.monotonic()
                self._wake.clear()
                self._beat()
                self._without_round_s = 0.0
                self._wake.wait(self._pause_s())
        except RuntimeError:
            self._is_cut_off = True

    def _pause_s(self) -> float:
        waits_since = self._waits_since
        if waits_since is None:
            return self.interval_s
        waited_s = time.monotonic() - waits_since
        return min(self.interval_s, MOST_WAITING_INTERVAL_S, 0.02 + 0.05 * waited_s)

    def _beat(self) -> None:
        """Send this rank's beat, on rank 0 look at all of them, and read the state."""
        self._count += 1
        self._set_beat()
        if self.rank == 0:
            self._watch()
        state: dict[str, Any] = json.loads(self.store.get("state"))
        self._has_failed = self.errors.check(["first"])
        if self._is_silent(0, state["count"]):
            self._silent = 0
        else:
            self._silent = state["silent"]
        if state["passed"] > self._passed:
            self._passed = state["passed"]
            self._wake.set()

    def _set_beat(self) -> None:
        passed = self._passed
        beat = Beat(self._count, self._reached, passed, self._epochs)
        self.store.set(self._keys[self.rank], json.dumps(beat))
        self._confirmed = passed

    def _watch(self) -> None:
        """Read the beats of all ranks, and publish what follows from them."""
        beats = [Beat.of(text) for text in self.store.multi_get(self._keys)]
        others = [
            rank for rank in range(1, len(beats)) if self._is_silent(rank, beats[rank].number)
        ]
        self._late = [rank for rank, beat in enumerate(beats) if beat.reached < self._reached]
        self._all_passed = min(beat.passed for beat in beats)
        self._set_state(beats, min(others, default=None))

    def _set_state(self, beats: Sequence[Beat], silent: int | None) -> None:
        passed = min(beat.reached for beat in beats)
        state = {"count": self._count, "passed": passed, "silent": silent}
        self.store.set("state", json.dumps(state))

    def _is_silent(self, rank: int, count: int) -> bool:
        last_count, heard_at = self._heard.get(rank, (-1, 0.0))
        if count != last_count:
            self._heard[rank] = (count, self._awake_s)
            return False
        return self._awake_s - heard_at > self.lost_after_s
