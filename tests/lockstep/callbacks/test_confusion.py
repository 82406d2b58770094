"""Exact numbers, and a picture whose cells are as dark as their share of the row."""

import csv

import pytest
import torch
from PIL import Image

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


def test_a_cell_is_as_dark_as_its_share_of_the_row(folder):
    write_confusion(CONFUSION, ["a", "b", "c"], folder)
    with Image.open(folder.confusion_matrix_image) as file:
        picture = file.convert("RGB")
    left = next(x for x in range(picture.width) if picture.getpixel((x, 32 + 5)) == (0x77, 0x77, 0x77)) + 1
    cell = (picture.width - 16 - left) // 3
    corner = [[picture.getpixel((left + cell * j + 3, 32 + cell * i + 3)) for j in range(3)] for i in range(3)]
    assert corner[1] == [(255, 255, 255), (8, 48, 107), (255, 255, 255)]
    assert corner[0][0] == (57, 89, 137)  # 255 + 0.8 · (8 − 255), …
    assert corner[2][0] == corner[2][2] == (132, 152, 181)


@pytest.mark.parametrize("classes", [1, 2, 21, 40, 1000])
def test_any_number_of_classes_and_any_name_fits(folder, classes):
    names = [f"{i} Käfer 象 " + "x" * 300 for i in range(classes)]
    write_confusion(torch.eye(classes, dtype=torch.int64), names, folder)
    with Image.open(folder.confusion_matrix_image) as picture:
        assert 200 <= picture.width <= 1400 and 200 <= picture.height <= 1400
