"""A folder of images, one folder per class, packed into tar shards as WebDataset has them: key.jpg beside key.cls.

The same folder gives the same shards, byte for byte, on every machine.
"""

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.data.image_list import SPLITS
from lockstep.data.image_tree import list_split
from lockstep.data.places import stats_of
from lockstep.runs.errors import UserError


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
