"""Images in a few large files: the base of such data modules, and WebDataset's tar files."""

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lockstep.data.decoding import SUFFIXES
from lockstep.data.image_list import ImageList
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import (
    TRAIN,
    Item,
    LeftOut,
    files_below,
    group_of,
    local_root,
    splits_in,
)
from lockstep.data.node_cache import Content, cached
from lockstep.process.errors import UserError

HINT_ON_FIELD = " (where a key.json holds the label: data.label_field=FIELD)"


class ShardedDataModule(ListedDataModule):
    """Images in shards; a subclass lists the content of a file. Its yaml explains the options."""

    suffix: str
    label_columns: Sequence[str] = ()  # with several labels, their names
    shard_options: Sequence[Any] = ()  # what `read_shard` depends on, as JSON values

    def __init__(self, *, root: str | Path | None = None, **options: Any) -> None:
        super().__init__(**options)
        if str(root).startswith("hf://"):
            root = from_hub(str(root), self.suffix, self.cache_dir / "hub")
        self._root = local_root(root, f"a folder with {self.suffix} files")

    def read_shard(self, path: Path, folder: Path) -> Content:
        """Return what a file holds, as JSON values.

        items: for each image its name in the file, its label (text, or a list of numbers), first
            byte, size, and group if `group` is a column, else None.
        left_out: names by reason.
        data: the file that it wrote into `folder`, of the cache, with images that cannot be read
            in place; else None.
        splits: those of images in a file to train on, if a column says.
        """
        raise NotImplementedError

    def list_images(self) -> ImageList:
        left_out: LeftOut = {}
        shards = self._find(left_out)
        folder = self._root if self._root.is_dir() else self._root.parent
        items: list[Item] = []
        for name, split in tqdm(shards.items(), f"Reading {len(shards)} files", disable=None):
            items += self._items_of(folder, name, split, left_out)
        if self.splits_option is True and all(item.split == TRAIN for item in items):
            raise UserError(
                f"data.splits=true, but no file in {self._root} is named as a split: rename the "
                "files train-…, val-… and test-…, or leave data.splits out."
            )
        return ImageList(
            folder,
            items,
            left_out=left_out,
            target=self.target,
            label_columns=self.label_columns,
            unknown=self.unknown,
        )

    def _items_of(self, folder: Path, name: str, split: int, left_out: LeftOut) -> Iterator[Item]:
        """Yield the images of one file, which is read once per node."""
        path = folder / name
        stat = os.stat(path)
        identity = [str(path), stat.st_size, stat.st_mtime_ns]
        kept = self.cache_folder([identity, self.shard_options])
        shard = cached(kept, partial(self.read_shard, path))
        file = str(kept / shard["data"] if shard["data"] else path)
        for i, (inner, label, start, size, group) in enumerate(shard["items"]):
            item = Item(
                f"{name}: {inner}", label, split, size, stat.st_mtime_ns, group, file, start
            )
            if split == TRAIN and shard["splits"]:
                item.split = shard["splits"][i]
            if self.group and group is None:
                item.group = group_of(self.group, inner)
            yield item
        for reason, names in shard["left_out"].items():
            left_out.setdefault(reason, []).extend(f"{name}: {inner}" for inner in names)

    def _shards(self) -> list[str]:
        return [file.name for file in files_below(self._root, {}, suffixes={self.suffix})]

    def _find(self, left_out: LeftOut) -> dict[str, int]:
        """Return the split of each file by its path, as its name or else its folders say."""
        if self._root.is_file() and self._root.suffix.lower() == self.suffix:
            return {self._root.name: TRAIN}
        names = self._shards() if self._root.is_dir() else []
        if not names:
            raise UserError(
                f"data.root={self._root} holds no {self.suffix} file. Pass the folder that "
                "contains them."
            )
        splits = {name: splits_in("/".join(reversed(Path(name).parts))) for name in names}
        if self.splits_option is False or not any(splits.values()):
            return dict.fromkeys(names, TRAIN)
        others = [name for name in names if not splits[name]]
        if others:
            left_out[f"{self.suffix} files of no split"] = others
        return {name: parts[0] for name, parts in splits.items() if parts}


def from_hub(address: str, suffix: str, cache: Path) -> Path:
    """Copy the files of hf://datasets/OWNER/NAME[@REVISION][/FOLDER], and return the folder of the copy."""
    from huggingface_hub import snapshot_download

    owner, name, *inner = f"{address.removeprefix('hf://datasets/').strip('/')}/".split("/")
    name, _, revision = name.partition("@")
    try:
        copy = snapshot_download(
            f"{owner}/{name}", repo_type="dataset", revision=revision or None, cache_dir=cache,
            allow_patterns="/".join([*inner[:-1], f"*{suffix}"]),
        )  # fmt: skip
    except Exception as error:  # of the network, the hub and its authentication
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"data.root={address} cannot be fetched ({type(error).__name__}: {reason})."
        ) from None
    return Path(copy, *inner)


class WebDatasetDataModule(ShardedDataModule):
    """Uncompressed tar files with key.jpg beside key.cls or key.json, which are read in place."""

    suffix = ".tar"

    def __init__(self, *, label_field: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._label_field, self.shard_options = label_field, [label_field]

    def read_shard(self, path: Path, folder: Path) -> Content:
        left_out = LeftOut()
        try:
            images, labels = self._read_members(path, left_out)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(
                f"{path} is cut off or no uncompressed tar file ({error}): repair or remove it."
            ) from None
        items = []
        image_of_key: dict[str, str] = {}
        for member in images:
            key = self._key_of(path, member.name, labels)
            other = image_of_key.setdefault(key, member.name)
            if other != member.name:
                raise UserError(
                    f"{path}: {other} and {member.name} have one label: keep one image for each "
                    "key."
                )
            label = self._label_in(path, key, labels[key])
            items.append((member.name, label, member.offset_data, member.size, None))
        return {"items": items, "data": None, "left_out": left_out, "splits": []}

    @property
    def _label_suffix(self) -> str:
        return ".json" if self._label_field else ".cls"

    def _read_members(
        self, path: Path, left_out: LeftOut
    ) -> tuple[list[tarfile.TarInfo], dict[str, bytes]]:
        """Return the images of a file, and the content of the labels by their keys."""
        images = []
        labels = {}
        with tarfile.open(path, "r:") as archive:
            for member in filter(tarfile.TarInfo.isfile, archive):
                key, ending = os.path.splitext(member.name)
                if os.path.basename(member.name).startswith("."):
                    left_out.setdefault("hidden members", []).append(member.name)
                elif ending.lower() == self._label_suffix:
                    labels[key] = archive.extractfile(member).read()
                elif ending.lower() in SUFFIXES:
                    images.append(member)
                else:
                    reason = f"{ending.lower() or 'nameless'} members"
                    left_out.setdefault(reason, []).append(member.name)
            if archive.offset > path.stat().st_size:
                raise EOFError("it ends within a member")
        return images, labels

    def _key_of(self, path: Path, name: str, labels: Mapping[str, bytes]) -> str:
        """Return the key of an image's label: its name up to its last dot, else to its first."""
        folder, base = os.path.split(name)
        keys = [os.path.splitext(name)[0], os.path.join(folder, base.partition(".")[0])]
        for key in keys:
            if key in labels:
                return key
        hint = "" if self._label_field else HINT_ON_FIELD
        raise UserError(f"{path}: {name} has no {self._label_suffix} file beside it{hint}.")

    def _label_in(self, path: Path, key: str, content: bytes) -> str:
        try:
            label = content.decode().strip()
            if self._label_field:
                label = json.loads(content)[self._label_field]
            if label == "" or not isinstance(label, str | int | float):
                raise ValueError(f"{str(label)[:50]!r} is neither text nor a number")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: {key}{self._label_suffix} holds no label ({type(error).__name__}: "
                f"{error})."
            ) from None
        return str(label)
