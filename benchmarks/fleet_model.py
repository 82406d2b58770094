"""A run on machines that are taken away, event by event: hours, dollars and goodput; fleet.py asks it.

Times are seconds of wall clock from the first start. One interruption of any node stops the whole run: steps since the
newest checkpoint are done again, after a restart, which an interruption may meet too.
"""

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

HOUR = 3600.0


class BadHistory(ValueError):
    """One sentence for the user."""


@dataclass(frozen=True)
class Run:
    """A training and what it costs to go on with it.

    Args:
        work_s: seconds of steps that it needs.
        checkpoint_s: for which a checkpoint holds it up.
        restart_s: from an interruption to the next step, the wait for a machine in place of the lost one included.
        interval_s: of steps between two checkpoints.
        start_s, end_s: before the first step of the first start, and after the last step.
        saves_on_notice: an interruption is announced in time for a checkpoint.
    """

    work_s: float
    checkpoint_s: float
    restart_s: float
    interval_s: float
    start_s: float = 0.0
    end_s: float = 0.0
    saves_on_notice: bool = False


@dataclass(frozen=True)
class History:
    """When machines were taken, and the price of one at each time; after its end it begins anew.

    Args:
        taken_s: times of interruptions, ascending.
        prices: (time, USD an hour from then on), ascending, the first at 0.
        length_s: none where there is no end.
    """

    taken_s: tuple[float, ...]
    prices: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    length_s: float = math.inf

    def interruptions(self) -> Iterator[float]:
        yield from self.taken_s
        if self.taken_s and not math.isinf(self.length_s):
            for number in count(1):
                yield from (number * self.length_s + at for at in self.taken_s)

    def begun_at(self, share: float) -> "History":
        """The same history, begun at this share of its length: what lay before comes after its end."""
        at = share * self.length_s
        taken = sorted((each - at) % self.length_s for each in self.taken_s)
        before = [usd for each, usd in self.prices if each <= at][-1]
        later = sorted(((each - at) % self.length_s, usd) for each, usd in self.prices)
        return replace(self, taken_s=tuple(taken), prices=((0.0, before), *(p for p in later if p[0])))

    @property
    def mean_s(self) -> float:
        """Between interruptions."""
        return self.length_s / len(self.taken_s) if self.taken_s else math.inf

    def usd(self, end_s: float) -> float:
        """Of one machine from 0 to end_s."""
        if math.isinf(self.length_s):
            return self._usd_within(end_s)
        rounds, rest = divmod(end_s, self.length_s)
        return rounds * self._usd_within(self.length_s) + self._usd_within(rest)

    def _usd_within(self, end_s: float) -> float:
        times = [*(at for at, _ in self.prices), math.inf]
        spans = (max(min(end_s, after) - at, 0.0) for at, after in pairwise(times))
        return sum(span * usd / HOUR for span, (_, usd) in zip(spans, self.prices, strict=True))


@dataclass(frozen=True)
class Outcome:
    """goodput: seconds of steps that were kept, over all seconds; usd: of all nodes."""

    hours: float
    usd: float
    goodput: float
    interruptions: int
    lost_s: float


def simulate(run: Run, history: History, nodes: int = 1) -> Outcome:
    """The run over one history. All nodes are paid for from the first start to the end, whoever waits for whom.

    Raises:
        BadHistory: it is interrupted 100,000 times, and never done.
    """
    done_s, lost_s, ready_s, met = 0.0, 0.0, run.start_s, 0
    for taken_s in history.interruptions():
        end_s = ready_s + _to_the_end(run, run.work_s - done_s)
        if end_s <= taken_s:
            break
        met += 1
        if met > 100_000:
            raise BadHistory(
                "100,000 interruptions and not done: the interval is too long for so many, or the restart."
            )
        if taken_s > ready_s:
            kept_s, again_s = _kept(run, min(taken_s - ready_s, _to_the_end(run, run.work_s - done_s) - run.end_s))
            done_s, lost_s = done_s + kept_s, lost_s + again_s
        ready_s = taken_s + run.restart_s
    else:
        end_s = ready_s + _to_the_end(run, run.work_s - done_s)
    return Outcome(end_s / HOUR, nodes * history.usd(end_s), run.work_s / end_s, met, lost_s)


def _to_the_end(run: Run, work_s: float) -> float:
    """Seconds of so much work with its checkpoints; the last part needs none."""
    return work_s + run.checkpoint_s * max(math.ceil(work_s / run.interval_s) - 1, 0) + run.end_s


def _kept(run: Run, seconds: float) -> tuple[float, float]:
    """(seconds of steps that a checkpoint holds, seconds of steps to do again) of so long since the first step."""
    cycles, rest = divmod(seconds, run.interval_s + run.checkpoint_s)
    since_s = min(rest, run.interval_s)
    return (cycles * run.interval_s + since_s, 0.0) if run.saves_on_notice else (cycles * run.interval_s, since_s)


# The interval


def young(checkpoint_s: float, mean_s: float) -> float:
    """Best interval where a checkpoint is short beside the mean time between interruptions (Young 1974)."""
    return math.sqrt(2 * checkpoint_s * mean_s)


def daly(checkpoint_s: float, mean_s: float) -> float:
    """The same to a higher order (Daly 2006, equation 37)."""
    if checkpoint_s >= 2 * mean_s:
        return mean_s
    part = checkpoint_s / (2 * mean_s)
    return young(checkpoint_s, mean_s) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint_s


def daly_seconds(run: Run, mean_s: float) -> float:
    """Expected seconds of a run under Poisson interruptions (Daly 2006, equation 20)."""
    cycles = run.work_s / run.interval_s
    return mean_s * math.exp(run.restart_s / mean_s) * math.expm1((run.interval_s + run.checkpoint_s) / mean_s) * cycles


def best_interval(run: Run, histories: Sequence[History], candidates: Sequence[float]) -> float:
    """Of the candidates the one with the highest mean goodput over all histories."""
    return max(candidates, key=lambda each: mean_goodput(replace(run, interval_s=each), histories))


def mean_goodput(run: Run, histories: Sequence[History]) -> float:
    """Work over the mean of all seconds."""
    hours = [simulate(run, history).hours for history in histories]
    return run.work_s * len(hours) / (sum(hours) * HOUR)


# Histories


def drawn(seed: int, nodes: int, node_hours: float, mean_usd: float, hours: float) -> History:
    """Poisson interruptions, one every `node_hours` of a node, and a price that returns to its mean, hour by hour."""
    chance = random.Random(f"fleet {seed}")
    taken, prices, deviation, at = [], [], 0.0, 0.0
    while (at := at + chance.expovariate(nodes / (node_hours * HOUR))) < hours * HOUR:
        taken.append(at)
    for hour in range(math.ceil(hours)):
        prices.append((hour * HOUR, mean_usd * math.exp(deviation)))
        deviation = 0.95 * deviation + chance.gauss(0, 0.03)
    return History(tuple(taken), tuple(prices), hours * HOUR)


def read_history(interruptions: Path, prices: Path | None, usd: float) -> History:
    """Of CSV files with a head: at_h (an interruption each), and at_h,usd_per_hour; the later of both ends it.

    Raises:
        BadHistory: a file is not of that form.
    """
    taken = sorted(row[0] for row in _rows(interruptions, ("at_h",)))
    priced = sorted(_rows(prices, ("at_h", "usd_per_hour"))) if prices else [[0.0, usd]]
    if not priced or priced[0][0] != 0:
        raise BadHistory(f"{prices}: the first price has to be that at at_h = 0.")
    ends = max([*taken, *(row[0] for row in priced)])
    if not taken or not ends:
        raise BadHistory(f"{interruptions}: it names no interruption after at_h = 0.")
    return History(tuple(at * HOUR for at in taken), tuple((at * HOUR, price) for at, price in priced), ends * HOUR)


def _rows(path: Path, columns: tuple[str, ...]) -> list[list[float]]:
    try:
        with path.open(newline="") as file:
            found = [[float(row[name]) for name in columns] for row in csv.DictReader(file)]
    except OSError as error:
        raise BadHistory(f"{path}: {error.strerror}.") from None
    except (KeyError, TypeError, ValueError):
        raise BadHistory(f"{path}: give a first line {','.join(columns)} and numbers below it.") from None
    if any(value < 0 or not math.isfinite(value) for row in found for value in row):
        raise BadHistory(f"{path}: a time or price is negative or no number.")
    return found
