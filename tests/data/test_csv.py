"""Tables of images: spellings of columns, classes and paths; lines that are no images are named."""

import csv

import pytest
from PIL import Image

from data.csv import CSVDataModule
from lockstep.runs.errors import UserError
from runs import run_door

HEADER = ["path", "label", "split"]


@pytest.fixture
def pictures(tmp_path):
    """Twelve images of each of two colours, in a folder without an order."""
    (tmp_path / "pictures").mkdir()
    for i in range(24):
        Image.new("RGB", (9, 6), (200 * (i % 2), 40, i)).save(tmp_path / "pictures" / f"{i:02d}.png")
    return tmp_path / "pictures"


def rows(split=lambda i: "test" if i >= 20 else "val" if i >= 16 else "train", label=lambda i: ["blue", "red"][i % 2]):
    return [[f"{i:02d}.png", label(i), split(i)] for i in range(24)]


def table(path, rows, header=HEADER, **dialect):
    with path.open("w", newline="") as file:
        csv.writer(file, **dialect).writerows([header, *rows])
    return path


def module(root, tmp_path, **options):
    options = {"image_size": 8, "global_batch_size": 4, "num_workers": 0, "path": "loader", **options}
    return CSVDataModule(root=root, cache_dir=tmp_path / "cache", **options)


def facts(dm):
    dm.prepare()
    return dm.num_train, dm.num_val, dm.num_test, dm.class_names


USUAL = (16, 4, 4, ["blue", "red"])


def test_splits_and_classes_are_those_of_the_table(pictures, tmp_path):
    dm = module(table(pictures / "list.csv", rows()), tmp_path)
    assert facts(dm) == USUAL
    dm.place()
    images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
    assert labels.tolist() == [0, 1, 0, 1] and (images[labels == 1][:, 0] > images[labels == 0][:, 0]).all()


def test_without_a_split_column_test_images_are_drawn(pictures, tmp_path):
    root = table(tmp_path / "list.csv", [row[:2] for row in rows()], HEADER[:2])
    assert facts(module(root, tmp_path, images=pictures, test_fraction=0.25)) == (16, 2, 6, ["blue", "red"])


@pytest.mark.parametrize(
    "header", [["Path", "Label", "Split"], ["filename", "class", "set"], [" path", "label ", "SET"]]
)
def test_columns_by_other_names(header, pictures, tmp_path):
    assert facts(module(table(pictures / "list.csv", rows(), header), tmp_path)) == USUAL


@pytest.mark.parametrize("spelling", ["Valid", "validation", "dev", "VAL"])
def test_splits_by_other_names(spelling, pictures, tmp_path):
    def split(i):
        return "Test " if i >= 20 else spelling if i >= 16 else "Training"

    assert facts(module(table(pictures / "list.csv", rows(split)), tmp_path)) == USUAL


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_delimiters_and_line_ends(delimiter, pictures, tmp_path):
    for end in ("\n", "\r\n"):
        root = table(pictures / "list.csv", rows(), delimiter=delimiter, lineterminator=end)
        assert facts(module(root, tmp_path)) == USUAL


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le with a mark"])
def test_other_encodings(encoding, pictures, tmp_path):
    root = table(pictures / "list.csv", rows(label=lambda i: ["blau", "rötlich"][i % 2]))
    text = root.read_text()
    root.write_bytes(("\ufeff" + text).encode("utf-16-le") if "mark" in encoding else text.encode(encoding))
    assert facts(module(root, tmp_path)) == (16, 4, 4, ["blau", "rötlich"])


def test_spellings_of_one_class_and_of_a_path(pictures, tmp_path):
    blanks = table(
        pictures / "a.csv", rows(label=lambda i: ["blue", "red "][i % 2] if i < 9 else [" blue", "red"][i % 2])
    )
    assert facts(module(blanks, tmp_path)) == USUAL
    numbers = table(pictures / "b.csv", rows(label=lambda i: ["1", "10.0"][i % 2] if i < 9 else ["1.0", "10"][i % 2]))
    assert facts(module(numbers, tmp_path))[3] == ["1", "10"]
    windows = table(tmp_path / "c.csv", [[f"pictures\\{row[0]}", *row[1:]] for row in rows()])
    assert facts(module(windows, tmp_path)) == USUAL


def test_the_same_path_twice(pictures, tmp_path):
    dm = module(table(pictures / "a.csv", [*rows(), *rows()[:3]]), tmp_path)
    assert facts(dm) == USUAL and len(dm.left_out["repeated lines"]) == 3
    with pytest.raises(UserError, match="lines 2 and 26: 00.png has the splits train and test: give one"):
        module(table(pictures / "b.csv", [*rows(), ["00.png", "blue", "test"]]), tmp_path).prepare()
    with pytest.raises(UserError, match="lines 2 and 26: 00.png has the labels blue and red: give one"):
        module(table(pictures / "c.csv", [*rows(), ["00.png", "red", "train"]]), tmp_path).prepare()


def test_a_table_without_test_images_tests_on_val(pictures, tmp_path):
    dm = module(table(pictures / "list.csv", rows(lambda i: "val" if i >= 16 else "train")), tmp_path)
    assert facts(dm) == (16, 8, 8, ["blue", "red"])


def test_a_column_names_the_groups(pictures, tmp_path):
    patients = [[*row[:2], f"p{i // 3}"] for i, row in enumerate(rows())]
    root = table(pictures / "list.csv", patients, ["path", "label", "patient_id"])
    dm = module(root, tmp_path, group="patient_id", test_fraction=0.25)
    dm.prepare()
    patient_of = {row[0]: row[2] for row in patients}
    groups = [{patient_of[dm.image_name(i)] for i in getattr(dm.splits, split)} for split in ("train", "val", "test")]
    assert sum(map(len, groups)) == 8 == len(set.union(*groups)) and dm.num_test == 6


BAD = {
    "has no column path: it has name, label; give data.path_column=": "name,label\n00.png,red\n",
    "has no column label: it has path; give data.label_column=": "path\n00.png\n",
    "line 3: 2 values for 3 columns": "path,label,split\n00.png,red,train\n01.png,red\n",
    "line 3: the split is extra: give one of train, val": "path,label,split\n00.png,red,train\n01.png,red,extra\n",
    "line 2: a path and a label are needed": "path,label\n00.png,\n",
    "line 2: .*nowhere.png cannot be read": "path,label\nnowhere.png,red\n",
    "has no images": "path,label\n",
    "the class red has no image to train on": "path,label,split\n00.png,blue,train\n03.png,red,test\n",
    "is no CSV file in UTF-8 or UTF-16": "path,label\n00.png,\udce4\n",
}


@pytest.mark.parametrize("said", BAD)
def test_a_line_that_is_no_image_is_named(said, pictures, tmp_path):
    (pictures / "list.csv").write_text(BAD[said], errors="surrogateescape")
    with pytest.raises(UserError, match=said):
        module(pictures / "list.csv", tmp_path, global_batch_size=1, val_fraction=0).prepare()


@pytest.mark.slow
def test_a_run_trains_on_it(pictures, tmp_path):
    root = table(pictures / "list.csv", rows())
    words = ["data=csv", f"data.root={root}", "data.image_size=8", "data.global_batch_size=4", "model=small_cnn",
             "trainer=cpu", "trainer.max_epochs=8", "data.flip=false", "run_id=r"]  # fmt: skip
    done = run_door("train", *words, logs=tmp_path / "logs")
    assert done.code == 0 and done.record["metrics"]["test/acc"] == 1.0, done.output
