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


def table(count=8, image="image", label="label", names=NAMES, declared=True, flat=False, labels=None, pictures=None):
    pictures = pictures or [png(k, i) for i in range(count) for k in range(3)]
    labels = labels or [k for _ in range(count) for k in range(3)]
    column = pictures if flat else [{"bytes": data, "path": "x.png"} for data in pictures]
    features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}, "id": {"dtype": "int64"}}
    found = pa.table({"id": list(range(len(labels))), image: column, label: labels})
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
    assert facts(dm) == (42, 6, 3) and dm.class_names == NAMES
    dm.place()
    for batch in dm.test_dataloader():
        images, labels = dm.on_after_batch_transfer(batch, 0)[:2]
        assert images.mean((2, 3)).argmax(1).tolist() == labels.tolist()  # red, green, blue


@pytest.mark.parametrize(
    "options, classes",
    [
        ({}, NAMES),
        ({"image": "img", "label": "fine_label"}, NAMES),
        ({"declared": False}, ["0", "1", "2"]),
        ({"declared": False, "image": "picture", "flat": True}, ["0", "1", "2"]),
        ({"declared": False, "labels": ["b", "a", "c"] * 8}, ["a", "b", "c"]),
    ],
)
def test_columns_are_found(options, classes, tmp_path):
    dm = module(write(tmp_path / "x.parquet", **options), tmp_path)
    assert sum(facts(dm)) == 24 and dm.class_names == classes


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


def test_a_row_without_a_class_or_an_image_is_named(tmp_path):
    root = write(tmp_path / "x.parquet", labels=[0, 1, 2, -1] * 6)
    with pytest.raises(UserError, match=r"row 3: label is -1, which is no class. .*data.test='\*val\*' data.val=null"):
        module(root, tmp_path).prepare()
    with pytest.raises(UserError, match="row 3: label is 7, which is no class.$"):
        module(write(tmp_path / "y.parquet", labels=[0, 1, 2, 7] * 6), tmp_path).prepare()
    root = write(tmp_path / "z.parquet", pictures=[png(0), None, png(1)] * 8)
    with pytest.raises(UserError, match="z.parquet, row 1: image holds no image"):
        module(root, tmp_path).prepare()


def test_a_file_that_is_cut_off_is_named_or_left_out_and_listed(tmp_path):
    write(tmp_path / "a" / "0.parquet")
    broken = write(tmp_path / "a" / "1.parquet")
    whole = broken.read_bytes()
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"{broken} .*cut off.*data.skip_corrupt=true"):
            module(tmp_path / "a", tmp_path).prepare()
        dm = module(tmp_path / "a", tmp_path, skip_corrupt=True)
        assert sum(facts(dm)) == 24 and str(broken) in dm.skipped[0]


def test_a_row_group_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    root = write(tmp_path / "x.parquet")
    monkeypatch.setattr("data.parquet.MAX_GROUP_BYTES", 500)
    with pytest.raises(UserError, match="x.parquet has a row group of 0.0 GiB, more than"):
        module(root, tmp_path).prepare()


def test_what_is_unpacked_stays_where_only_another_file_changes(tmp_path):
    write(tmp_path / "a" / "0.parquet")
    module(tmp_path / "a", tmp_path, path="loader").prepare()
    before = set((tmp_path / "cache").glob("*-unpacked-*/encoded.bin"))
    write(tmp_path / "a" / "1.parquet", 5)
    assert sum(facts(module(tmp_path / "a", tmp_path, path="loader"))) == 39
    after = set((tmp_path / "cache").glob("*-unpacked-*/encoded.bin"))
    assert before < after and len(after) == 2


def test_the_hash_does_not_depend_on_the_place_of_the_cache(tmp_path):
    root = write(tmp_path / "x.parquet")
    hashes = []
    for name in "ab":
        dm = ParquetDataModule(root=root, cache_dir=tmp_path / name, path="loader", image_size=12, global_batch_size=6)
        dm.prepare()
        hashes.append(dm.data_hash)
    assert hashes[0] == hashes[1]


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
