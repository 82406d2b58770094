"""The same images as a folder of classes, a CSV table, tar shards and parquet files, for tests of
what reads them.
"""

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import NamedTuple

from data.image_folder import ImageFolderDataModule
from data.parquet import ParquetDataModule
from data.table import CSVDataModule
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

    @property
    def path(self) -> str:
        return f"{self.split}/{self.label}/{self.name}"


def write(kind: str, place: Path, images: list[Encoded]) -> Path:
    """In the order given; returns data.root for data=`kind`."""
    place.mkdir(parents=True, exist_ok=True)
    if kind in ("image_folder", "csv"):
        for image in images:
            (place / image.path).parent.mkdir(parents=True, exist_ok=True)
            (place / image.path).write_bytes(image.data)
        if kind == "image_folder":
            return place
        with (place / "list.csv").open("w", newline="") as file:
            rows = [(image.path, image.label, image.split) for image in images]
            csv.writer(file).writerows([("path", "label", "split"), *rows])
        return place / "list.csv"
    for split in dict.fromkeys(image.split for image in images):
        part = [image for image in images if image.split == split]
        (write_tars if kind == "webdataset" else write_parquets)(
            place, split, part, sorted({image.label for image in images})
        )
    return place


def write_tars(place: Path, split: str, images: list[Encoded], _names: list[str]) -> None:
    half = len(images) // 2
    for number, part in enumerate((range(half), range(half, len(images)))):
        with tarfile.open(place / f"{split}-{number:04d}.tar", "w") as tar:
            for i in part:
                add(tar, f"{i:06d}.{images[i].name.rpartition('.')[2]}", images[i].data)
                add(tar, f"{i:06d}.cls", images[i].label.encode())


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_parquets(place: Path, split: str, images: list[Encoded], names: list[str]) -> None:
    """As Hugging Face's datasets write them: data/train-00000-of-00001.parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    columns = {
        "image": [{"bytes": image.data, "path": image.name} for image in images],
        "label": [names.index(image.label) for image in images],
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    (place / "data").mkdir(exist_ok=True)
    path = place / "data" / f"{'validation' if split == 'val' else split}-00000-of-00001.parquet"
    parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), path, row_group_size=7)
