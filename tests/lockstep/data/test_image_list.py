"""The list of a folder's images: kept for the next start and the other ranks, made anew where it is out of date."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.image_folder import ImageFolderDataModule
from lockstep.data.image_list import kept_list, sorted_out
from lockstep.data.places import Names
from lockstep.runs.errors import UserError
from ranks import run_ranks

OLD = time.time() - 100


def folder(root: Path) -> Path:
    """Two classes, folders and files of some time ago."""
    for label in "ab":
        (root / label).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(root / label / f"{i}.png")
            os.utime(root / label / f"{i}.png", (OLD, OLD))
    aged(root)
    return root


def aged(root: Path) -> None:
    for path in (root / "a", root / "b", root):
        os.utime(path, (OLD, OLD))


class Counted(ImageFolderDataModule):
    """Writes a line for each time that it lists."""

    def list_images(self):
        with (self.cache_dir / "listed.txt").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().list_images()


def module(root, cache, **options):
    cache.mkdir(exist_ok=True)
    options = {"image_size": 8, "global_batch_size": 4, "path": "loader", "num_workers": 0, **options}
    return Counted(root=root, cache_dir=cache, **options)


def times_listed(cache):
    return len((cache / "listed.txt").read_text().split())


def prepared(root, cache, **options):
    dm = module(root, cache, **options)
    dm.prepare()
    return dm


def test_the_next_start_takes_the_list_that_is_there(tmp_path):
    root, cache = folder(tmp_path / "root"), tmp_path / "cache"
    first, second = prepared(root, cache), prepared(root, cache, seed=1, image_size=6)
    assert times_listed(cache) == 1 and first.data_hash == second.data_hash


def test_a_new_file_and_one_that_is_gone_are_noticed(tmp_path):
    root, cache = folder(tmp_path / "root"), tmp_path / "cache"
    before = prepared(root, cache)
    (root / "b" / "3.png").rename(root / "b" / "03.jpg")
    dm = prepared(root, cache)
    assert times_listed(cache) == 2 and dm.data_hash != before.data_hash
    assert "b/03.jpg" in dm._images.places.relative_names() and len(dm._labels) == 24
    (root / "a" / "deeper").mkdir()
    aged(root)
    (root / "a" / "deeper" / "x.png").write_bytes(b"")
    assert len(prepared(root, cache)._labels) == 25


def test_a_folder_that_changed_just_now_is_not_trusted(tmp_path):
    """Within a tick of the file system's clock another change would show the same time."""
    root, cache = folder(tmp_path / "root"), tmp_path / "cache"
    os.utime(root / "b")
    prepared(root, cache)
    prepared(root, cache)
    assert times_listed(cache) == 2


def test_a_file_that_was_written_over_is_noticed_where_all_are_decoded(tmp_path):
    root, cache = folder(tmp_path / "root"), tmp_path / "cache"
    before = prepared(root, cache, path="array")
    Image.new("RGB", (8, 8), (99, 99, 99)).save(root / "b" / "3.png")
    after = prepared(root, cache, path="array")
    assert after.data_hash != before.data_hash and times_listed(cache) == 2


def test_one_that_was_written_over_ends_a_run_that_reads_it_and_the_next_one_lists_anew(tmp_path):
    root, cache = folder(tmp_path / "root"), tmp_path / "cache"
    before = prepared(root, cache, val_fraction=0)
    Image.new("RGB", (9, 9), (99, 99, 99)).save(root / "b" / "3.png")
    stale = module(root, cache, val_fraction=0)
    stale.place()
    assert times_listed(cache) == 1 and stale.data_hash == before.data_hash
    with pytest.raises(UserError, match="b/3.png has [0-9]+ bytes, and had [0-9]+ when it was listed"):
        [list(loader) for loader in (stale.train_dataloader(), stale.test_dataloader())]
    assert prepared(root, cache, val_fraction=0).data_hash != before.data_hash and times_listed(cache) == 2


def list_in(root: str, cache: str):
    dm = prepared(Path(root), Path(cache))
    return dm.data_hash, dm.num_train


def test_the_ranks_of_a_node_share_one_list(tmp_path):
    root, cache = folder(tmp_path / "root"), tmp_path / "cache"
    results = run_ranks(list_in, 3, str(root), str(cache), distributed=False)
    assert results[0] == results[1] == results[2] and times_listed(cache) == 1


def list_often(root: str, cache: str):
    """As ranks do of files that were written just now: each finds the list of the others out of date."""
    found = set()
    for _ in range(40):
        os.utime(Path(root) / "b")
        images, facts = kept_list(Path(cache), module(Path(root), Path(root).parent).list_images, exact=True)
        found.add((len(images.labels), int(images.places.size.sum()), facts["identity"]))
    return found


def test_ranks_that_list_at_the_same_moment_read_whole_lists(tmp_path):
    root = folder(tmp_path / "root")
    results = run_ranks(list_often, 2, str(root), str(tmp_path / "cache" / "list"), distributed=False)
    assert results[0] == results[1] and len(results[0]) == 1


def test_a_link_that_leads_nowhere_and_a_pipe_are_named(tmp_path):
    root = folder(tmp_path / "root")
    (root / "a" / "x.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="a/x.png cannot be read"):
        prepared(root, tmp_path / "cache")
    (root / "a" / "x.png").unlink()
    os.mkfifo(root / "a" / "x.png")
    with pytest.raises(UserError, match="a/x.png cannot be read .it is no plain file"):
        prepared(root, tmp_path / "cache")


def test_small_squares_that_are_not_all_of_one_size_are_named_where_nobody_looked(tmp_path, monkeypatch):
    """What an array holds as it is must not be resized on the other path: the pixels would differ."""
    monkeypatch.setattr("lockstep.data.listed_datamodule.SAMPLE", 2)
    root, cache = folder(tmp_path / "root"), tmp_path / "cache"
    Image.new("RGB", (10, 9)).save(root / "a" / "3.png")
    dm = module(root, cache, image_size=16, val_fraction=0)
    dm.place()
    with pytest.raises(
        UserError, match="a/3.png has 10×9 pixels, where others have 8×8 .data.verify=true looks at all"
    ):
        [list(loader) for loader in (dm.train_dataloader(), dm.test_dataloader())]
    looked = module(root, cache, image_size=16, val_fraction=0, verify=True)
    looked.place()
    assert len(list(looked.train_dataloader())) == 5


def test_names_that_are_no_utf8_and_empty_ones():
    names = ["", "a/b.png", os.fsdecode(b"\xff.png"), "", "é"]
    kept = Names.of(names)
    assert [kept[i] for i in range(5)] == names == kept.all() and Names.of([]).all() == []


def test_sorting_a_table_out():
    words, splits = ["c10", "c9", "c9", "c10", "c9"], np.array([2, 0, 1, 0, 2])
    names, labels, counts, order = sorted_out(words, splits, str, "table")
    assert names == ["c9", "c10"] and counts == (2, 1, 2)
    assert order.tolist() == [1, 3, 2, 0, 4] and labels.tolist() == [0, 1, 0, 1, 0]
    assert sorted_out(words, splits, str, "table", ["x", "c10", "c9"])[0] == ["c10", "c9"]
