"""Tell whether one setting is better than another, by pairs of runs that share a seed or a fold.

The interval is Student's t over the differences of the pairs. Folds share training images, so their
differences are not independent. For this Nadeau and Bengio (2003), "Inference for the
generalization error", equation (19), add the ratio of validation to training images to 1/n.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The confidence of intervals.
CONFIDENCE = 0.95
# The probability with which the suggested number of pairs shows the named difference.
POWER = 0.9
# The spread of two differences has one degree of freedom, which says next to nothing.
MIN_PAIRS = 3
MAX_PAIRS = 1000


@dataclass(frozen=True)
class Sample:
    """Values of one setting, or differences of pairs.

    Args:
        values: the values of single runs, at least one.
        fold_ratio: validation images per training image, if folds share training images; 0: the
            runs are independent.
    """

    values: Sequence[float]
    fold_ratio: float = 0.0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation of single values; nan if there is one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean, corrected for folds; nan if there is one value."""
        return self.deviation * math.sqrt(1 / len(self.values) + self.fold_ratio)

    @property
    def half_width(self) -> float:
        """Half of the mean's interval; nan if there are fewer values than MIN_PAIRS."""
        if len(self.values) < MIN_PAIRS:
            return math.nan
        return t_quantile((1 + CONFIDENCE) / 2, len(self.values) - 1) * self.error


def t_quantile(share: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution."""
    # scikit-learn has installed scipy. Its import takes a tenth of a second.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, share))


def pairs_needed(deviation: float, difference: float) -> int:
    """Return how many independent pairs show a difference of this size with the power POWER.

    Args:
        deviation: the standard deviation of the differences of single pairs.
    """
    for pairs in range(MIN_PAIRS, MAX_PAIRS):
        degrees = pairs - 1
        quantiles = t_quantile((1 + CONFIDENCE) / 2, degrees) + t_quantile(POWER, degrees)
        if quantiles * deviation / math.sqrt(pairs) <= difference:
            return pairs
    return MAX_PAIRS


def is_significant(differences: Sample) -> bool:
    """Return whether zero lies outside of the interval of the mean difference."""
    return abs(differences.mean) > differences.half_width


def describe_difference(differences: Sample, *, minimize: bool, unit: str = "") -> str:
    """Return what the pairs show in words, and no more.

    Args:
        differences: a setting's values minus those of its reference, in the unit.
        minimize: whether a lower value is better.
        unit: `points` for a share in percent, "" for other metrics.
    """
    count = len(differences.values)
    pairs = f"{count} {'fold' if differences.fold_ratio else 'pair'}{'s' if count != 1 else ''}"
    if count < MIN_PAIRS:
        return (
            f"{pairs} give{'s' if count == 1 else ''} no interval, which takes {MIN_PAIRS} or more"
        )
    first = differences.values[0]
    if all(value == first for value in differences.values):
        if not first:
            return f"equal in all {pairs}"
        size = f"{format_rounded(abs(first), 2)} {unit}".rstrip()
        return f"differs by {size} in each of {pairs}: no spread to make an interval of"

    width = differences.half_width
    if not is_significant(differences):
        return _describe_insignificant(differences, pairs, unit)
    verdict = "better" if (differences.mean < 0) is minimize else "worse"
    size = format_with_error(abs(differences.mean), width, unit)
    basis = f"{CONFIDENCE * 100:.0f} %, {pairs}"
    if differences.fold_ratio:
        basis += ", which share training images: with Nadeau and Bengio's correction"
    return f"{verdict} by {size} ({basis})"


def _describe_insignificant(differences: Sample, pairs: str, unit: str) -> str:
    width = differences.half_width
    largest = f"{format_rounded(width, 1)} {unit}".rstrip()
    text = f"no difference larger than {largest} can be told from these {pairs}"
    if differences.fold_ratio:
        # More folds would share even more images, so no number of folds is suggested.
        return f"{text}, which share training images: with Nadeau and Bengio's correction"
    smaller = float(format_rounded(width, 1)) / 2
    needed = pairs_needed(differences.deviation, smaller)
    if needed >= MAX_PAIRS:
        return text
    return f"{text}; about {needed} would tell {smaller:.4g}"


def format_with_error(value: float, error: float, unit: str = "") -> str:
    """Return "0.34 ± 0.15 points". Both have the decimals that give the error two digits."""
    decimals = _decimals(error, 2)
    return f"{value:.{decimals}f} ± {error:.{decimals}f} {unit}".rstrip()


def format_rounded(value: float, digits: int) -> str:
    """Return a number with so many significant digits, without an exponent."""
    decimals = digits - 1 - _magnitude(value, digits)
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def _decimals(value: float, digits: int) -> int:
    return max(0, digits - 1 - _magnitude(value, digits))


def _magnitude(value: float, digits: int) -> int:
    """Return the exponent of ten of the rounded value; -1 for zero."""
    if not value or not math.isfinite(value):
        return -1
    return int(f"{value:.{digits - 1}e}".partition("e")[2])
