"""Images that a CSV file lists: spellings of columns, classes and paths.

Rows that are no images are named.
"""

import csv

import pytest
from PIL import Image

from data.csv_file import read_csv
from data.table import CSVDataModule
from lockstep.process.errors import UserError

HEADER = ["path", "label", "split"]


@pytest.fixture
def pictures(tmp_path):
    """Twelve images of each of two colours, in a folder without an order."""
    (tmp_path / "pictures").mkdir()
    for i in range(24):
        Image.new("RGB", (9, 6), (200 * (i % 2), 40, i)).save(
            tmp_path / "pictures" / f"{i:02d}.png"
        )
    return tmp_path / "pictures"


def rows(
    split=lambda i: "test" if i >= 20 else "val" if i >= 16 else "train",
    label=lambda i: ["blue", "red"][i % 2],
):
    return [[f"{i:02d}.png", label(i), split(i)] for i in range(24)]


def table(path, rows, header=HEADER, **dialect):
    with path.open("w", newline="") as file:
        csv.writer(file, **dialect).writerows([header, *rows])
    return path


def csv_module(root, tmp_path, **options):
    options = {
        "image_size": 8,
        "global_batch_size": 4,
        "num_workers": 0,
        "path": "loader",
        **options,
    }
    return CSVDataModule(root=root, cache_dir=tmp_path / "cache", **options)


def facts(dm):
    dm.prepare()
    return dm.num_train, dm.num_val, dm.num_test, dm.class_names


USUAL = (16, 4, 4, ["blue", "red"])


@pytest.mark.parametrize(
    ("header", "val", "encoding", "dialect"),
    [
        (
            ["Path", "Label", "Split"],
            "Valid",
            "utf-8-sig",
            {"delimiter": ";", "lineterminator": "\n"},
        ),
        (["filename", "class", "set"], "dev", "utf-16", {"delimiter": "\t"}),
        (
            [" path", "label ", "SET"],
            "VAL",
            "utf-16-le",
            {"delimiter": "|", "lineterminator": "\n"},
        ),
    ],
)
def test_other_names_of_columns_and_splits_delimiters_and_encodings(
    header, val, encoding, dialect, pictures, tmp_path
):
    def split(i):
        return "Test " if i >= 20 else val if i >= 16 else "Training"

    root = table(
        pictures / "list.csv", rows(split, lambda i: ["blau", "rötlich"][i % 2]), header, **dialect
    )
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    root.write_bytes((mark + root.read_bytes().decode()).encode(encoding))
    dm = csv_module(root, tmp_path)
    assert facts(dm) == (16, 4, 4, ["blau", "rötlich"])
    dm.attach_to_ranks()
    images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
    assert (
        labels.tolist() == [0, 1, 0, 1]
        and (images[labels == 1][:, 0] > images[labels == 0][:, 0]).all()
    )


def test_a_column_of_splits_may_have_any_name(pictures, tmp_path):
    dm = csv_module(table(pictures / "list.csv", rows(), ["path", "label", "usage"]), tmp_path)
    assert facts(dm) == USUAL
    kaggle = [[*row[:2], i % 5, {"train": "Training", "val": "PublicTest", "test": "PrivateTest"}[row[2]]]
              for i, row in enumerate(rows())]  # fmt: skip
    root = table(pictures / "kaggle.csv", kaggle, ["path", "label", "fold", "Usage"])
    assert facts(csv_module(root, tmp_path)) == USUAL
    root = table(tmp_path / "list.csv", rows(lambda i: i % 5), ["path", "label", "fold"])
    assert facts(csv_module(root, tmp_path, images=pictures, test_fraction=0.25))[:3] == (16, 2, 6)
    with pytest.raises(UserError, match=r"none.csv cannot be read \(No such file or directory\)"):
        csv_module(pictures / "none.csv", tmp_path).prepare()


def test_spellings_of_one_class_and_of_a_path(pictures, tmp_path):
    def label(i):
        return ["blue", "red "][i % 2] if i < 9 else [" blue", "red"][i % 2]

    windows = table(
        tmp_path / "a.csv", [[f"pictures\\{row[0]}", *row[1:]] for row in rows(label=label)]
    )
    assert facts(csv_module(windows, tmp_path)) == USUAL
    numbers = table(
        pictures / "b.csv",
        rows(label=lambda i: ["1", "10.0"][i % 2] if i < 9 else ["1.0", "10"][i % 2]),
    )
    assert facts(csv_module(numbers, tmp_path))[3] == ["1", "10"]


def test_the_same_path_twice(pictures, tmp_path):
    dm = csv_module(table(pictures / "a.csv", [*rows(), *rows()[:3]]), tmp_path)
    assert facts(dm) == USUAL and len(dm.left_out["repeated lines"]) == 3
    for path, label, split in (("./00.png", "blue", "test"), ("00.png", "red", "train")):
        root = table(pictures / "b.csv", [*rows(), [path, label, split]])
        with pytest.raises(
            UserError, match=f"lines 2 and 26: {path} is train blue and {split} {label}: give one"
        ):
            csv_module(root, tmp_path).prepare()


BAD = {
    "has no column path: it has name, label. Give data.path_column=": "name,label\n00.png,red\n",
    "has no column label: it has path. Give data.label_column=": "path\n00.png\n",
    "line 3: 2 values for 3 columns": "path,label,split\n00.png,red,train\n01.png,red\n",
    "line 2: split is 0: give one of train, val": "path,label,split\n00.png,red,0\n01.png,red,1\n",
    "line 3: split is extra: give one of train, val": "path,label,split\n00.png,red,train\n01.png,red,extra\n",
    "line 2: a path and a label are needed": "path,label\n00.png,\n",
    "line 2: .*nowhere.png cannot be read": "path,label\nnowhere.png,red\n",
    "list.csv has no rows": "path,label\n",
    "has a column is_test: give one named split": "path,label,is_test\n00.png,red,0\n01.png,red,1\n",
    "has a column is_valid: give one named split": "path,label,is_valid\n00.png,red,0\n01.png,red,1\n",
    "the class red has no image to train on": "path,label,split\n00.png,blue,train\n03.png,red,test\n",
    "two columns have one name": "path,label,label\n00.png,red,7\n",
    "is not a CSV file in UTF-8 or UTF-16": "path,label\n00.png,\udc81\n",
}


@pytest.mark.parametrize("said", BAD)
def test_a_line_that_is_no_image_is_named(said, pictures, tmp_path):
    (pictures / "list.csv").write_text(BAD[said], errors="surrogateescape")
    with pytest.raises(UserError, match=said):
        csv_module(pictures / "list.csv", tmp_path, global_batch_size=1, val_fraction=0).prepare()


def test_a_label_named_as_a_split_and_a_missing_mask(pictures, tmp_path):
    root = table(
        pictures / "list.csv", [[f"{i:02d}.png", i % 2] for i in range(24)], ["path", "is_test"]
    )
    dm = csv_module(root, tmp_path, label_column="is_test")
    assert facts(dm)[3] == ["0", "1"]
    with pytest.raises(UserError, match="line 2: the mask .*/0 does not exist"):
        csv_module(root, tmp_path, label_column="is_test", target="mask").prepare()


def test_a_table_as_excel_saves_it_is_read(pictures, tmp_path):
    root = table(
        pictures / "a.csv", rows(label=lambda i: ["blau", "rötlich"][i % 2]), delimiter=";"
    )
    root.write_bytes(root.read_text().encode("cp1252"))
    dm = csv_module(root, tmp_path)
    assert facts(dm)[3] == ["blau", "rötlich"]
    assert "Windows-1252: " in dm.warnings[0] and "save it as CSV UTF-8" in dm.warnings[0]
    root.write_bytes(b"path,label\n00.png,\x81\n")
    with pytest.raises(UserError, match="not a CSV file in UTF-8 or UTF-16: save it as CSV UTF-8"):
        csv_module(root, tmp_path).prepare()


def test_decimal_commas_are_numbers(pictures, tmp_path):
    numbers = [[f"{i:02d}.png", f"{i},5"] for i in range(24)]
    root = table(pictures / "a.csv", numbers, ["path", "label"], delimiter=";")
    dm = csv_module(root, tmp_path, target="number")
    dm.prepare()
    assert sorted(dm.source.targets[""].tolist()) == [i + 0.5 for i in range(24)]
    assert "0,5 is read as 0.5" in dm.warnings[0]
    root = table(pictures / "b.csv", [["00.png", "1,234"]], ["path", "label"])
    with pytest.raises(UserError, match="line 2: label is 1,234, which may be 1.234 or 1234"):
        csv_module(root, tmp_path, target="number").prepare()


def test_a_row_is_at_its_first_line(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('path,note\na.png,"two\nlines"\n\nb.png,x\n')
    assert read_csv(path).lines == [2, 5]


def test_files_that_are_missing_are_counted(pictures, tmp_path):
    for i in (3, 5, 9):
        (pictures / f"{i:02d}.png").unlink()
    root = table(pictures / "a.csv", rows())
    with pytest.raises(UserError, match="line 5: .*03.png .* 2 more .*check_data.py. lists them"):
        csv_module(root, tmp_path).prepare()


def test_lines_that_repeat_others_name_what_weighs_classes(pictures, tmp_path):
    dm = csv_module(table(pictures / "a.csv", [*rows(), *rows()[:3]]), tmp_path)
    dm.prepare()
    assert "data.sampling=balanced" in dm.warnings[0]
    assert "loss.class_weights=auto" in dm.warnings[0]


def test_names_without_endings_get_one(pictures, tmp_path):
    named = [[name.removesuffix(".png"), *rest] for name, *rest in rows()]
    root = table(pictures / "a.csv", named)
    with pytest.raises(UserError, match="00.png exists: give data.suffix=.png"):
        csv_module(root, tmp_path).prepare()
    assert facts(csv_module(root, tmp_path, suffix=".png")) == USUAL


def test_a_column_of_folds_is_reported(pictures, tmp_path):
    folds = [[*row[:2], i % 5] for i, row in enumerate(rows())]
    root = table(pictures / "a.csv", folds, ["path", "label", "kfold"])
    dm = csv_module(root, tmp_path)
    dm.prepare()
    assert "data.group=kfold" in dm.warnings[0]
    dm = csv_module(root, tmp_path, group="kfold")
    dm.prepare()
    assert not dm.warnings


def test_an_empty_cell_is_no_group(pictures, tmp_path):
    folds = [[*row[:2], "" if i == 3 else i % 5] for i, row in enumerate(rows())]
    root = table(pictures / "a.csv", folds, ["path", "label", "Patient"])
    with pytest.raises(UserError, match="line 5: Patient is empty, and data.group needs it"):
        csv_module(root, tmp_path, group="patient").prepare()


def test_a_text_that_is_too_long_is_no_mask(pictures, tmp_path):
    runs = [[row[0], "12 5 " * 200, row[2]] for row in rows()]
    root = table(pictures / "a.csv", runs)
    with pytest.raises(UserError, match="line 2: the mask .* does not exist"):
        csv_module(root, tmp_path, target="mask").prepare()


def test_a_column_for_each_class_makes_classes(pictures, tmp_path):
    header = ["image", "MEL", "NV", "BCC", "split"]
    one_hot = [[r[0], *(float(i % 3 == c) for c in range(3)), r[2]] for i, r in enumerate(rows())]
    dm = csv_module(table(pictures / "a.csv", one_hot, header), tmp_path)
    assert facts(dm)[3] == ["BCC", "MEL", "NV"] and dm.target_kind == "class"
    assert [dm.source.target_name(i) for i in range(3)] == ["MEL", "NV", "BCC"]
    one_hot[5][1:4] = [1.0, 1.0, 0.0]
    with pytest.raises(UserError, match="has no column label"):
        csv_module(table(pictures / "b.csv", one_hot, header), tmp_path).prepare()


def test_splits_of_a_table_can_be_drawn_again(pictures, tmp_path):
    root = table(pictures / "a.csv", rows())
    assert facts(csv_module(root, tmp_path, splits=False, test_fraction=0.25))[:3] == (16, 2, 6)
    root = table(pictures / "b.csv", [row[:2] for row in rows()], ["path", "label"])
    with pytest.raises(UserError, match="data.splits=true, but .* has no column of splits"):
        csv_module(root, tmp_path, splits=True).prepare()


def test_pictures_above_the_limit_are_read_when_it_is_raised(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    root = table(pictures / "a.csv", rows())
    dm = csv_module(root, tmp_path)
    dm.attach_to_ranks()
    with pytest.raises(UserError, match="more than 0 megapixels: give data.max_megapixels="):
        list(dm.train_dataloader())
    dm = csv_module(root, tmp_path, max_megapixels=0.1)
    dm.attach_to_ranks()
    assert len(list(dm.train_dataloader())) == 4
