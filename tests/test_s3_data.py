"""data.root=s3://…: the weights of a run whose images lie in a bucket are those of one whose images
lie here.
"""

import numpy as np
import pytest
import torch
from PIL import Image

from kills import weights
from object_store import shared_store
from runs import run_script

SMALL = (
    "model=small_cnn", "data.image_size=16", "data.global_batch_size=8", "trainer.max_epochs=2", "scheduler=none",
    "trainer.num_threads=1", "callbacks.hardware=null", "trainer.log_every_n_steps=100",
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same images as a folder and a table, here and in a bucket."""
    root = tmp_path_factory.mktemp("images")
    folder, lines = root / "photographs", ["path,label"]
    for n in range(40):
        name, label = f"{'cat' if n % 2 else 'dog'}/{n}.png", "cat" if n % 2 else "dog"
        (folder / label).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(n).integers(0, 256, (20, 18, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
        lines.append(f"{name},{label}")
    (folder / "list.csv").write_text("\n".join(lines))
    server = shared_store()
    bucket, client = server.new_bucket(), server.client()
    for path in folder.rglob("*.*"):
        client.put_object(Bucket=bucket, Key=str(path.relative_to(root)), Body=path.read_bytes())
    return server, f"s3://{bucket}", root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "place", "trainer"),
    [("image_folder", "photographs", "ddp_sim"), ("csv", "photographs/list.csv", "cpu")],
)
def test_weights_are_those_of_the_local_folder(group, place, trainer, sources, tmp_path):
    server, uri, folder = sources
    words = (f"data={group}", *SMALL, f"trainer={trainer}", "run_id=r")
    local = run_script("train", *words, f"data.root={folder}/{place}", logs=tmp_path / "local")
    assert local.code == 0, local.output
    bucket = (
        f"data.root={uri}/{place}",
        f"s3.endpoint_url={server.endpoint_url}",
        f"data.cache_dir={tmp_path}/cache",
    )
    place = {"logs": tmp_path / "bucket", "environment": server.environment()}
    first = run_script("train", *words, *bucket, "trainer.max_steps=5", **place)
    assert first.code == 0 and "Copying s3://" in first.output, first.output
    done = run_script("train", *bucket, "resume=r", "trainer.max_steps=-1", **place)
    assert done.code == 0 and "Copying s3://" not in done.output, done.output
    expected, found = weights(local.folder), weights(done.folder)
    assert expected.keys() == found.keys() and all(
        torch.equal(expected[name], found[name]) for name in expected
    )
    assert done.record["metrics"]["test/correct"] == local.record["metrics"]["test/correct"]


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("nothing", "there is nothing under this prefix in the bucket"),
        ("photographs/cat", "has no class folders"),
    ],
)
def test_an_unusable_bucket_ends_the_run_with_its_address(sources, tmp_path, place, sentence):
    server, uri, _ = sources
    words = ("data=image_folder", *SMALL, "trainer=cpu", f"s3.endpoint_url={server.endpoint_url}",
             f"data.cache_dir={tmp_path}/cache", f"data.root={uri}/{place}")  # fmt: skip
    done = run_script("train", *words, logs=tmp_path, environment=server.environment())
    assert done.code == 2 and f"{uri}/{place}" in done.output and sentence in done.output, (
        done.output
    )
    assert not list(tmp_path.glob("train/runs/*"))
