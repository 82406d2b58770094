"""data.root=s3://…: a data module gets the folder of a copy on the node's disk, and what reads the bucket meanwhile."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.config.instantiate import resolve_target
from lockstep.data.image_tree import SUFFIXES
from lockstep.data.root import GROUPS
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.hooks import ReadsBuckets
from lockstep.storage.copy_beside import copy_beside
from lockstep.storage.fetch import is_s3
from lockstep.storage.local_copy import Copy, listed_copy
from lockstep.storage.remote_reads import RemoteReads

ADDRESSES = ("root", "images")  # the last one given holds the images


class CopiedBucket:
    """data.places.InBucket.

    Args:
        limit_gib: of the copy; None: as the disk has room.
    """

    def __init__(self, copy: Copy, limit_gib: float | None) -> None:
        self.copy, self.limit_gib = copy, limit_gib
        self.folder, self.reads = copy.files.absolute(), RemoteReads.of(copy)
        self.etags = copy.etags

    def complete(self) -> None:
        self.copy.complete(self.limit_gib)

    def complete_beside(self) -> bool:
        return copy_beside(self.copy, self.limit_gib)


def on_this_node(options: Mapping[str, Any], s3: Config) -> tuple[Config, CopiedBucket | None]:
    """The options of a data module with a copy in place of each s3:// address, and where its images are.

    The copy is whole at once where the module does not read buckets (runs/hooks.py), or only a table lies there.

    Raises:
        UserError: as of listed_copy and Copy.complete.
    """
    given = {key: options[key] for key in ADDRESSES if options.get(key)}
    asked = {key: str(value) for key, value in given.items() if is_s3(value)}
    limit_gib = options.get("cache_gib")
    cache = Path(options.get("cache_dir") or "")
    copies = {key: listed_copy(address, s3, cache, SUFFIXES | GROUPS.keys()) for key, address in asked.items()}
    here = {**options, **{key: str(copy.root) for key, copy in copies.items()}}
    images = copies.get([*given][-1]) if given else None
    if images is not None and _reads_buckets(options):
        return here, CopiedBucket(images, limit_gib)
    for copy in copies.values():
        copy.complete(limit_gib)
    return here, None


def _reads_buckets(options: Mapping[str, Any]) -> bool:
    return "_target_" in options and isinstance(resolve_target(options["_target_"], "data._target_"), ReadsBuckets)


@contextmanager
def said_by_address(options: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[None]:
    """A UserError of the block names the bucket, where something can be mended, and not the copy.

    Args:
        options: of a data module, as the user gave them; here: what `on_this_node` made of them.
    """
    try:
        yield
    except UserError as error:
        sentence = str(error)
        for key in ADDRESSES:
            if is_s3(address := str(options.get(key) or "")):
                copy, address = Path(here[key]).absolute(), address.rstrip("/")
                if copy.is_file():  # a table names the images beside it
                    copy, address = copy.parent, address.rpartition("/")[0]
                sentence = sentence.replace(str(copy), address)
        raise UserError(sentence) from None
