"""What hurts in streaming libraries, on the way of data.root=s3://…: copied first, or read while nothing is copied.

Shared chunks that are deleted under a reader: tests/lockstep/storage/test_local_copy.py.
"""

import io
import os
import signal
import tarfile
import threading
from pathlib import Path

import psutil
import pytest
from PIL import Image

from data.webdataset import WebDatasetDataModule
from lockstep.config.instantiate import build
from lockstep.data.tar_shards import index_of
from lockstep.training.local_root import on_this_node
from object_store import shared_store
from runs import start_door
from sources import add

SHARDS = (1, 90, 9)  # images in each


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """(address, s3 options) of shards of very unequal size; no two images have the same colour."""
    server = shared_store()
    name, client, first = server.new_bucket(), server.client(), 0
    for shard, count in enumerate(SHARDS):
        path, words = tmp_path_factory.mktemp("shards") / f"train-{shard}.tar", []
        with tarfile.open(path, "w") as tar:
            for image in range(first, first + count):
                png = io.BytesIO()
                Image.new("RGB", (8, 8), (image, 0, 0)).save(png, "png")
                words.append("a" if image % 2 else "b")
                add(tar, f"{image}.png", png.getvalue())
                add(tar, f"{image}.cls", words[-1].encode())
            first += count
        for key, data in ((path.name, path.read_bytes()), (f"{path.name}.index", index_of(path, words))):
            client.put_object(Bucket=name, Key=f"shards/{key}", Body=data)
    return f"s3://{name}/shards", {"endpoint_url": server.endpoint_url}


@pytest.fixture(params=["copied", "read from the bucket"])
def module(request, bucket, tmp_path, monkeypatch):
    """module(rank, ranks, num_workers) of a data module on the loader's path, placed."""
    for name, value in shared_store().environment().items():
        monkeypatch.setenv(name, value)

    def made(rank: int = 0, ranks: int = 1, num_workers: int = 0) -> WebDatasetDataModule:
        copied = request.param == "copied"
        options = {"root": bucket[0], "cache_dir": str(tmp_path), "_target_": "data.webdataset.WebDatasetDataModule",
                   "path": "loader", "num_workers": num_workers, "image_size": 8, "global_batch_size": 6,
                   "val_fraction": 0.0, "mean": 0.0, "std": 1.0, "cache_gib": None if copied else 0}  # fmt: skip
        here, in_bucket = on_this_node(options, bucket[1])
        dm = build(here)
        dm.in_bucket = in_bucket
        if copied:
            in_bucket.complete()
        dm.place(rank=rank, world_size=ranks)
        return dm

    return made


def colours(dm: WebDatasetDataModule, batch) -> list[int]:
    return (dm.on_after_batch_transfer(batch, 0)[0][:, 0, 0, 0] * 255).round().int().tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_unequal_shards_give_every_rank_as_many_batches(module, ranks):
    """webdataset hands out whole shards: a rank with fewer images ends first, and the others wait for ever."""
    modules = [module(rank, ranks) for rank in range(ranks)]
    steps = [[colours(dm, batch) for batch in dm.train_dataloader()] for dm in modules]
    assert [len(each) for each in steps] == [modules[0].num_train // 6] * ranks
    seen = [colour for each in steps for step in each for colour in step]
    assert len(seen) == len({*seen}) == modules[0].num_train // 6 * 6


def test_a_resume_with_other_ranks_and_workers_repeats_no_image_and_leaves_none_out(module):
    whole = module()
    expected = [sorted(colours(whole, batch)) for batch in whole.train_dataloader()]
    before, seen = module(num_workers=2), []
    loader = before.train_dataloader()
    for batch in loader:
        seen.append(sorted(colours(before, batch)))
        if len(seen) == 5:
            break
    state, after = loader.state_dict(), [module(rank, 2, num_workers=1) for rank in range(2)]
    loaders = [dm.train_dataloader() for dm in after]
    for each in loaders:
        each.load_state_dict(state)
    halves = [[colours(dm, batch) for batch in each] for dm, each in zip(after, loaders, strict=True)]
    seen += [sorted(first + second) for first, second in zip(*halves, strict=True)]
    assert seen == expected


def test_no_thread_of_the_copy_is_left_when_workers_are_forked(module):
    before = {*threading.enumerate()}
    module()
    assert {*threading.enumerate()} <= before


@pytest.mark.slow
def test_a_killed_run_leaves_no_shared_memory_and_no_worker(bucket, tmp_path):
    words = ("data=webdataset", "model=small_cnn", "trainer=ddp_sim", f"data.root={bucket[0]}", "data.path=loader",
             "data.num_workers=2", "data.image_size=8", "data.global_batch_size=8", "trainer.max_epochs=10000",
             "callbacks.hardware=null", f"s3.endpoint_url={bucket[1]['endpoint_url']}", "run_id=r")  # fmt: skip
    run = start_door("train", *words, logs=tmp_path, environment=shared_store().environment())
    run.wait_for(lambda: any(tmp_path.glob("train/runs/r/checkpoints/*.ckpt.json")))
    everyone = psutil.Process(run.process.pid).children(recursive=True)
    assert len(everyone) >= 2 + 2, "ranks and the workers of one of them"
    os.kill(run.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(everyone, 60)
    assert not alive
    pids = {str(process.pid) for process in (*everyone, run.process)}
    assert [path.name for path in Path("/dev/shm").iterdir() if pids & {*path.name.split("_")}] == []
