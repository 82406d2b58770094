"""List images that lie in a few large files. Each node reads a file once."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from lockstep.data.node_cache import Metadata, load_or_build
from lockstep.process.errors import UserError

ReadShard = Callable[[Path, Path], Metadata]
"""A function of a file and its folder in the cache, which lists the file as JSON values:

items: the values of a ShardItem for each image.
left_out: the names of what is skipped, by reason.
data: the name of the file in the folder that it wrote, if the images cannot be read in place, else
    None.
files: for each image the result of identify_file for the file that it was copied from, or None; []
    if no image is a copy.
splits: the split of each image, if a column says it, else [].
"""


class ShardItem(NamedTuple):
    """An image in a file of several.

    Attributes:
        label: text, or a list of numbers.
        offset: its first byte in the file.
        num_bytes: the number of its bytes.
        group: the group that a column says; None: no column says it.
        column_values: its values in further columns by name.
    """

    name: str
    label: Any
    offset: int
    num_bytes: int
    group: str | None = None
    column_values: dict[str, Any] | None = None


# A revision such as refs/convert/parquet has two slashes, as in the hub's own addresses.
HUB_ADDRESS = re.compile(
    r"hf://datasets/(?P<repository>[^/@]+/[^/@]+)"
    r"(@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?(/(?P<folder>.+))?"
)


@dataclass
class Shards:
    """The files of one ending in a folder, or a single file.

    Args:
        module: the data module, with the options `splits` and `group`, and the cache.
        root: data.root.
        options: the options that change what `read` returns, as JSON values.
    """

    module: ListedDataModule
    root: str | Path | None
    suffix: str
    read: ReadShard
    options: Sequence[Any]

    def __post_init__(self) -> None:
        root = self.root
        if str(root).startswith("hf://"):
            root = download_from_hub(str(root), self.suffix, self.module.cache_dir / "hub")
        self._root = resolve_root(root, f"a folder with {self.suffix} files")

    def list_images(self, label_columns: Sequence[str] = ()) -> ImageList:
        module = self.module
        left_out: LeftOut = {}
        split_of_file = self._find_files(left_out)
        folder = self._root if self._root.is_dir() else self._root.parent
        items: list[Item] = []
        # The first file to train on whose column says splits (True), and the first without (False).
        first_files: dict[bool, str] = {}
        for name, split in tqdm(split_of_file.items(), "Reading files", disable=None):
            shard = self._read_once(folder / name)
            if split == TRAIN and shard["items"]:
                first_files.setdefault(bool(shard["splits"]), name)
            items += self._list_items(folder, name, split, shard)
            for reason, names in shard["left_out"].items():
                left_out.setdefault(reason, []).extend(f"{name}: {inner}" for inner in names)
        self._check_splits(first_files, split_of_file)
        return ImageList(
            folder,
            items,
            left_out=left_out,
            target=module.target,
            label_columns=label_columns,
            unknown=module.unknown,
        )

    def _check_splits(self, first_files: dict[bool, str], files: Iterable[str]) -> None:
        """Refuse files of which only some have splits, and data.splits=true without any.

        Args:
            first_files: the first file to train on with splits of its images, and the first
                without.
            files: the names of all files.
        """
        if len(first_files) == 2:
            raise UserError(
                f"{self._root}: a column of {first_files[True]} names splits, and none of "
                f"{first_files[False]} does. Give train, val or test in each file, or "
                "data.splits=false to draw the splits."
            )
        has_splits = True in first_files or any(map(_parse_path_splits, files))
        if self.module.splits_option is True and not has_splits:
            raise UserError(
                f"data.splits=true, but no file in {self._root} is named as a split: rename the "
                "files train-…, val-… and test-…, or leave data.splits out."
            )

    def _list_items(self, folder: Path, name: str, split: int, shard: Metadata) -> Iterator[Item]:
        """Yield the images of one file, which `_read_once` has read."""
        group_option = self.module.group
        mtimes = _get_mtimes(shard, identify_file(folder / name))
        # Only files to train on have splits of their images.
        splits = shard["splits"] if split == TRAIN else []
        for i, values in enumerate(shard["items"]):
            image = ShardItem(*values)
            group = image.group
            if group_option and group is None:
                group = match_group(group_option, image.name)
            yield Item(
                name=f"{name}: {image.name}",
                label=image.label,
                split=splits[i] if splits else split,
                num_bytes=image.num_bytes,
                mtime=mtimes[i],
                group=group,
                shard=shard["data"],
                offset=image.offset,
                column_values=image.column_values or {},
            )

    def _read_once(self, path: Path) -> Metadata:
        """Return what ReadShard says of a file, with `data` as the path where its images lie."""
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
        return {**shard, "data": str(cache / shard["data"] if shard["data"] else path)}

    def _find_files(self, left_out: LeftOut) -> dict[str, int]:
        """Return the split of each file, which its name says or else its folders.

        Args:
            left_out: gets the files of no split.
        """
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


def _get_mtimes(shard: Metadata, identity: list[Any]) -> list[int]:
    """Return the time of the last change of each image's file.

    Args:
        identity: what identify_file returns for the shard itself, where most images lie.
    """
    # A cache of an older version does not know the files of its images.
    files = shard.get("files") or [None] * len(shard["items"])
    return [(file or identity)[-1] for file in files]


def identify_file(file: Path) -> list[Any]:
    """Return path, size and time of a file. A file that was replaced has others."""
    # A file that is gone has no size. An error names it when it is read.
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
