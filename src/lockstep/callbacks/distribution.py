"""A running distribution: quantiles of any number of values in constant memory."""

import math

RESOLUTION = 200  # a bin is 0.5 % wide


class Distribution:
    """Count values in bins of equal relative width, and remember their sum and their maximum.

    A quantile is right to 0.25 %, and exact where each bin holds equal values. The number of bins
    depends on the range of the values (461 for a decade), not on how many there are.
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
            share: a number from 0 to 1; 0.5 is the median.
        """
        position = share * (self.count - 1)
        rank = math.floor(position)
        lower_value: float | None = None
        count_so_far = 0
        for key in sorted(self.bins):
            count, total = self.bins[key]
            count_so_far += count
            if lower_value is None and rank < count_so_far:
                lower_value = total / count
            if position <= count_so_far - 1:
                # Both neighbours are known, and are equal if they lie in one bin.
                assert lower_value is not None
                value = lower_value + (total / count - lower_value) * (position - rank)
                return min(value, self.maximum)
        return self.maximum
