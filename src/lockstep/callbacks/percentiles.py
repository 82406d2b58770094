"""Percentiles of a series of any length in bounded memory and time."""

import random
from array import array
from collections.abc import Sequence


class KeptSamples:
    """All values up to `capacity`; of a longer series one out of each `every` neighbours, drawn by chance.

    At least half of `capacity` values then stand for the series. The largest is exact. What is given as the median is
    the value at 50 % ± 1.6 % (standard deviation) of all, p10 and p90 at ± 0.9 %, less where neighbours resemble each
    other. Its random numbers are its own: a training draws the same with it and without.
    """

    def __init__(self, capacity: int = 2048) -> None:
        self.capacity, self.every = capacity, 1
        self.values = array("f")
        self.largest = float("-inf")
        self.random = random.Random(0)
        self.drawn, self.seen = 0.0, 0  # of the neighbours that are not complete yet

    def add(self, value: float) -> None:
        self.largest = max(self.largest, value)
        self.seen += 1
        if self.seen == 1 or self.random.random() * self.seen < 1:
            self.drawn = value
        if self.seen < self.every:
            return
        self.values.append(self.drawn)
        self.seen = 0
        if len(self.values) >= self.capacity:
            values = self.values
            # A new array: another thread may be reading the old one.
            self.values = array("f", (values[i + self.random.getrandbits(1)] for i in range(0, len(values) - 1, 2)))
            self.every *= 2

    def summary(self) -> dict[str, float] | None:
        """p10, p50, p90 and max; None of nothing."""
        stats = percentiles(self.values.tolist())
        return stats and stats | {"max": array("f", [self.largest])[0]}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p10, p50, p90 (linear between neighbours) and max; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return {"p10": at(0.1), "p50": at(0.5), "p90": at(0.9), "max": ordered[-1]}
