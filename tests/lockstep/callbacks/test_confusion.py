"""Exact counts, and the accuracy of each class."""

import csv

import pytest
import torch

from lockstep.callbacks.confusion import write_confusion
from lockstep.runs.folder import RunFolder

CONFUSION = torch.tensor([[8, 0, 2], [0, 10, 0], [5, 0, 5]])


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_counts_and_accuracy_of_each_class(folder):
    assert write_confusion(CONFUSION, ["a", "b,c", "d"], folder) == {"a": 0.8, "b,c": 1.0, "d": 0.5}
    rows = list(csv.reader(folder.confusion_matrix.read_text(encoding="utf-8").splitlines()))
    assert rows == [["true \\ predicted", "a", "b,c", "d"], ["a", "8", "0", "2"], ["b,c", "0", "10", "0"],
                    ["d", "5", "0", "5"]]  # fmt: skip
