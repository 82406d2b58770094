"""What a user gave as data.root: an address that has to be copied first, or something that another group reads."""

import itertools
import os
from pathlib import Path

from lockstep.data.image_tree import SUFFIXES
from lockstep.runs.errors import UserError

GROUPS = {".csv": "csv", ".parquet": "parquet", ".tar": "webdataset"}
LOOKED_AT = 1000  # entries of a folder, which may hold millions


def on_this_disk(root: str | Path) -> Path:
    """Where it lies, whatever the working directory will be.

    Raises:
        UserError: it is an address.
    """
    scheme, sign, _ = str(root).partition("://")
    if sign:
        copied = f", in Python local_copy({str(root)!r}, …) of lockstep.storage.local_copy" if scheme == "s3" else ""
        raise UserError(
            f"data.root={root} is an address, and images are read from a disk: copy them first{copied}. train.py does "
            "that by itself for s3://bucket/prefix."
        )
    return Path(root).absolute()


def what_reads(root: Path, mine: str) -> str:
    """For the end of an error of the group `mine`: the group that reads what lies there, if it is another."""
    inner = [*_some_of(root), *_some_of(root / "train")]
    for path in (root, *inner, *_some_of(root / "data")):
        group = GROUPS.get(path.suffix.lower(), mine)
        if group != mine and path.is_file():
            return f" Did you mean data={group} data.root={path if group == 'csv' else root}?"
    if mine != "image_folder" and any(path.suffix.lower() in SUFFIXES for each in inner for path in _some_of(each)):
        return f" Did you mean data=image_folder data.root={root}?"
    return ""


def _some_of(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in itertools.islice(entries, LOOKED_AT))
    except OSError:
        return []
