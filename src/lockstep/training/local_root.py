"""data.root=s3://…: a data module gets the folder of a copy on this node's disk."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.storage.s3 import is_s3
from lockstep.storage.sync import sync

ADDRESSES = ("root", "images")  # the options of a data module that may be s3:// addresses


def on_this_node(options: Mapping[str, Any], s3: Config) -> Config:
    """Return the options of a data module with the path of a copy in place of each s3:// address.

    Raises:
        UserError: as storage.sync.sync.
    """
    here, cache = dict(options), Path(options.get("cache_dir") or "data/cache")
    for key in ADDRESSES:
        if is_s3(address := str(options.get(key) or "").rstrip("/")):
            folder, _, name = address.rpartition("/")
            beside = name.endswith(".csv") and not options.get("images")  # the table names images beside it
            here[key] = str(sync(folder, cache, s3) / name if beside else sync(address, cache, s3))
    return here


@contextmanager
def said_by_address(options: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[None]:
    """Let a UserError of the block name the bucket, where the user can correct something, and not the copy.

    Args:
        options: of a data module, as the user gave them.
        here: what `on_this_node` made of them.
    """
    try:
        yield
    except UserError as error:
        sentence = str(error)
        for key in ADDRESSES:
            if is_s3(address := str(options.get(key) or "").rstrip("/")):
                copy = Path(here[key])
                if copy.is_file():
                    copy, address = copy.parent, address.rpartition("/")[0]
                sentence = sentence.replace(str(copy), address)
        raise UserError(sentence) from None
