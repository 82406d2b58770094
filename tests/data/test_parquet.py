"""Parquet files: which columns they are, what labels mean, what is damaged, and that nothing is unpacked twice."""

import io
import json

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from data.parquet import ParquetDataModule
from lockstep.runs.errors import UserError
from runs import run_door

NAMES = ["red", "green", "blue"]


def png(label, i=0):
    pixels = np.full((12, 12, 3), 5 + i, np.uint8)
    pixels[..., label] = 200 + i
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


PICTURES = [png(k, i) for i in range(8) for k in range(3)]


def table(count=8, image="image", label="label", names=NAMES, declared=True, flat=False, labels=None, pictures=None):
    pictures = pictures or [png(k, i) for i in range(count) for k in range(3)]
    labels = labels if labels is not None else [k for _ in range(count) for k in range(3)]
    column = pictures if flat else [{"bytes": data, "path": "x.png"} for data in pictures]
    features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}, "id": {"dtype": "int64"}}
    found = pa.table({"id": [i // 3 for i in range(len(labels))], image: column, label: labels})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if declared else None
    return found.replace_schema_metadata(metadata)


def write(path, *args, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table(*args, **options), path, row_group_size=10)
    return path


def module(root, tmp_path, **options):
    options = {"image_size": 12, "global_batch_size": 6, "num_workers": 0, "test_fraction": 0.25, **options}
    return ParquetDataModule(root=root, cache_dir=tmp_path / "cache", **options)


def facts(dm):
    dm.prepare()
    return dm.num_train, dm.num_val, dm.num_test


def test_the_layout_of_the_hub(tmp_path):
    for name, count in {"train-00000-of-00002": 8, "train-00001-of-00002": 6, "validation-00000-of-00001": 2,
                        "test-00000-of-00001": 1}.items():  # fmt: skip
        write(tmp_path / "a" / "data" / f"{name}.parquet", count)
    dm = module(tmp_path / "a", tmp_path)
    assert facts(dm) == (42, 6, 3) and dm.class_names == sorted(NAMES)
    dm.place()
    for batch in dm.test_dataloader():
        images, labels = dm.on_after_batch_transfer(batch, 0)[:2]
        assert (2 - images.mean((2, 3)).argmax(1)).tolist() == labels.tolist()  # blue, green, red


@pytest.mark.parametrize(
    "options, classes",
    [
        ({}, sorted(NAMES)),
        ({"image": "img", "label": "fine_label"}, sorted(NAMES)),
        ({"declared": False}, ["0", "1", "2"]),
        ({"declared": False, "image": "picture", "flat": True}, ["0", "1", "2"]),
        ({"declared": False, "labels": ["b", "a ", "c"] * 8}, ["a", "b", "c"]),
        ({"declared": False, "labels": [1.0, 2.0, 10.0] * 8}, ["1", "2", "10"]),
        ({"labels": pa.array([0.0, 1.0, 2.0] * 8)}, sorted(NAMES)),
        ({"declared": False, "labels": [True, False] * 12}, ["False", "True"]),
        ({"declared": False, "labels": pa.array(["b", "a"] * 12).dictionary_encode()}, ["a", "b"]),
        ({"declared": False, "labels": pa.array(["b", "a"] * 12, pa.string_view())}, ["a", "b"]),
        ({"declared": False, "pictures": pa.array(PICTURES, pa.large_binary()), "flat": True}, ["0", "1", "2"]),
        ({"declared": False, "pictures": pa.array(PICTURES, pa.binary_view()), "flat": True}, ["0", "1", "2"]),
    ],
)
def test_columns_and_labels_of_every_type(options, classes, tmp_path):
    dm = module(write(tmp_path / "x.parquet", **options), tmp_path)
    assert sum(facts(dm)) == 24 and dm.class_names == classes


def test_images_in_files_beside_the_table(tmp_path):
    for i, data in enumerate(PICTURES):
        (tmp_path / f"{i}.png").write_bytes(data)
    paths = [f"{i}.png" for i in range(24)]
    root = write(tmp_path / "x.parquet", declared=False, flat=True, pictures=paths)
    assert sum(facts(module(root, tmp_path, image_column="image"))) == 24
    root = write(tmp_path / "y.parquet", flat=True, pictures=[{"bytes": None, "path": path} for path in paths])
    assert sum(facts(module(root, tmp_path))) == 24
    root = write(tmp_path / "z.parquet", flat=True, pictures=[{"bytes": None, "path": "no.png"}] * 24)
    with pytest.raises(UserError, match="z.parquet, row 0: image names no.png, and there is no file"):
        module(root, tmp_path).prepare()


def test_columns_are_named_where_it_is_not_clear(tmp_path):
    root = write(tmp_path / "x.parquet", declared=False, label="kind")
    with pytest.raises(
        UserError, match=r"data.label_column: .*x.parquet does not say which .*give one of id, image, kind"
    ):
        module(root, tmp_path).prepare()
    with pytest.raises(UserError, match="data.label_column: .* has no column sort; give one of id, image, kind"):
        module(root, tmp_path, label_column="sort").prepare()
    with pytest.raises(UserError, match="the column id holds no encoded images, but int64"):
        module(root, tmp_path, label_column="kind", image_column="id").prepare()
    assert sum(facts(module(root, tmp_path, label_column="kind"))) == 24
    two = table(declared=False).append_column("mask", pa.array(PICTURES))
    parquet.write_table(two, tmp_path / "two.parquet")
    with pytest.raises(UserError, match="data.image_column: .* does not say which .*give one of image, mask"):
        module(tmp_path / "two.parquet", tmp_path).prepare()


@pytest.mark.parametrize(
    "labels, said",
    [
        ([0, 1, 2, -1] * 6, r"row 3: label is -1, which is no class. .*data.test='\*val\*'"),
        ([0, 1, 2, 7] * 6, "row 3: label is 7, which is no class.$"),
        ([0, 1, 2, None] * 6, "row 3: label is None, which is no class"),
        ([0.5, 1, 2] * 8, "row 0: label is 0.5, which is no class"),
        ([[0], [1], [2]] * 8, r"row 0: label is \[0\], which is no class"),
    ],
)
def test_a_row_without_a_class_is_named(labels, said, tmp_path):
    with pytest.raises(UserError, match=said):
        module(write(tmp_path / "x.parquet", labels=labels), tmp_path).prepare()


def test_a_row_without_an_image_is_named(tmp_path):
    root = write(tmp_path / "z.parquet", flat=True, pictures=[png(0), None, png(1)] * 8)
    with pytest.raises(UserError, match="z.parquet, row 1: image holds no image"):
        module(root, tmp_path).prepare()


def test_a_file_that_is_cut_off_is_named_or_left_out_and_listed(tmp_path):
    write(tmp_path / "a" / "0.parquet")
    broken = write(tmp_path / "a" / "1.parquet")
    whole = broken.read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"{broken} .*cut off.*data.skip_corrupt=true"):
            module(tmp_path / "a", tmp_path).prepare()
        dm = module(tmp_path / "a", tmp_path, skip_corrupt=True)
        assert sum(facts(dm)) == 24 and str(broken) in dm.left_out["damaged files"][0]


def test_what_is_unpacked_stays_where_only_another_file_or_the_size_changes(tmp_path):
    write(tmp_path / "a" / "0.parquet")
    module(tmp_path / "a", tmp_path, path="loader").prepare()
    write(tmp_path / "a" / "1.parquet", 5)
    first = module(tmp_path / "a", tmp_path, path="loader", image_size=10)
    assert sum(facts(first)) == 39
    assert len(list((tmp_path / "cache").glob("*/encoded.bin"))) == 2
    second = ParquetDataModule(root=tmp_path / "a", cache_dir=tmp_path / "b", path="loader", image_size=10,
                               global_batch_size=6, test_fraction=0.25)  # fmt: skip
    second.prepare()
    assert second.data_hash == first.data_hash, "wherever the cache lies"


def test_a_column_names_the_groups(tmp_path):
    dm = module(write(tmp_path / "x.parquet"), tmp_path, group="id")
    assert facts(dm) == (15, 3, 6)
    groups = [{int(dm.image_name(i).split()[-1]) // 3 for i in index} for index in (dm.splits.train, dm.splits.test)]
    assert not groups[0] & groups[1]


def test_a_data_set_of_the_hub_is_copied_once(tmp_path, monkeypatch):
    """Through the interface of its file system."""
    for name, count in (("train-0", 8), ("test-0", 1)):
        write(tmp_path / "hub" / "datasets" / "me" / "colours" / "data" / f"{name}.parquet", count)
    (tmp_path / "hub/datasets/me/colours/README.md").write_text("colours")
    copied = []

    class Hub:
        def find(self, address, detail):
            base = tmp_path / "hub" / address.removeprefix("hf://")
            found = (path for path in base.rglob("*") if path.is_file())
            return {str(path.relative_to(tmp_path / "hub")): {"size": path.stat().st_size} for path in found}

        def get_file(self, path, target):
            copied.append(path)
            with open(target, "wb") as file:
                file.write((tmp_path / "hub" / path).read_bytes())

    monkeypatch.setattr("huggingface_hub.HfFileSystem", Hub)
    for _ in range(2):
        assert facts(module("hf://datasets/me/colours", tmp_path)) == (22, 2, 3)
    assert sorted(path.rpartition("/")[2] for path in copied) == ["test-0.parquet", "train-0.parquet"]
    with pytest.raises(UserError, match="hf://datasets/me/nothing holds no .parquet file"):
        module("hf://datasets/me/nothing", tmp_path)


@pytest.mark.slow
def test_a_run_trains_on_it_and_goes_on(tmp_path):
    write(tmp_path / "a" / "train-0.parquet", 16)
    write(tmp_path / "a" / "test-0.parquet", 4)
    words = ["data=parquet", f"data.root={tmp_path / 'a'}", "data.image_size=12", "data.global_batch_size=6",
             "model=small_cnn", "trainer=cpu", "trainer.max_epochs=6", "data.flip=false", "data.path=loader",
             "run_id=r"]  # fmt: skip
    done = run_door("train", *words, logs=tmp_path / "logs")
    assert done.code == 0 and done.record["metrics"]["test/acc"] == 1.0, done.output
    again = run_door("train", "resume=r", "trainer.max_epochs=7", logs=tmp_path / "logs")
    assert again.code == 0, again.output
