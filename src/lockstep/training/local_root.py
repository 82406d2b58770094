"""data.root=s3://…: a data module gets the folder of a complete copy on the node's disk."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.data.decoding import SUFFIXES
from lockstep.data.listing import GROUPS
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.storage.fetch import is_s3
from lockstep.storage.local_copy import listed_copy

ADDRESSES = ("root", "images")


def on_this_node(options: Mapping[str, Any], s3: Config) -> Config:
    """Return the options of a data module with the path of a copy in place of each s3:// address.

    Raises:
        UserError: as of listed_copy and Copy.complete.
    """
    here = dict(options)
    for key in ADDRESSES:
        if is_s3(address := str(options.get(key) or "")):
            copy = listed_copy(address, s3, Path(options.get("cache_dir") or ""), SUFFIXES | GROUPS.keys())
            copy.complete(None)
            here[key] = str(copy.root)
    return here


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
