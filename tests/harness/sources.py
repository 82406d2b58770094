"""The same images as a folder of classes, a CSV table, tar shards and parquet files, for tests of what reads them."""

import csv
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from data.image_folder import ImageFolderDataModule
from data.table import CSVDataModule, ParquetDataModule
from data.webdataset import WebDatasetDataModule

MODULES = {
    "image_folder": ImageFolderDataModule,
    "csv": CSVDataModule,
    "webdataset": WebDatasetDataModule,
    "parquet": ParquetDataModule,
}


class Encoded(NamedTuple):
    split: str  # train, val or test
    label: str
    name: str  # with its ending
    data: bytes


def write(kind: str, place: Path, images: Iterable[Encoded]) -> Path:
    """In the order given; returns data.root for data=`kind`."""
    place.mkdir(parents=True, exist_ok=True)
    return {"image_folder": folder, "csv": table, "webdataset": tars, "parquet": parquets}[kind](place, list(images))


def folder(place: Path, images: list[Encoded]) -> Path:
    for image in images:
        path = place / image.split / image.label / image.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.data)
    return place


def table(place: Path, images: list[Encoded]) -> Path:
    folder(place, images)
    with (place / "list.csv").open("w", newline="") as file:
        rows = [(f"{image.split}/{image.label}/{image.name}", image.label, image.split) for image in images]
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    return place / "list.csv"


def by_split(images: list[Encoded]) -> dict[str, list[Encoded]]:
    return {split: [image for image in images if image.split == split] for split in ("train", "val", "test")}


def tars(place: Path, images: list[Encoded], shards: int = 2) -> Path:
    for split, part in by_split(images).items():
        for number in range(shards if part else 0):
            first, last = len(part) * number // shards, len(part) * (number + 1) // shards
            with tarfile.open(place / f"{split}-{number:04d}.tar", "w") as tar:
                for i in range(first, last):
                    add(tar, f"{i:06d}.{part[i].name.rpartition('.')[2]}", part[i].data)
                    add(tar, f"{i:06d}.cls", part[i].label.encode())
    return place


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def parquets(place: Path, images: list[Encoded]) -> Path:
    """As Hugging Face's datasets write them: data/train-00000-of-00001.parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    names = sorted({image.label for image in images})
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    (place / "data").mkdir(exist_ok=True)
    for split, part in by_split(images).items():
        columns = {
            "image": [{"bytes": image.data, "path": image.name} for image in part],
            "label": [names.index(image.label) for image in part],
        }
        path = place / "data" / f"{'validation' if split == 'val' else split}-00000-of-00001.parquet"
        if part:
            parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), path, row_group_size=7)
    return place
