"""The confusion matrix of a test, and the accuracy of each class. pages/confusion_svg.py draws it."""

import csv
from typing import Any

from torch import Tensor

from lockstep.runs.csv_files import guarded
from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RunFolder


def write_confusion(confusion: Tensor, class_names: list[str], folder: RunFolder) -> dict[str, float]:
    """Write confusion_matrix.csv into the run folder; returns accuracy per class.

    Args:
        confusion: (classes, classes) exact counts, rows true, columns predicted.
    """
    rows = confusion.tolist()

    def write(file: Any) -> None:
        writer = csv.writer(file)
        names = list(map(guarded, class_names))
        writer.writerow(["true \\ predicted", *names])
        writer.writerows([name, *row] for name, row in zip(names, rows, strict=True))

    write_atomically(folder.confusion_matrix, write)
    return {name: row[i] / max(sum(row), 1) for i, (name, row) in enumerate(zip(class_names, rows, strict=True))}
