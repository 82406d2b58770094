"""What a test counted, as CSV files of the run folder; and the accuracy of each class. The pages draw them."""

import csv
from typing import Any

from lockstep.runs.files import write_atomically
from lockstep.runs.folder import RunFolder
from lockstep.runs.scores import BINS, ExactCounts


def write_counts(counts: ExactCounts, class_names: list[str], folder: RunFolder) -> dict[str, float]:
    """Write confusion_matrix.csv and calibration.csv into the run folder; returns accuracy per class."""

    def write_confusion(file: Any) -> None:
        writer = csv.writer(file)
        writer.writerow(["true \\ predicted", *class_names])
        writer.writerows([name, *row] for name, row in zip(class_names, counts.confusion, strict=True))

    def write_calibration(file: Any) -> None:
        writer = csv.writer(file)
        writer.writerow(["confidence_from", "confidence_to", "images", "correct", "confidence_sum"])
        for i, (images, correct, confidence) in enumerate(counts.calibration):
            writer.writerow([f"{i / BINS:.6g}", f"{(i + 1) / BINS:.6g}", int(images), int(correct), repr(confidence)])

    write_atomically(folder.confusion_matrix, write_confusion)
    write_atomically(folder.calibration, write_calibration)
    rows = enumerate(zip(class_names, counts.confusion, strict=True))
    return {name: row[i] / max(sum(row), 1) for i, (name, row) in rows}
