"""src/shards.py: a folder becomes tar shards that data=webdataset reads, started again it goes on."""

import json

import numpy as np
import pytest
from PIL import Image

import shards
from data.image_folder import ImageFolderDataModule
from data.webdataset import WebDatasetDataModule
from lockstep.runs.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.runs.files import sha256_of
from object_store import shared_store

OPTIONS = {"image_size": 8, "global_batch_size": 4, "val_fraction": 0.25}


@pytest.fixture
def photographs(tmp_path):
    draw = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 3)):
        for word in ("cat", "dog"):
            folder = tmp_path / "photographs" / split / word
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.x.png")
    return tmp_path / "photographs"


def pixels(module):
    module.prepare()
    module.place()
    images = np.concatenate([module.on_after_batch_transfer(b, 0)[0].numpy() for b in module.test_dataloader()])
    return images, module.data_hash, (module.num_train, module.num_val, module.num_test)


def test_the_shards_hold_the_pixels_of_the_folder(photographs, tmp_path):
    assert shards.main([str(photographs), str(tmp_path / "shards")]) == EXIT_OK
    index = json.loads((tmp_path / "shards/index.json").read_text())
    assert {name: shard["images"] for name, shard in index.items()} == {"train-00000.tar": 16, "test-00000.tar": 6}
    assert all(sha256_of(tmp_path / "shards" / name) == shard["sha256"] for name, shard in index.items())
    folder = ImageFolderDataModule(root=photographs, cache_dir=tmp_path / "a", **OPTIONS)
    packed = WebDatasetDataModule(root=tmp_path / "shards", cache_dir=tmp_path / "b", **OPTIONS)
    (expected, *facts), (found, *others) = pixels(folder), pixels(packed)
    assert np.array_equal(expected, found) and facts == others


@pytest.mark.parametrize(
    "index",
    ["", "[]", '{"bytes": 7, "images": []}', '{"bytes": BYTES, "images": [["a.png", "cat", -1, 5]]}',
     '{"bytes": BYTES, "images": [["a.png", "cat", 0, BYTES1]]}', '{"bytes": BYTES, "images": [["a.png", "cat"]]}'],
)  # fmt: skip
def test_an_index_that_does_not_fit_is_named(index, photographs, tmp_path):
    """The shard itself may still lie in a bucket: its headers cannot take the index's place."""
    assert shards.main([str(photographs), str(tmp_path / "shards")]) == EXIT_OK
    shard = tmp_path / "shards/train-00000.tar"
    size = shard.stat().st_size
    (tmp_path / "shards/train-00000.tar.index").write_text(
        index.replace("BYTES1", str(size + 1)).replace("BYTES", str(size))
    )
    with pytest.raises(UserError, match=f"{shard} does not fit its index train-00000.tar.index: pack it again with"):
        WebDatasetDataModule(root=tmp_path / "shards", cache_dir=tmp_path / "b", **OPTIONS).prepare()


def test_with_an_index_no_header_is_read_and_its_labels_are_the_shards(photographs, tmp_path, monkeypatch):
    assert shards.main([str(photographs), str(tmp_path / "shards")]) == EXIT_OK
    by_index = WebDatasetDataModule(root=tmp_path / "shards", cache_dir=tmp_path / "a", **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr("data.webdataset.members", None)
        expected = pixels(by_index)
    with pytest.raises(UserError, match="has an index, with labels of its own: leave data.label_field out"):
        WebDatasetDataModule(root=tmp_path / "shards", cache_dir=tmp_path / "c", label_field="x", **OPTIONS).prepare()
    for path in (tmp_path / "shards").glob("*.index"):
        path.unlink()
    by_headers = WebDatasetDataModule(root=tmp_path / "shards", cache_dir=tmp_path / "b", **OPTIONS)
    found = pixels(by_headers)
    assert np.array_equal(expected[0], found[0]) and expected[1:] == found[1:]


def written(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")}


def test_started_again_it_writes_what_is_missing_or_damaged(photographs, tmp_path):
    target = shards.Folder(tmp_path / "shards")
    assert shards.pack(photographs, target, 1000) == EXIT_OK
    before = written(target.path)
    whole = {name: sha256_of(target.path / name) for name in before}
    assert len(before) > 5
    index = json.loads((target.path / "index.json").read_text())
    del index["train-00001.tar"]  # as if it had been killed there
    (target.path / "index.json").write_text(json.dumps(index))
    (target.path / "train-00000.tar").write_bytes(b"cut off")
    (target.path / "test-00000.tar").unlink()
    assert shards.pack(photographs, target, 1000) == EXIT_OK
    after = written(target.path)
    assert {name: sha256_of(target.path / name) for name in after} == whole
    again = {"train-00000.tar", "train-00001.tar", "test-00000.tar"}
    assert {name for name in after if after[name] != before[name]} == again
    assert len(json.loads((target.path / "index.json").read_text())) == len(before)


def test_into_a_bucket(photographs, monkeypatch):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    bucket, client = server.new_bucket(), server.client()
    words = [str(photographs), f"s3://{bucket}/shards", f"--endpoint-url={server.endpoint_url}"]
    assert shards.main(words) == EXIT_OK
    index = json.loads(client.get_object(Bucket=bucket, Key="shards/index.json")["Body"].read())
    sizes = {name: client.head_object(Bucket=bucket, Key=f"shards/{name}")["ContentLength"] for name in index}
    assert sizes == {name: shard["bytes"] for name, shard in index.items()}
    monkeypatch.setattr(shards.Bucket, "put", None)
    assert shards.main(words) == EXIT_OK, "nothing is sent again"


def test_what_it_refuses_is_one_sentence(photographs, tmp_path, capsys):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/index.json").write_text('{"train-00099.tar": {"bytes": 1, "sha256": "", "images": 1}}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/index.json").write_text('{"train-00000.tar": 1}')
    refused = {
        (str(tmp_path / "nothing"), str(tmp_path / "x")): "must be a folder with one folder of images per class",
        (str(photographs), str(tmp_path / "used")): "of another folder or another size: give an empty place",
        (str(photographs), str(tmp_path / "broken")): "is no index of shards: give an empty place",
        (str(photographs), str(tmp_path / "x"), "--shard-mib=0"): "--shard-mib=0: give 1 or more",
        (str(photographs), "s3://x"): "cannot name a bucket",
    }
    for words, sentence in refused.items():
        assert shards.main(list(words)) == EXIT_USER_ERROR
        assert sentence in "".join(capsys.readouterr()), words
