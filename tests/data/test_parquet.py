"""Images in parquet files: spellings of columns, classes and images, and rows that hold none."""

import io
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from data.parquet import ParquetDataModule
from lockstep.process.errors import UserError

COLOURS = ["red", "green", "blue"]


def png(label, i=0):
    pixels = np.full((12, 12, 3), 5 + i, np.uint8)
    pixels[..., label] = 200 + i
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


PICTURES = [png(k, i) for i in range(8) for k in range(3)]


def arrow(
    count=8,
    image="image",
    label="label",
    names=COLOURS,
    declared=True,
    flat=False,
    labels=None,
    pictures=None,
):
    pictures = pictures or [png(k, i) for i in range(count) for k in range(3)]
    labels = labels if labels is not None else [k for _ in range(count) for k in range(3)]
    column = pictures if flat else [{"bytes": data, "path": "x.png"} for data in pictures]
    features = {
        image: {"_type": "Image"},
        label: {"names": names, "_type": "ClassLabel"},
        "id": {"dtype": "int64"},
    }
    found = pa.table({"id": [i // 3 for i in range(len(labels))], image: column, label: labels})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if declared else None
    return found.replace_schema_metadata(metadata)


def write(path, *args, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow(*args, **options), path, row_group_size=10)
    return path


def parquet_module(root, tmp_path, **options):
    options = {
        "image_size": 12,
        "global_batch_size": 6,
        "num_workers": 0,
        "test_fraction": 0.25,
        **options,
    }
    return ParquetDataModule(root=root, cache_dir=tmp_path / "cache", **options)


def counts(dm):
    dm.prepare()
    return dm.num_train, dm.num_val, dm.num_test


@pytest.mark.parametrize(
    "options, classes",
    [
        ({}, sorted(COLOURS)),
        ({"image": "img", "label": "fine_label"}, sorted(COLOURS)),
        ({"declared": False}, ["0", "1", "2"]),
        ({"declared": False, "image": "picture", "flat": True}, ["0", "1", "2"]),
        ({"declared": False, "labels": ["b", "a ", "c"] * 8}, ["a", "b", "c"]),
        ({"declared": False, "labels": [1.0, 2.0, 10.0] * 8}, ["1", "2", "10"]),
        ({"labels": pa.array([0.0, 1.0, 2.0] * 8)}, sorted(COLOURS)),
        ({"declared": False, "labels": [True, False] * 12}, ["False", "True"]),
        ({"declared": False, "labels": pa.array(["b", "a"] * 12).dictionary_encode()}, ["a", "b"]),
        ({"declared": False, "labels": pa.array(["b", "a"] * 12, pa.string_view())}, ["a", "b"]),
        (
            {"declared": False, "pictures": pa.array(PICTURES, pa.large_binary()), "flat": True},
            ["0", "1", "2"],
        ),
        (
            {"declared": False, "pictures": pa.array(PICTURES, pa.binary_view()), "flat": True},
            ["0", "1", "2"],
        ),
    ],
)
def test_columns_and_labels_of_every_type(options, classes, tmp_path):
    dm = parquet_module(write(tmp_path / "x.parquet", **options), tmp_path)
    assert sum(counts(dm)) == 24 and dm.class_names == classes


def test_images_in_files_beside_the_table(tmp_path):
    for i, data in enumerate(PICTURES):
        (tmp_path / f"{i}.png").write_bytes(data)
    paths = [f"{i}.png" for i in range(24)]
    root = write(tmp_path / "x.parquet", declared=False, flat=True, pictures=paths)
    assert sum(counts(parquet_module(root, tmp_path, image_column="image"))) == 24
    root = write(
        tmp_path / "y.parquet",
        flat=True,
        pictures=[{"bytes": None, "path": path} for path in paths],
    )
    assert sum(counts(parquet_module(root, tmp_path))) == 24
    for pictures, said in (
        (
            [{"bytes": None, "path": "no.png"}] * 24,
            "row 0: image names no.png, and there is no file",
        ),
        ([png(0), None, png(1)] * 8, "row 1: image holds no image"),
    ):
        root = write(tmp_path / "z.parquet", flat=True, pictures=pictures)
        with pytest.raises(UserError, match=f"z.parquet, {said}"):
            parquet_module(root, tmp_path).prepare()


def test_labels_may_be_decimals(tmp_path):
    prices = [Decimal(i) / 4 for i in range(24)]
    columns = arrow().append_column("price", pa.array(prices, pa.decimal128(10, 2)))
    parquet.write_table(columns, tmp_path / "x.parquet")
    for options in ({"target": "number", "label_column": "price"}, {"label_columns": ["price"]}):
        dm = parquet_module(tmp_path / "x.parquet", tmp_path, **options)
        dm.prepare()
        assert sorted(dm.source.targets[""].flatten().tolist()) == [i / 4 for i in range(24)]


def test_a_replaced_file_beside_the_table_is_read_anew(tmp_path):
    for i, data in enumerate(PICTURES):
        (tmp_path / f"{i}.png").write_bytes(data)
    root = write(tmp_path / "x.parquet", flat=True, pictures=[f"{i}.png" for i in range(24)])

    def data_hash():
        module = parquet_module(root, tmp_path, image_column="image")
        module.prepare()
        return module.data_hash

    before = data_hash()
    assert data_hash() == before
    (tmp_path / "3.png").write_bytes(PICTURES[4])
    replaced = data_hash()
    assert replaced != before and data_hash() == replaced
    (tmp_path / "3.png").unlink()
    with pytest.raises(UserError, match="row 3: image names 3.png, and there is no file"):
        data_hash()


def test_columns_are_named_where_it_is_not_clear(tmp_path):
    table = arrow(declared=False, label="kind")
    parquet.write_table(table, tmp_path / "x.parquet")
    parquet.write_table(table.append_column("mask", pa.array(PICTURES)), tmp_path / "two.parquet")
    has = "it has id, image, kind. Give data.label_column="
    for name, options, said in (
        ("x", {}, f"x.parquet has no column label: {has}"),
        ("x", {"label_column": "sort"}, f"has no column sort: {has}"),
        (
            "x",
            {"label_column": "kind", "image_column": "id"},
            "the column id holds no encoded images, but int64",
        ),
        ("two", {}, "the column of the images is not clear. Give .* one of image, mask"),
    ):
        with pytest.raises(UserError, match=said):
            parquet_module(tmp_path / f"{name}.parquet", tmp_path, **options).prepare()
    assert sum(counts(parquet_module(tmp_path / "x.parquet", tmp_path, label_column="Kind"))) == 24


@pytest.mark.parametrize(
    "labels, said",
    [
        ([0, 1, 2, 7] * 6, "row 3: label is 7, which is not a class.$"),
        ([0.5, 1, 2] * 8, "row 0: label is 0.5, which is not a class"),
        ([[0], [1], [2]] * 8, r"row 0: label is \[0\], which is not a class"),
    ],
)
def test_a_row_without_a_class_is_named(labels, said, tmp_path):
    with pytest.raises(UserError, match=said):
        parquet_module(write(tmp_path / "x.parquet", labels=labels), tmp_path).prepare()


def test_rows_without_a_label_are_left_out(tmp_path):
    dm = parquet_module(write(tmp_path / "x.parquet", labels=[0, 1, 2, -1, None, 0] * 4), tmp_path)
    assert sum(counts(dm)) == 16 and len(dm.left_out["rows without a label"]) == 8
    assert dm.left_out["rows without a label"][0] == "x.parquet: row 3"


def test_a_cut_off_file_is_named(tmp_path):
    write(tmp_path / "a" / "0.parquet")
    parquet_module(tmp_path / "a", tmp_path, path="loader").prepare()
    other = write(tmp_path / "a" / "1.parquet", 5)
    first = parquet_module(tmp_path / "a", tmp_path, path="loader", image_size=10)
    assert sum(counts(first)) == 39 and len(list((tmp_path / "cache").glob("*/encoded.bin"))) == 2
    second = parquet_module(tmp_path / "a", tmp_path / "elsewhere", path="loader")
    second.prepare()
    assert second.data_hash == first.data_hash, "wherever the cache lies"
    other.write_bytes(other.read_bytes()[: other.stat().st_size // 2])
    with pytest.raises(UserError, match=f"{other} .*cut off.*: repair or remove it"):
        parquet_module(tmp_path / "a", tmp_path).prepare()


def test_a_column_of_a_parquet_file_names_the_groups(tmp_path):
    dm = parquet_module(write(tmp_path / "x.parquet"), tmp_path, group="id")
    assert counts(dm) == (15, 3, 6)
    groups = [
        {int(dm.source.name(i).split()[-1]) // 3 for i in index}
        for index in (dm.splits.train, dm.splits.test)
    ]
    assert not groups[0] & groups[1]


def test_a_null_of_a_parquet_file_is_no_group(tmp_path):
    columns = arrow()
    ids = pa.array([None, *range(1, len(columns))])
    parquet.write_table(columns.set_column(0, "id", ids), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="row 0: id is empty, and data.group needs it"):
        parquet_module(tmp_path / "x.parquet", tmp_path, group="id").prepare()


def test_a_data_set_of_the_hub_is_fetched(tmp_path, monkeypatch):
    """Through the function of its client that fetches the files of a repository."""
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append((repo_id, options["revision"], options["allow_patterns"]))
        if repo_id == "me/nothing":
            raise OSError("no such data set")
        return str(tmp_path / "copy")

    for name, count in (
        ("train-00000-of-00002", 8),
        ("train-00001-of-00002", 6),
        ("validation-0", 2),
        ("test-0", 1),
    ):
        write(tmp_path / "copy" / "data" / f"{name}.parquet", count)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert counts(parquet_module("hf://datasets/me/colours", tmp_path)) == (42, 6, 3)
    dm = parquet_module("hf://datasets/me/colours@v1/data", tmp_path)
    assert counts(dm) == (42, 6, 3) and dm.class_names == sorted(COLOURS)
    assert asked == [("me/colours", None, "*.parquet"), ("me/colours", "v1", "data/*.parquet")]
    parquet_module("hf://datasets/me/colours@refs/convert/parquet/data", tmp_path)
    assert asked[2] == ("me/colours", "refs/convert/parquet", "data/*.parquet")
    dm.attach_to_ranks()
    ((images, labels),) = [
        dm.on_after_batch_transfer(batch, 0)[:2] for batch in dm.test_dataloader()
    ]
    assert (2 - images.mean((2, 3)).argmax(1)).tolist() == labels.tolist()  # blue, green, red
    with pytest.raises(
        UserError, match="hf://datasets/me/nothing cannot be fetched .OSError: no such data set"
    ):
        parquet_module("hf://datasets/me/nothing", tmp_path)


def test_a_split_column_of_a_parquet_file_counts(tmp_path):
    def write_parts(parts):
        parquet.write_table(arrow(4).append_column("Split", [parts]), tmp_path / "all.parquet")
        return parquet_module(tmp_path / "all.parquet", tmp_path)

    assert counts(write_parts(["train"] * 6 + ["Validation"] * 3 + ["test"] * 3)) == (6, 3, 3)
    assert counts(write_parts(["en"] * 12)) == (8, 1, 3)  # of something else: drawn
    with pytest.raises(UserError, match="row 4: Split is extra: give one of train, val, test"):
        write_parts(["train"] * 4 + ["extra"] * 8).prepare()


def test_a_file_whose_rows_name_no_split_is_refused(tmp_path):
    for name, parts in (("a", ["train", "test"] * 12), ("b", ["holdout"] * 24)):
        columns = {"image": PICTURES, "label": [0, 1] * 12, "Split": parts}
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match="of a.parquet names splits, and none of b.parquet does"):
        parquet_module(tmp_path, tmp_path).prepare()
    parquet_module(tmp_path, tmp_path, splits=False).prepare()


@pytest.mark.parametrize(
    ("said", "columns", "options"),
    [
        (
            "row 0: image holds no image, but a list",
            {"image": [[picture] for picture in PICTURES]},
            {},
        ),
        (
            r"row 0: the target \[0, 1\] is not a number",
            {"label": [[0, 1]] * 24},
            {"target": "number"},
        ),
        (
            r"row 0: the target \[\[0, 1\]\] is not a number",
            {"label": [[0, 1]] * 24},
            {"label_columns": ["label"]},
        ),
        ("row 0: the target inf is not a number", {"label": [np.inf] * 24}, {"target": "number"}),
        (
            "row 0: image names (iVBO){25}, and there is",
            {"image": ["iVBO" * 200] * 24},
            {"image_column": "image"},
        ),
    ],
)
def test_a_value_of_another_kind_is_named(said, columns, options, tmp_path):
    root = tmp_path / "all.parquet"
    parquet.write_table(pa.table({"image": PICTURES, "label": [0, 1] * 12} | columns), root)
    with pytest.raises(UserError, match=said):
        parquet_module(root, tmp_path, **options).prepare()


def test_a_column_of_training_rows_alone_names_splits(tmp_path):
    table = arrow().append_column("split", pa.array(["train"] * 24))
    parquet.write_table(table, tmp_path / "a.parquet")
    dm = parquet_module(tmp_path, tmp_path, splits=True)
    dm.prepare()
    assert dm.num_test
