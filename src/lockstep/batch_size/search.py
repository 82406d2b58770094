"""The largest batch that fits, in few probes: a pure search over `fits(batch)` and a linear model of memory.

A probe says, for every rank and phase of a step, which share of that rank's limit was used; or that a rank ran out.
Two small probes give one line per rank and phase; the smallest batch at which a line reaches its limit is verified.

A GPU's allocator also says what it reserved for what it gave out. Where the lines reach the limit with as much beside
them, a batch fits, and so does the run that follows. A full memory leaves less beside them, so the tries that are left
go at least half-way on to what tensors alone would fill.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

MAX_PROBES = 6
MAX_OUT_OF_MEMORY = 2
CLOSE_ENOUGH = 0.98  # stop where the verified batch is this near to the predicted maximum, or to one that ran out
MOST_BELOW = 0.95  # what the search promises
STEP_BACK = 0.88  # of a batch that ran out although the model said that it fits
MARGIN = 0.01  # left below a predicted maximum, so that noise does not cost an out-of-memory
LEVER = 0.25  # of the memory that the first probe left free is what the second one may take
HELD = "held"  # the phase that stands for what is held between steps, whatever the batch
RESERVED = "reserved"  # the phase that stands for what the allocator took from the device, where it says that
FIXED = (HELD, "validation", RESERVED)  # phases that do not grow with the batch as tensors do
NEAR = 0.965  # with as much as this of the batch whose tensors alone would fill the memory, the search ends
FAR = 4  # predictions of more than this many times the largest batch that was run are approached in steps,
NEARER = (0.5, 0.6)  # to this share of what two and three points predict: a gathered layer's peak hides what grows
LAST_FROM = 0.85
LAST_STEP_FROM = 0.7  # the last probe steps back by 5 % only, where what is found already is this share of it

Shares = Sequence[Mapping[str, float]]  # per rank: phase → share of the limit


@dataclass(frozen=True)
class Probe:
    """One batch that was run. `shares` is None where any rank ran out of memory."""

    batch: int
    shares: Shares | None

    @property
    def fits(self) -> bool:
        return self.shares is not None and self.largest_share <= 1.0

    @property
    def largest_share(self) -> float:
        """Of what tensors took."""
        return max((share for phase, share in self._shares() if not is_reserved(phase)), default=0.0)

    @property
    def room_for_tensors(self) -> float:
        """The share of the limit that they may take where the allocator reserves as much beside them as here."""
        reserved = max((share for phase, share in self._shares() if is_reserved(phase)), default=0.0)
        return min(self.largest_share / reserved, 1.0) if reserved else 1.0

    def _shares(self) -> Iterator[tuple[str, float]]:
        return (item for rank in self.shares or () for item in rank.items())


def is_reserved(phase: str) -> bool:
    return phase.startswith(RESERVED)


@dataclass(frozen=True)
class Found:
    """What a search ended with. `batch` is 0 where not even the smallest fits; else it has run."""

    batch: int
    probes: tuple[Probe, ...]
    at_bound: bool = field(default=False)  # the data set, not the memory, ended the search

    @property
    def out_of_memory(self) -> int:
        return sum(probe.shares is None for probe in self.probes)

    @property
    def prediction_error(self) -> float | None:
        """How far the two small probes' lines were off at the batch that was found, as a share of the limit."""
        found = next((probe for probe in self.probes if probe.batch == self.batch), None)
        points = [probe for probe in self.probes if probe.shares is not None][:2]
        if found is None or len(points) < 2:
            return None
        return _share_at(sorted(points, key=lambda probe: probe.batch), self.batch) - found.largest_share


def largest_batch(fits: Callable[[int], Shares | None], *, bound: int, start: int = 8, least: int = 1) -> Found:
    """Search with at most 6 probes, at most two of them out of memory.

    Args:
        fits: runs a batch; returns the shares of memory per rank and phase, or None where any rank ran out.
        bound: the largest batch that makes sense (the images that a rank has).
        start: the first batch to try.
        least: the smallest batch that the net takes.
    """
    probes: list[Probe] = []
    while (batch := next_batch(probes, bound=bound, start=start, least=least)) is not None:
        probes.append(Probe(batch, fits(batch)))
    return found(probes, bound)


def found(probes: Sequence[Probe], bound: int) -> Found:
    """The result that a finished list of probes stands for."""
    best = max((probe.batch for probe in probes if probe.fits), default=0)
    return Found(best, tuple(probes), at_bound=best == bound)


def next_batch(probes: Sequence[Probe], *, bound: int, start: int = 8, least: int = 1) -> int | None:
    """The batch to probe after these, or None where the search is over. Depends on nothing else: it can be resumed."""
    if not probes:
        return max(least, min(start, bound))
    good = max((probe.batch for probe in probes if probe.fits), default=least - 1)
    bad = min((probe.batch for probe in probes if not probe.fits), default=bound + 1)
    ran_out = sum(probe.shares is None for probe in probes)
    if len(probes) >= MAX_PROBES or ran_out >= MAX_OUT_OF_MEMORY or bad - good <= 1:
        return None
    points = sorted((probe for probe in probes if probe.shares is not None), key=lambda probe: probe.batch)
    if len(points) < 2:
        return _second_point(points, good, bad, least)
    if bad <= bound and good >= CLOSE_ENOUGH * (bad - 1):
        return None
    return _aim(points, good, bad, bound, len(probes))


def _second_point(points: list[Probe], good: int, bad: int, least: int) -> int:
    """Another point for the line: far enough to extrapolate from, and safe where memory grows no faster than it."""
    if not points:
        return least  # the first one ran out
    batch, shares = points[0].batch, points[0].shares or ()
    held = max((rank.get(HELD, 0.0) for rank in shares), default=0.0)
    share = max((s for rank in shares for phase, s in rank.items() if not phase.startswith(FIXED)), default=held)
    growth = max(share - held, 1e-9) / batch
    wanted = min(batch + int(LEVER * max(1.0 - share, 0.0) / growth), 16 * batch)
    if batch > least and (wanted < 2 * batch or bad <= wanted):
        return max(batch // 2, least)
    return max(good + 1, min(wanted, bad - 1))


def _aim(points: list[Probe], good: int, bad: int, bound: int, done: int) -> int | None:
    """A batch between the largest that fits and the smallest that does not; None where the model expects no more."""
    room = points[-1].room_for_tensors
    enough = MOST_BELOW + MARGIN if room < 1.0 else MOST_BELOW  # what is kept free here is there for the run
    predicted = _predicted(points, room)
    if predicted < bad:
        most = min(_predicted(points), bad - 1)
        if good >= CLOSE_ENOUGH * predicted and good >= min(NEAR * most, enough * (bad - 1)):
            return None
        if done == len(points) <= MAX_PROBES // 2 and predicted > FAR * points[-1].batch:
            return int(NEARER[len(points) - 2] * predicted)  # too far to trust small points
        half = (good + most) // 2  # where the memory is nearly full, the allocator reserves less beside tensors
        aim = max(good + 1, predicted - int(MARGIN * predicted), min(half, most - int(MARGIN * most)))
        if done == MAX_PROBES - 1 and room < 1.0 and good >= LAST_FROM * aim:  # where this runs out, `good` is near
            return min(aim, max(good + 1, int(good / MOST_BELOW) if bad > bound else half))
        return aim
    if bad > bound:
        return bound
    if good >= enough * (bad - 1):
        return None
    if good < 0.45 * bad:
        return max(good + 1, int(0.6 * bad))  # a second out-of-memory here would end the search far below
    last = done == MAX_PROBES - 1 and good >= LAST_STEP_FROM * bad  # only this keeps the promise
    back = STEP_BACK if good < STEP_BACK * (bad - 1) and not last else MOST_BELOW
    between = (good + bad) // 2 if last and room < 1.0 else 0  # the run that follows often fits a little more
    return min(max(good + 1, math.ceil(back * (bad - 1)), between), bad - 1)


def _predicted(points: list[Probe], room: float = 1.0) -> int:
    """The largest batch at which no rank and no phase is over `room`, from the last two or three points."""
    points = points[-3:]
    limit = 2 * points[-1].batch
    while limit < 2**40 and _share_at(points, limit) <= room:
        limit *= 2
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _share_at(points, middle) <= room else (low, middle)
    last = points[-1]
    proportional = int(last.batch / max(last.largest_share, 1e-9))
    return min(low, max(proportional, last.batch) * 16)


def _share_at(points: Sequence[Probe], batch: float) -> float:
    """The largest predicted share over ranks and phases, of tensors."""
    last = points[-1].shares or ()
    return max(
        _curve([(probe.batch, probe.shares[rank].get(phase, 0.0)) for probe in points if probe.shares], batch)
        for rank, phases in enumerate(last)
        for phase in phases
        if not is_reserved(phase)
    )


def _curve(points: list[tuple[int, float]], batch: float) -> float:
    """The line through the last two points; bent upwards where three points show that it bends."""
    (b1, s1), (b2, s2) = points[-2:]
    slope = max((s2 - s1) / (b2 - b1), 0.0)
    value = s2 + slope * (batch - b2)
    if len(points) < 3:
        return value
    b0, s0 = points[-3]
    bend = max((slope - (s1 - s0) / (b1 - b0)) / (b2 - b0), 0.0)
    return value + bend * max((batch - b1) * (batch - b2), 0.0)
