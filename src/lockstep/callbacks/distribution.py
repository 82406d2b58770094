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
        key = -math.inf
        if value > 0:
            key = round(math.log(value) * RESOLUTION)
        count, total = self.bins.get(key, (0, 0.0))
        self.bins[key] = (count + 1, total + value)
        self.count += 1
        self.total += value
        self.maximum = max(self.maximum, value)

    def quantile(self, share: float) -> float:
        """Return the value below which a share of all values lies; interpolate as numpy does.

        Args:
            share: from 0 to 1; 0.5 is the median.
        """
        position = share * (self.count - 1)
        rank = math.floor(position)
        below = self._ranked(rank)
        above = self._ranked(math.ceil(position))
        value = below + (above - below) * (position - rank)
        return min(value, self.maximum)

    def _ranked(self, rank: int) -> float:
        """Return the value of a rank, from 0 for the smallest: the mean of its bin."""
        seen = 0
        for key in sorted(self.bins):
            count, total = self.bins[key]
            seen += count
            if rank < seen:
                return total / count
        return self.maximum
