"""An epoch twice by a streaming library, from the bucket, as its own documentation shows; bucket_data.py runs it.

    python benchmarks/peers/streaming.py webdataset|litdata|pack '{"urls": …}'

In an environment of its own (python -m venv e && e/bin/pip install litdata webdataset torch pillow numpy).
`pack` writes the images of tar shards as litdata's own chunks, because it reads no tar.
"""

import io
import json
import sys
import tarfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def pixels(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def normalised(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2).float().div_(255).sub_(0.45).div_(0.22)


def of_webdataset(given: dict) -> Iterator[torch.Tensor]:
    import webdataset as wds

    commands = [f"pipe:curl -s -L '{url}'" for url in given["urls"]]
    made = wds.WebDataset(commands, shardshuffle=len(commands)).shuffle(1000).to_tuple("jpg", "cls")
    made = made.map(lambda pair: (pixels(pair[0]), int(pair[1][1:])))
    loader = torch.utils.data.DataLoader(made.batched(given["batch"]), batch_size=None, num_workers=given["workers"])
    yield from (images for images, _ in loader)


def of_litdata(given: dict) -> Iterator[torch.Tensor]:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # of a store without TLS; there is no public option
    data = litdata.StreamingDataset(
        given["uri"],
        cache_dir=given["cache"],
        shuffle=True,
        storage_options={"endpoint_url": given["endpoint_url"]},
        transform=lambda sample: (pixels(sample["image"]), sample["label"]),
    )
    loader = litdata.StreamingDataLoader(data, batch_size=given["batch"], num_workers=given["workers"])
    yield from (images for images, _ in loader)


def samples(path: str) -> Iterator[dict]:
    with tarfile.open(path) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    for name in found:
        if name.endswith(".jpg"):
            yield {"image": found[name], "label": int(found[name[:-3] + "cls"][1:])}


def pack(given: dict) -> None:
    import litdata

    shards = [str(path) for path in sorted(Path(given["shards"]).glob("*.tar"))]
    litdata.optimize(samples, shards, given["target"], chunk_bytes=given["chunk_bytes"], num_workers=1, verbose=False)


def main(which: str, given: dict) -> None:
    if which == "pack":
        pack(given)
        return
    torch.set_num_threads(1)  # the workers have the cores
    told: dict = {"version": version(which), "images_per_s": []}
    for _ in range(2):
        started, images = time.perf_counter(), 0
        for batch in {"webdataset": of_webdataset, "litdata": of_litdata}[which](given):
            normalised(batch)
            images += len(batch)
            told.setdefault("first_batch_s", time.perf_counter() - started)
        told["images_per_s"].append(images / (time.perf_counter() - started))
        told["images"] = images
    print("told", json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
