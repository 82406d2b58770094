"""What exact counts of a test say: precision, recall and F1 of each class, balanced accuracy, calibration."""

from collections.abc import Sequence
from dataclasses import dataclass

BINS = 15  # of confidence, equally wide (Guo et al. 2017)


@dataclass(frozen=True)
class ExactCounts:
    """Of a whole test, over all ranks.

    Args:
        confusion: square, `confusion[true][predicted]` images.
        calibration: for each bin of confidence its images, how many of them were right, and the sum of confidences.
    """

    confusion: list[list[int]]
    calibration: list[list[float]]


@dataclass(frozen=True)
class ClassScores:
    """Shares from 0 to 1; None where nothing was counted. images: of this class."""

    images: int
    precision: float | None
    recall: float | None
    f1: float | None


def as_read(name: str, value: float) -> str:
    """A metric as the terminal shows it: accuracies in percent."""
    return f"{value:.2%}" if name.startswith(("val/acc", "test/acc")) else f"{value:.4g}"


def class_scores(confusion: Sequence[Sequence[int]]) -> list[ClassScores]:
    """
    Args:
        confusion: square, `confusion[true][predicted]`.
    """
    taken = [sum(column) for column in zip(*confusion, strict=True)]
    return [_scores(row[i], sum(row), taken[i]) for i, row in enumerate(confusion)]


def _scores(right: int, images: int, taken: int) -> ClassScores:
    return ClassScores(images, _share(right, taken), _share(right, images), _share(2 * right, images + taken))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def summary(confusion: Sequence[Sequence[int]], calibration: Sequence[Sequence[float]]) -> dict[str, float]:
    """f1_macro: mean over classes that are there or were predicted; balanced_acc: mean recall of those that are there;
    ece: expected calibration error, the mean distance of confidence and accuracy."""
    scores = class_scores(confusion)
    f1s = [score.f1 for score in scores if score.f1 is not None]
    recalls = [score.recall for score in scores if score.recall is not None]
    images = sum(row[0] for row in calibration)
    if not images:
        return {}
    off = sum(abs(right - confidence) for _, right, confidence in calibration)
    return {"f1_macro": sum(f1s) / len(f1s), "balanced_acc": sum(recalls) / len(recalls), "ece": off / images}
