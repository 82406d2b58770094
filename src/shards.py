"""Pack a folder of images, one folder per class, into tar shards for data=webdataset: many small files copy slowly.

    python src/shards.py photographs shards                    of <class>/ or {train,val,test}/<class>/
    python src/shards.py photographs s3://bucket/shards [--endpoint-url=…] [--shard-mib=256]

index.json there names each shard with its bytes and sha256; started again, it leaves alone what is there and whole.
NAME.tar.index says where the images of a shard are: a run can begin before the shard has come.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import argparse
import hashlib
import json
import logging
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.data.progress import progress
from lockstep.data.tar_shards import INDEX as OF_A_SHARD
from lockstep.data.tar_shards import index_of, planned_shards, write_shard
from lockstep.runs.errors import EXIT_OK, UserError
from lockstep.runs.files import sha256_of, write_atomically
from lockstep.runs.foreign_files import NotReadable, parse_json
from lockstep.runs.output import set_up
from lockstep.runs.script import exit_code_of
from lockstep.storage.bucket import open_store, read_small
from lockstep.storage.fetch import is_s3
from lockstep.storage.object_store import StoreError

log = logging.getLogger(__name__)

INDEX = "index.json"


@dataclass(frozen=True)
class Packed:
    """A shard that was written, as the index has it by its name."""

    bytes: int
    sha256: str
    images: int


class Folder:
    """Shards on this machine's disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def index(self) -> bytes | None:
        return (self.path / INDEX).read_bytes() if (self.path / INDEX).exists() else None

    def holds(self, name: str, size: int, sha256: str) -> bool:
        path = self.path / name
        return path.exists() and path.stat().st_size == size and sha256_of(path) == sha256

    def put(self, name: str, file: Path) -> None:
        write_atomically(self.path / name, lambda out: out.write(file.read_bytes()), binary=True)

    def put_small(self, name: str, data: bytes) -> None:
        write_atomically(self.path / name, lambda out: out.write(data), binary=True)


class Bucket:
    """Shards in a bucket, which verifies what it is sent."""

    def __init__(self, uri: str, endpoint_url: str | None) -> None:
        self.store = open_store({"endpoint_url": endpoint_url}, uri)

    def index(self) -> bytes | None:
        return read_small(self.store, self.store.prefix + INDEX)[0]

    def holds(self, name: str, size: int, sha256: str) -> bool:
        try:
            found = self.store.head(self.store.prefix + name)
        except StoreError as error:
            if error.kind != "missing":
                raise
            return False
        return (found.bytes, found.sha256) == (size, sha256)

    def put(self, name: str, file: Path) -> None:
        self.store.put(self.store.prefix + name, file, sha256=sha256_of(file))

    def put_small(self, name: str, data: bytes) -> None:
        self.store.put(self.store.prefix + name, data)


def pack(source: Path, target: Folder | Bucket, shard_bytes: int) -> int:
    """
    Raises:
        UserError: no folder of classes, an image that cannot be read, another folder's shards there.
        StoreError: of the bucket.
    """
    shards = list(planned_shards(source, shard_bytes))
    index = _known(target.index(), {shard.name for shard in shards})
    with progress(f"Packing {len(shards)} shards", len(shards)) as advance, tempfile.TemporaryDirectory() as scratch:
        for shard in shards:
            path = Path(scratch) / shard.name
            with path.open("wb") as file:
                write_shard(shard, file)
            said = Packed(path.stat().st_size, sha256_of(path), len(shard.files))
            if index.get(shard.name) != said or not target.holds(shard.name, said.bytes, said.sha256):
                target.put(shard.name, path)
                index[shard.name] = said
                text = json.dumps({name: asdict(each) for name, each in index.items()}, indent=1)
                target.put_small(INDEX, text.encode())
            where = index_of(path, shard.classes)
            if not target.holds(shard.name + OF_A_SHARD, len(where), hashlib.sha256(where).hexdigest()):
                target.put_small(shard.name + OF_A_SHARD, where)
            path.unlink()
            advance(1)
    images, size = sum(each.images for each in index.values()), sum(each.bytes for each in index.values())
    log.info(f"{images} images in {len(index)} shards, {size / 2**30:.3g} GiB.")
    return EXIT_OK


def _known(data: bytes | None, names: set[str]) -> dict[str, Packed]:
    """What an earlier start has written down."""
    try:
        found = {} if data is None else {name: Packed(**shard) for name, shard in parse_json(data).items()}
    except (NotReadable, AttributeError, TypeError):
        raise UserError(f"{INDEX} there is no index of shards: give an empty place.") from None
    if others := sorted(found.keys() - names):
        raise UserError(f"{INDEX} there names {others[0]}, of another folder or another size: give an empty place.")
    return found


def main(argv: list[str]) -> int:
    set_up()
    parser = argparse.ArgumentParser(prog="shards.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a folder with one folder of images per class")
    parser.add_argument("target", help="a folder, or s3://bucket/prefix")
    parser.add_argument("--shard-mib", type=int, default=256, help="of images in a shard, about")
    parser.add_argument("--endpoint-url", help="of a store that speaks S3; without: Amazon's")
    given = parser.parse_args(argv)

    def task() -> int:
        if given.shard_mib < 1:
            raise UserError(f"--shard-mib={given.shard_mib}: give 1 or more.")
        target = Bucket(given.target, given.endpoint_url) if is_s3(given.target) else Folder(Path(given.target))
        return pack(given.source, target, given.shard_mib * 2**20)

    return exit_code_of(task, StoreError)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
