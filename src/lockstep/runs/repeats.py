"""Runs that repeat one configuration with another fold or seed: what belongs together, its mean and its spread."""

import math
import statistics
from collections.abc import Sequence

REPEATED = ("data.fold", "seed", "data.seed")  # keys whose values do not make another configuration


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of a sample: n − 1) of two finite values or more; nan, nan of fewer."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values)
