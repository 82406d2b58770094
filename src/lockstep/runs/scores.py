"""Metrics as the terminal and the page show them, and the confusion matrix of a test."""

import csv
from collections.abc import Sequence
from pathlib import Path

from lockstep.runs.files import write_atomically


def as_read(name: str, value: float) -> str:
    """Return a metric as the terminal shows it: accuracies in percent."""
    return f"{value:.2%}" if name.startswith(("val/acc", "test/acc")) else f"{value:.4g}"


def tested_name(monitor: str) -> str:
    """Return the metric of a test that a monitored one stands for: test/mae for val/mae; test/acc for train/loss."""
    return monitor.replace("val", "test", 1) if monitor.startswith("val") else "test/acc"


def write_confusion(confusion: Sequence[Sequence[int]], class_names: Sequence[str], path: Path) -> None:
    rows = [["true \\ predicted", *class_names]]
    rows += [[name, *map(str, row)] for name, row in zip(class_names, confusion, strict=True)]
    write_atomically(path, lambda file: csv.writer(file).writerows(rows))


def class_scores(confusion: Sequence[Sequence[int]]) -> list[tuple[int, float | None, float | None, float | None]]:
    """Return (images, precision, recall, F1) of each class, shares from 0 to 1; None where nothing was counted."""

    def share(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    found = []
    for i, (row, column) in enumerate(zip(confusion, zip(*confusion, strict=True), strict=True)):
        right, images, predicted = row[i], sum(row), sum(column)
        found.append((images, share(right, predicted), share(right, images), share(2 * right, images + predicted)))
    return found
