"""List images that lie in a few large files, each of which is read once per node."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from tqdm import tqdm

from lockstep.data.image_list import ImageList
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import (
    TRAIN,
    Item,
    LeftOut,
    list_files,
    match_group,
    parse_splits,
    resolve_root,
)
from lockstep.data.node_cache import Content, load_or_build
from lockstep.process.errors import UserError

ReadShard = Callable[[Path, Path], Content]
"""(file, folder of the cache) → what the file holds, as JSON values:

items: for each image its name in the file, its label (text, or a list of numbers), first byte,
    size, and group if a column says it, else None; perhaps numbers of further columns by
    name.
left_out: names by reason.
data: the file that it wrote into `folder` with images that cannot be read in place; else None.
files: for each image the file beside this one that it is a copy of, as of identify_file, or None;
    [] where there are none.
splits: those of images in a file to train on, if a column says.
"""


class ShardItem(NamedTuple):
    """One of the items of a ReadShard."""

    name: str
    label: Any
    start: int
    size: int
    group: str | None = None
    numbers: dict[str, Any] | None = None


# A revision such as refs/convert/parquet has two slashes, as in the hub's own addresses.
HUB_ADDRESS = re.compile(
    r"hf://datasets/(?P<repository>[^/@]+/[^/@]+)"
    r"(@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?(/(?P<folder>.+))?"
)


@dataclass
class Shards:
    """The files of one ending in a folder, or a single one.

    Args:
        module: has the options `splits` and `group`, and the cache.
        root: data.root.
        options: what `read` depends on, as JSON values.
    """

    module: ListedDataModule
    root: str | Path | None
    suffix: str
    read: ReadShard
    options: Sequence[Any]

    def __post_init__(self) -> None:
        # The first file in which a column tells the splits (True), and the first without (False).
        self._first_files: dict[bool, str] = {}
        root = self.root
        if str(root).startswith("hf://"):
            root = download_from_hub(str(root), self.suffix, self.module.cache_dir / "hub")
        self._root = resolve_root(root, f"a folder with {self.suffix} files")

    def list_images(self, label_columns: Sequence[str] = ()) -> ImageList:
        module = self.module
        left_out: LeftOut = {}
        shards = self._find_files(left_out)
        folder = self._root if self._root.is_dir() else self._root.parent
        items: list[Item] = []
        self._first_files = {}
        for name, split in tqdm(shards.items(), f"Reading {len(shards)} files", disable=None):
            items += self._list_items(folder, name, split, left_out)
        if len(self._first_files) == 2:
            raise UserError(
                f"{self._root}: a column of {self._first_files[True]} names splits, and none of "
                f"{self._first_files[False]} does. Give train, val or test in each file, or "
                "data.splits=false to draw the splits."
            )
        has_splits = True in self._first_files or any(map(_parse_path_splits, shards))
        if module.splits_option is True and not has_splits:
            raise UserError(
                f"data.splits=true, but no file in {self._root} is named as a split: rename the "
                "files train-…, val-… and test-…, or leave data.splits out."
            )
        return ImageList(
            folder,
            items,
            left_out=left_out,
            target=module.target,
            label_columns=label_columns,
            unknown=module.unknown,
        )

    def _list_items(self, folder: Path, name: str, split: int, left_out: LeftOut) -> Iterator[Item]:
        """Yield the images of one file."""
        path = folder / name
        group_option = self.module.group
        cache, shard = self._read_once(path)
        file = str(cache / shard["data"] if shard["data"] else path)
        mtimes = _get_mtimes(shard, identify_file(path))
        # Only files to train on have splits of their images.
        splits = shard["splits"] if split == TRAIN else []
        if split == TRAIN and shard["items"]:
            self._first_files.setdefault(bool(splits), name)
        for i, values in enumerate(shard["items"]):
            image = ShardItem(*values)
            group = image.group
            if group_option and group is None:
                group = match_group(group_option, image.name)
            yield Item(
                name=f"{name}: {image.name}",
                label=image.label,
                split=splits[i] if splits else split,
                size=image.size,
                mtime=mtimes[i],
                group=group,
                file=file,
                start=image.start,
                numbers=image.numbers or {},
            )
        for reason, names in shard["left_out"].items():
            left_out.setdefault(reason, []).extend(f"{name}: {inner}" for inner in names)

    def _read_once(self, path: Path) -> tuple[Path, Content]:
        """Return the folder of the cache for a file, and what the file holds."""
        identity = identify_file(path)
        cache = self.module.cache_folder([identity, self.options])
        shard = load_or_build(cache, partial(self.read, path))
        files = shard.get("files", [])
        # None is an image in the shard itself.
        files_now = [identify_file(Path(file[0])) if file else None for file in files]
        if files_now != files:
            # A file that the table names was replaced.
            cache = self.module.cache_folder([identity, self.options, files_now])
            shard = load_or_build(cache, partial(self.read, path))
        return cache, shard

    def _find_files(self, left_out: LeftOut) -> dict[str, int]:
        """Return the split of each file by its path, as its name or else its folders say."""
        root = self._root
        if root.is_file() and root.suffix.lower() == self.suffix:
            return {root.name: TRAIN}
        files = list_files(root, {}, suffixes={self.suffix}) if root.is_dir() else []
        names = [file.name for file in files]
        if not names:
            raise UserError(
                f"data.root={root} holds no {self.suffix} file. Pass the folder that contains them."
            )
        splits: dict[str, int] = {}
        unassigned = []
        for name in names:
            parts = _parse_path_splits(name)
            if parts:
                splits[name] = parts[0]
            else:
                unassigned.append(name)
        if self.module.splits_option is False or not splits:
            return dict.fromkeys(names, TRAIN)
        if unassigned:
            left_out[f"{self.suffix} files of no split"] = unassigned
        return splits


def _get_mtimes(shard: Content, identity: list[Any]) -> list[int]:
    """Return when the file of each image was changed.

    Args:
        identity: what identify_file returns of the shard itself, which most images lie in.
    """
    # A cache of an older version does not know the files of its images.
    files = shard.get("files") or [None] * len(shard["items"])
    return [(file or identity)[-1] for file in files]


def identify_file(file: Path) -> list[Any]:
    """Return path, size and time of a file, which tell whether it was replaced."""
    # A file that is gone has none. Reading it anew names it.
    if not file.is_file():
        return [str(file), 0, 0]
    stat = os.stat(file)
    return [str(file), stat.st_size, stat.st_mtime_ns]


def _parse_path_splits(name: str) -> list[int]:
    """Return the splits that a file's name, or else its folders, stand for."""
    return parse_splits("/".join(reversed(Path(name).parts)))


def download_from_hub(address: str, suffix: str, cache: Path) -> Path:
    """Copy the files of hf://datasets/OWNER/NAME[@REVISION][/FOLDER].

    Returns:
        The folder of the copy.
    """
    from huggingface_hub import snapshot_download

    parts = HUB_ADDRESS.fullmatch(address.rstrip("/"))
    if not parts:
        raise UserError(f"data.root={address}: give hf://datasets/OWNER/NAME[@REVISION][/FOLDER].")
    revision = parts["revision"]
    folder = parts["folder"] or ""
    try:
        copy = snapshot_download(
            parts["repository"],
            repo_type="dataset",
            revision=unquote(revision) if revision else None,
            cache_dir=cache,
            allow_patterns=f"{folder}/*{suffix}".lstrip("/"),
        )
    # The network, the hub and its authentication raise many kinds.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"data.root={address} cannot be fetched ({type(error).__name__}: {reason})."
        ) from None
    return Path(copy, folder)
