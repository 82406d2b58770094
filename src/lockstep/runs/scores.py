"""Compute scores from exact counts of a test: precision, recall, F1 of each class, balanced accuracy, calibration."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.runs.files import write_atomically

BINS = 15  # of confidence, equally wide (Guo et al. 2017)


@dataclass(frozen=True)
class ExactCounts:
    """The counts of a whole test, over all ranks.

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
    """Return a metric as the terminal shows it: accuracies in percent."""
    return f"{value:.2%}" if name.startswith(("val/acc", "test/acc")) else f"{value:.4g}"


def write_confusion(confusion: Sequence[Sequence[int]], class_names: Sequence[str], path: Path) -> None:
    """Write a confusion matrix as CSV, for the page and for the user."""
    rows = [["true \\ predicted", *class_names]]
    rows += [[name, *map(str, row)] for name, row in zip(class_names, confusion, strict=True)]
    write_atomically(path, lambda file: csv.writer(file).writerows(rows))


def tested_name(monitor: str) -> str:
    """Return the metric of a test that a monitored one stands for: test/mae for val/mae; test/acc for train/loss."""
    return monitor.replace("val", "test", 1) if monitor.startswith("val") else "test/acc"


def class_scores(confusion: Sequence[Sequence[int]]) -> list[ClassScores]:
    """Return the scores of each class; `confusion[true][predicted]` is square."""
    scores = []
    for i, (row, column) in enumerate(zip(confusion, zip(*confusion, strict=True), strict=True)):
        right, images, taken = row[i], sum(row), sum(column)
        shares = (
            part / whole if whole else None
            for part, whole in ((right, taken), (right, images), (2 * right, images + taken))
        )
        scores.append(ClassScores(images, *shares))
    return scores


def summary(confusion: Sequence[Sequence[int]], calibration: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return f1_macro, balanced_acc and ece, or nothing without images.

    f1_macro is the mean over the classes that are there or were predicted, balanced_acc the mean recall of those that
    are there, ece the expected calibration error: the mean distance of confidence and accuracy.
    """
    scores = class_scores(confusion)
    f1s = [score.f1 for score in scores if score.f1 is not None]
    recalls = [score.recall for score in scores if score.recall is not None]
    images = sum(row[0] for row in calibration)
    if not images:
        return {}
    off = sum(abs(right - confidence) for _, right, confidence in calibration)
    return {"f1_macro": sum(f1s) / len(f1s), "balanced_acc": sum(recalls) / len(recalls), "ece": off / images}
