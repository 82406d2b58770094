"""A folder of images, one folder per class, packed into tar shards as WebDataset has them: key.jpg beside key.cls.

The same folder gives the same shards, byte for byte, on every machine. Beside NAME.tar lies NAME.tar.index, which says
where its images are: who has it need not read the shard to list them.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.data.image_list import SPLITS
from lockstep.data.image_tree import list_split
from lockstep.data.places import stats_of
from lockstep.data.tar_index import BadArchive, members
from lockstep.runs.errors import UserError
from lockstep.runs.foreign_files import NotReadable, read_json

INDEX = ".index"
MAX_INDEX_BYTES = 2**28


@dataclass(frozen=True)
class Planned:
    """A shard that is to be written.

    name: train-00000.tar; files: of its images, relative to root; classes: of each, the class's name.
    """

    name: str
    root: Path
    files: list[str]
    classes: list[str]


def planned_shards(root: Path, shard_bytes: int) -> Iterator[Planned]:
    """The shards of root/<class>/, or of root/{train,val,test}/<class>/, in the order in which images are listed.

    Args:
        shard_bytes: of images in a shard, about; a larger image has one of its own.
    Raises:
        UserError: there are no classes, or one of them has no images.
    """
    splits = [split for split in SPLITS if (root / split).is_dir()] if (root / "train").is_dir() else [""]
    for split in splits:
        listing = list_split(root / split)
        sizes = stats_of(listing.root, listing.names)[:, 0]
        number = (sizes.cumsum() - sizes) // shard_bytes
        for shard in dict.fromkeys(number.tolist()):
            index = (number == shard).nonzero()[0]
            files, classes = [listing.names[i] for i in index], [listing.class_names[listing.labels[i]] for i in index]
            yield Planned(f"{split or 'train'}-{shard:05d}.tar", listing.root, files, classes)


def write_shard(shard: Planned, file: BinaryIO) -> None:
    """
    Raises:
        UserError: an image cannot be read.
    """
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number, (name, word) in enumerate(zip(shard.files, shard.classes, strict=True)):
            try:
                data = (shard.root / name).read_bytes()
            except OSError as error:
                raise UserError(f"{shard.root / name} cannot be read ({error.strerror}).") from None
            stem, ending = Path(name).stem.partition(".")[0] or "image", Path(name).suffix.lower()
            key = f"{number:08d}-{stem}"  # two classes may have an image of the same name
            for member, content in ((f"{key}{ending}", data), (f"{key}.cls", word.encode())):
                header = tarfile.TarInfo(member)
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))


@dataclass(frozen=True)
class Indexed:
    """An image of a shard: its name in it, its class, first byte and bytes."""

    name: str
    word: str
    start: int
    size: int


def index_of(path: Path, words: list[str]) -> bytes:
    """The index of a shard that write_shard wrote.

    Args:
        words: the class of each image.
    """
    images = [member for member in members(path) if not member.name.endswith(".cls")]
    rows = [[each.name, word, each.start, each.size] for each, word in zip(images, words, strict=True)]
    return json.dumps({"bytes": path.stat().st_size, "images": rows}).encode()


def read_index(shard: Path) -> list[Indexed] | None:
    """The images of a shard by the index beside it; None where there is none.

    Raises:
        BadArchive: the index is damaged, or of other bytes.
    """
    path = shard.with_name(shard.name + INDEX)
    try:
        found = read_json(path, MAX_INDEX_BYTES)
        images = [Indexed(str(name), str(word), int(start), int(size)) for name, word, start, size in found["images"]]
        total = shard.stat().st_size
        if found["bytes"] == total and all(0 <= i.start <= i.start + i.size <= total for i in images):
            return images
    except FileNotFoundError:
        return None
    except (OSError, NotReadable, ValueError, KeyError, TypeError):
        pass
    raise BadArchive(f"does not fit its index {path.name}: pack it again with src/shards.py, or remove the index")
