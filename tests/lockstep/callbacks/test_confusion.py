"""Exact counts, and the accuracy of each class."""

import csv

import pytest
from lockstep.callbacks.confusion import write_counts

from lockstep.runs.folder import RunFolder
from lockstep.runs.scores import BINS, ExactCounts

COUNTS = ExactCounts([[8, 0, 2], [0, 10, 0], [5, 0, 5]], [[2.0, 1.0, 0.125]] * BINS)


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_counts_and_accuracy_of_each_class(folder):
    assert write_counts(COUNTS, ["a", "b,c", "d"], folder) == {"a": 0.8, "b,c": 1.0, "d": 0.5}
    rows = list(csv.reader(folder.confusion_matrix.read_text(encoding="utf-8").splitlines()))
    assert rows == [["true \\ predicted", "a", "b,c", "d"], ["a", "8", "0", "2"], ["b,c", "0", "10", "0"],
                    ["d", "5", "0", "5"]]  # fmt: skip
    rows = list(csv.reader(folder.calibration.read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["confidence_from", "confidence_to", "images", "correct", "confidence_sum"]
    assert rows[3] == ["0.133333", "0.2", "2", "1", "0.125"] and len(rows) == 16
