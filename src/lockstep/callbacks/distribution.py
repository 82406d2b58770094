"""A running distribution: quantiles of any number of values in constant memory."""

import math

RESOLUTION = 500  # a bin is 0.2 % wide


class Distribution:
    """Count values in bins of equal relative width, and remember their sum and their maximum.

    A quantile is right to 0.1 %, and exact where each bin holds equal values. The number of bins
    depends on the range of the values (1,151 for a decade), not on how many there are.
    """

    def __init__(self) -> None:
        self.bins: dict[float, tuple[int, float]] = {}  # number and sum of the values of each bin
        self.count = 0
        self.total = 0.0
        self.maximum = -math.inf

    def add(self, value: float) -> None:
        """Count a value that is not negative."""
        key = round(math.log(value) * RESOLUTION) if value > 0 else -math.inf
        count, total = self.bins.get(key, (0, 0.0))
        self.bins[key] = (count + 1, total + value)
        self.count += 1
        self.total += value
        self.maximum = max(self.maximum, value)

    def quantile(self, share: float) -> float:
        """Return the value below which a share of all values lies, between two of them as numpy does.

        Args:
            share: from 0 to 1; 0.5 is the median.
        """
        position = share * (self.count - 1)
        below = self._ranked(math.floor(position))
        above = self._ranked(math.ceil(position))
        between = below + (above - below) * (position - math.floor(position))
        return min(between, self.maximum)

    def _ranked(self, rank: int) -> float:
        """Return the value of a rank, from 0 for the smallest: the mean of its bin."""
        seen = 0
        # The callers' thread adds values at the same time: sort a copy.
        for _, (count, total) in sorted(self.bins.copy().items()):
            seen += count
            if rank < seen:
                return total / count
        return self.maximum
