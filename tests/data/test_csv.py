"""Images listed in a table: its splits, its classes, and each kind of bad line by its number."""

import csv

import pytest
from PIL import Image

from data.csv import CSVDataModule
from data.image_folder import ImageFolderDataModule
from lockstep.runs.errors import UserError
from runs import run_door

COLOURS = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200)}


def table(folder, splits=("train", "train", "train", "val", "test"), times=4, header=("path", "label", "split")):
    """`times` images of each class for each of `splits`; returns the CSV file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(times):
        for label, colour in COLOURS.items():
            for place, split in enumerate(splits):
                name = f"pictures/{label}-{i}-{place}.png"
                (folder / "pictures").mkdir(exist_ok=True)
                Image.new("RGB", (12, 12), tuple(c + i for c in colour)).save(folder / name)
                rows.append((name, label, split)[: len(header)])
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return folder / "list.csv"


def module(root, tmp_path, **options):
    options = {"image_size": 12, "global_batch_size": 6, "num_workers": 0, "test_fraction": 0.25, **options}
    return CSVDataModule(root=root, cache_dir=tmp_path / "cache", **options)


def facts(dm):
    dm.prepare()
    return dm.num_train, dm.num_val, dm.num_test


def test_its_splits_and_classes(tmp_path):
    dm = module(table(tmp_path), tmp_path)
    assert facts(dm) == (36, 12, 12) and dm.class_names == ["blue", "green", "red"]
    dm.place()
    for batch in dm.test_dataloader():
        images, labels = dm.on_after_batch_transfer(batch, 0)[:2]
        brightest = images.mean((2, 3)).argmax(1).tolist()  # red, green, blue
        assert [("red", "green", "blue")[c] for c in brightest] == [dm.class_names[label] for label in labels]


def test_without_a_split_column_test_images_are_drawn(tmp_path):
    dm = module(table(tmp_path, header=("path", "label")), tmp_path)
    assert facts(dm)[2] == 15 and sum(facts(dm)) == 60


def test_other_columns_and_another_folder(tmp_path):
    made = table(tmp_path / "a", header=("file", "kind", "part"))
    moved = tmp_path / "elsewhere.csv"
    made.rename(moved)
    own = {"path_column": "file", "label_column": "kind", "split_column": "part", "images": tmp_path / "a"}
    assert facts(module(moved, tmp_path, **own)) == (36, 12, 12)


def test_paths_may_be_absolute(tmp_path):
    made = table(tmp_path)
    text = made.read_text().replace("pictures/", f"{tmp_path}/pictures/")
    elsewhere = tmp_path / "other" / "list.csv"
    elsewhere.parent.mkdir()
    elsewhere.write_text(text)
    for path in ("array", "loader"):
        assert facts(module(elsewhere, tmp_path, path=path)) == (36, 12, 12)


def test_the_same_pixels_as_of_a_folder(tmp_path):
    made = table(tmp_path, splits=("train", "test"))
    for line in made.read_text().splitlines()[1:]:
        name, label, split = line.split(",")
        place = tmp_path / "tree" / split / label
        place.mkdir(parents=True, exist_ok=True)
        (place / name.split("/")[1]).write_bytes((tmp_path / name).read_bytes())
    options = {"image_size": 12, "global_batch_size": 6, "num_workers": 0, "cache_dir": tmp_path / "cache"}
    seen = []
    for dm in (CSVDataModule(root=made, **options), ImageFolderDataModule(root=tmp_path / "tree", **options)):
        dm.prepare()
        dm.place()
        found = [dm.on_after_batch_transfer(batch, 0) for batch in dm.test_dataloader()]
        seen.append(sorted((int(y), x.tobytes()) for xs, ys in found for x, y in zip(xs.numpy(), ys, strict=True)))
    assert seen[0] == seen[1] and len(seen[0]) == 12


def spoiled(made, line, words):
    lines = made.read_text().splitlines()
    lines[line - 1] = words
    made.write_text("\n".join(lines) + "\n")
    return made


BAD = {
    "pictures/none.png,red,train": r"line 5: there is no file .*none\.png",
    "pictures/red-0-0.png,red": "line 5: 2 values for 3 columns",
    "pictures/red-0-0.png,,train": "line 5: a path and a label are needed",
    "pictures/red-0-0.png,red,holdout": "line 5: split is holdout: it is one of train, val and test",
    "pictures/red-0-0.png,mauve,test": "line 5: the class mauve has no image to train on; those that have: blue, green",
    '"pictures/red-0-0.png,red,train': "no CSV file in UTF-8",
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_line_is_named(words, tmp_path):
    with pytest.raises(UserError, match=BAD[words]):
        module(spoiled(table(tmp_path), 5, words), tmp_path).prepare()


def test_a_bad_table_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no column label: it has path, kind, split; say data.label_column="):
        module(table(tmp_path, header=("path", "kind", "split")), tmp_path).prepare()
    with pytest.raises(UserError, match="lists no image to train on"):
        module(table(tmp_path, splits=("test",)), tmp_path).prepare()
    with pytest.raises(UserError, match="none to test on"):
        module(table(tmp_path, splits=("train", "val")), tmp_path).prepare()
    with pytest.raises(UserError, match="cannot be read"):
        module(tmp_path / "nowhere.csv", tmp_path).prepare()
    with pytest.raises(UserError, match="is a folder, and data=csv reads a file"):
        module(tmp_path, tmp_path)


@pytest.mark.slow
def test_a_run_trains_on_it_and_a_missing_file_ends_it_before_the_first_step(tmp_path):
    made = table(tmp_path)
    words = ["data=csv", f"data.root={made}", "data.image_size=12", "data.global_batch_size=6", "model=small_cnn",
             "trainer=cpu", "trainer.max_epochs=6", "data.flip=false", "run_id=r"]  # fmt: skip
    done = run_door("train", *words, logs=tmp_path / "logs")
    assert done.code == 0 and done.record["metrics"]["test/acc"] == 1.0, done.output
    again = run_door("eval", "ckpt_path=r", logs=tmp_path / "logs")
    assert again.code == 0, again.output
    refused = run_door(
        "train", *words[:-1], "run_id=s", f"data.root={spoiled(made, 2, 'x.png,red,train')}", logs=tmp_path
    )
    assert refused.code == 2 and "line 2: there is no file" in refused.output
